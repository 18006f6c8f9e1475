"""Spatial parallelism: samples cut into parts, halos exchanged (Dryden et al. 2019, arXiv:1903.06681).

ParaDL's ``spatial`` and, with replicas, its ``data+spatial`` (Kahira et al., HPDC 2021).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.spec import RunSpec
from hpcbench.errors import ConfigError, WorkerError
from hpcbench.parallel.datasets import input_shape
from hpcbench.parallel.halo import own_box, volume
from hpcbench.parallel.layers import Layer as Row
from hpcbench.parallel.mesh import Mesh
from hpcbench.parallel.spatial import (
    CONVOLUTIONS,
    MAX_POOLS,
    NORMS,
    WINDOWED,
    Split,
    positions,
    window_layer,
)
from hpcbench.parallel.spatial_limits import split_of
from hpcbench.worker.data.feed import Batch, Feed
from hpcbench.worker.groups import make_group
from hpcbench.worker.reducer import GradientReducer
from hpcbench.worker.spatial.batch_norm import SplitBatchNorm
from hpcbench.worker.spatial.convolution import SplitConvolution
from hpcbench.worker.spatial.exchange import Cut, part
from hpcbench.worker.spatial.pooling import SplitAveragePool, SplitMaxPool
from hpcbench.worker.spatial.switch import Gather, SplitGlobalPool
from hpcbench.worker.spatial.tables import table_for
from hpcbench.worker.strategies.base import Place
from hpcbench.worker.strategies.model_parallel import ModelParallel


class Spatial(ModelParallel):
    """The ranks of a replica hold all weights and a part of every feature map, until the cut part of the model ends.

    Gradients of the cut layers are sums over a replica's ranks too; those of the whole ones are alike on all of them.
    """

    axis = "sp"
    split: Split | None = None

    def setup(self, model: nn.Sequential, spec: RunSpec, place: Place) -> None:
        """One group more than others have: all that add up the gradients of cut layers."""
        self.sharing = make_group(Mesh.of(spec), place, "dp", "sp")
        super().setup(model, spec, place)
        if self.own.size > 1 and place.device.type == "cuda":
            # NCCL's first call in a group has to be one that all its ranks make; a halo is not.
            dist.barrier(group=self.own.members(), device_ids=[place.device.index or 0])

    def divide(self, model: nn.Sequential, spec: RunSpec) -> nn.Sequential:
        """Layers replaced one by one; the input is cut, and gathered again, by hooks."""
        if self.own.size == 1:
            return model
        try:
            self.split = split = split_of(spec, table_for(model, spec))
        except ConfigError as error:
            raise WorkerError(
                f"spatial: {error.message}", status="unsupported", hint="a smaller sp_degree, or another grid"
            ) from error
        _refuse_shared_weights(model, split)
        cut = Cut(self.own, split.grid)
        for row in split.rows[: split.end]:
            if row.kind in WINDOWED | NORMS:
                replaced = self._replaced(model.get_submodule(row.name), row, cut)
                if replaced is not None:
                    _put(model, row.name, replaced)
        self.cut_input = partial(_own_part, cut, input_shape(spec.dataset, spec.input_size)[1:])
        model.register_forward_pre_hook(lambda _module, args: (self.cut_input(args[0]), *args[1:]))
        self._switch(model, split, cut)
        return model

    def _replaced(self, whole: Any, row: Row, cut: Cut) -> nn.Module | None:
        """What takes the place of a layer; ``None`` where it stays."""
        if row.kind in NORMS:
            if self.options["batch_norm"] == "local":
                return None
            extents = positions(row.input_shape)
            shares = tuple(volume(own_box(extents, cut.grid, place)) for place in range(cut.group.size))
            return SplitBatchNorm(whole, shares, cut.group)
        layer = window_layer(row)
        if row.kind in CONVOLUTIONS:
            if whole.padding_mode != "zeros":
                raise _unsupported(row, f"padding_mode {whole.padding_mode!r}, only zeros can be cut")
            return SplitConvolution(whole, cut, layer, self.options["overlap"])
        if row.kind in MAX_POOLS:
            if whole.return_indices:
                raise _unsupported(row, "return_indices, which would be a part's own")
            return SplitMaxPool(cut, layer)
        return SplitAveragePool(whole, cut, layer)

    def _switch(self, model: nn.Sequential, split: Split, cut: Cut) -> None:
        """Make what comes out of the cut part whole on every rank."""
        row = split.rows[split.end]
        if split.by_mean and self.options["global_pool"] == "reduce":
            _put(model, row.name, SplitGlobalPool(cut, split.extents))
            return
        gather = Gather(cut, split.extents)
        if split.block == len(model):
            model.register_forward_hook(lambda _module, _args, output: gather(output))
            return
        first = list(model)[split.block] if split.begins_block else model.get_submodule(row.name)
        first.register_forward_pre_hook(lambda _module, args: (gather(args[0]), *args[1:]))

    def make_reducers(self, module: nn.Module) -> list[GradientReducer]:
        """Cut layers over all ranks that share them, whole ones across replicas."""
        if self.split is None:
            return super().make_reducers(module)
        cap = float(self.options["bucket_cap_mb"])
        named = dict(module.named_parameters())
        groups = (
            ([one for name, one in named.items() if self.split.is_cut(name)], self.sharing),
            ([one for name, one in named.items() if not self.split.is_cut(name)], self.groups["dp"]),
        )
        return [
            GradientReducer(parameters, group.members(), cap)
            for parameters, group in groups
            if parameters and group.size > 1
        ]

    def batch(self, feed: Feed, step: int) -> Batch:
        """The own part alone: the whole samples are let go before the forward pass."""
        inputs, labels = super().batch(feed, step)
        return (inputs if self.split is None else self.cut_input(inputs)), labels


def _own_part(cut: Cut, extents: tuple[int, ...], inputs: Tensor) -> Tensor:
    """This rank's part of whole samples; a part stays what it is."""
    if tuple(inputs.shape[2:]) != extents:
        return inputs
    image = tuple(range(extent) for extent in extents)
    # A copy: a view would keep the whole.
    return part(inputs, own_box(extents, cut.grid, cut.group.place), image).clone()


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(owner), own_name, module)


def _refuse_shared_weights(model: nn.Module, split: Split) -> None:
    """A weight of cut and whole layers would need two sums at once."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if split.is_cut(name) != split.is_cut(other):
            raise WorkerError(
                f"spatial: {other} and {name} are one weight, of a layer that is cut and of one that is whole",
                status="unsupported",
                hint="let options.until end the cut part before both, or after",
            )


def _unsupported(row: Row, what: str) -> WorkerError:
    return WorkerError(
        f"spatial: layer {row.name} ({row.kind}) has {what}",
        status="unsupported",
        hint="let options.until end the cut part before that block",
    )
