"""The base of strategies that split layers over ranks: process groups, gradient reduction across replicas, gathered
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.mesh import RankMesh
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.distributed.process_groups import RankContext, RankGroup, make_axis_groups
from hpcbench.worker.strategies.base import DataParallelStrategy, chosen_options


class TensorSharding(NamedTuple):
    """A tensor of which every rank of a group holds a part: the parts' extents along ``dim``, in the group's order."""

    dim: int
    extents: tuple[int, ...]


class ModelParallelStrategy(DataParallelStrategy):
    """A replica is shared by the ranks along ``axis``; replicas lie along ``dp``.

    A subclass replaces layers in ``divide``. A layer that holds a part of a parameter or buffer says so in an attribute
    ``shards: dict[str, Shard]``, by the tensor's own name within the layer; under all other names ranks hold the same.
    """

    axis: str
    forward_is_collective = True

    def setup(self, model: nn.Sequential, spec: RunSpec, place: RankContext) -> None:
        """Groups first: ``divide`` needs them."""
        self.mesh = RankMesh.of(spec)
        self.options = chosen_options(spec)
        self.groups = make_axis_groups(self.mesh, place)
        self.own = self.groups[self.axis]
        super().setup(model, spec, place)
        self.replica = self.mesh.coordinates(place.rank).dp

    def own_part(self, model: nn.Sequential, spec: RunSpec) -> nn.Module:
        """What the subclass makes of it."""
        return self.divide(model, spec)

    def divide(self, model: nn.Sequential, spec: RunSpec) -> nn.Module:
        """``model`` (on the host) with this rank's parts in place of what is shared."""
        raise NotImplementedError

    def wrap(self, module: nn.Module, spec: RunSpec, place: RankContext) -> nn.Module:
        """``module`` itself: gradients are reduced by hooks on its parameters."""
        self.reducers = self.make_reducers(module)
        return module

    def make_reducers(self, module: nn.Module) -> list[GradientReducer]:
        """Who adds up gradients over which ranks: by default every one across replicas."""
        group = self.groups["dp"]
        return [GradientReducer(list(module.parameters()), group.members())] if group.size > 1 else []

    def without_sync(self) -> AbstractContextManager[None]:
        """Gradients stay unsent until the step's last micro-batch."""
        return self._paused()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with ExitStack() as stack:
            for reducer in self.reducers:
                stack.enter_context(reducer.paused())
            yield

    def finish_backward(self) -> None:
        """Wait for the sums."""
        for reducer in self.reducers:
            reducer.finish()

    def _take_loss(self) -> Tensor:
        """Every rank of a replica has computed the same; one of them says it."""
        loss = super()._take_loss()
        return loss if self.own.place == 0 else torch.zeros_like(loss)

    def weights(self) -> dict[str, Tensor]:
        """Gathered on every rank, one tensor after another."""
        state = self.module.state_dict()
        return {name: self._whole(name, tensor) for name, tensor in state.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Gathered on every rank, one tensor after another."""
        named = self.module.named_parameters()
        return {name: self._whole(name, one.grad) for name, one in named if one.grad is not None}

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        owner, _, own_name = name.rpartition(".")
        shards: dict[str, TensorSharding] = getattr(self.module.get_submodule(owner), "shards", {})
        shard = shards.get(own_name)
        return tensor.detach() if shard is None else gather_shards(tensor.detach(), shard, self.own)


def gather_shards(tensor: Tensor, shard: TensorSharding, group: RankGroup) -> Tensor:
    """All parts side by side. A collective where there are several; parts are padded to the largest one's extent."""
    if group.size == 1:
        return tensor
    widest = max(shard.extents)
    padded = tensor.contiguous()
    if tensor.shape[shard.dim] < widest:
        shape = list(tensor.shape)
        shape[shard.dim] = widest
        padded = tensor.new_zeros(shape)
        padded.narrow(shard.dim, 0, tensor.shape[shard.dim]).copy_(tensor)
    parts = [torch.empty_like(padded) for _ in range(group.size)]
    dist.all_gather(parts, padded, group=group.members())
    return torch.cat(
        [part.narrow(shard.dim, 0, extent) for part, extent in zip(parts, shard.extents, strict=True)], shard.dim
    )
