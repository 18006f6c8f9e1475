"""The module of one pipeline rank: its chunks under the whole model's names, tied weights and deferred BatchNorm
statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from hpcbench.parallel.pipeline.schedules import FORWARD, Action, PipelineLayout
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.strategies.pipeline.chunk import ActivationMetaCache


class TiedParameter(NamedTuple):
    """A weight that the pipeline's ranks at ``places`` hold a copy of; ``parameter`` is this rank's, if it has one."""

    places: tuple[int, ...]
    parameter: nn.Parameter | None


def sum_tied_gradients(ties: Sequence[TiedParameter], group: RankGroup) -> None:
    """Replace every copy's gradient by the sum of all, which is formed on the first holder: alike to the last bit."""
    for places, parameter in ties:
        if parameter is None or len(places) == 1:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad, first = parameter.grad, places[0]
        if group.place != first:
            dist.send(grad.contiguous(), group=group.members(), group_dst=first)
            received = torch.empty_like(grad, memory_format=torch.contiguous_format)
            dist.recv(received, group=group.members(), group_src=first)
            grad.copy_(received)
            continue
        for other in places[1:]:
            received = torch.empty_like(grad, memory_format=torch.contiguous_format)
            dist.recv(received, group=group.members(), group_src=other)
            grad.add_(received)
        for other in places[1:]:
            dist.send(grad.contiguous(), group=group.members(), group_dst=other)


_BatchNorm = nn.modules.batchnorm._BatchNorm


class DeferredBatchNorm:
    """A micro-batch is still normalised by its own mean and variance; the running ones move once per step.

    Sums are kept in fp32 at least. What a backward pass computes again is not counted twice.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [one for one in module.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]
        self._sums: dict[_BatchNorm, list[Tensor]] = {}
        self._is_counting = False
        for norm in self._norms:
            norm.register_forward_pre_hook(self._see)

    def before(self, action: Action) -> None:
        """Backward passes compute again what was counted."""
        self._is_counting = action.kind == FORWARD

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all forward and backward passes of a step."""
        kept = [(norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        for norm in self._norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            yield
        finally:
            for norm, (momentum, count) in zip(self._norms, kept, strict=True):
                norm.momentum, norm.num_batches_tracked = momentum, count
            self._sums, seen = {}, self._sums
        for norm, (total, squares, number) in seen.items():
            _update_running_statistics(norm, total, squares, number)

    def _see(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not (self._is_counting and norm.training):
            return
        assert isinstance(norm, _BatchNorm)
        x: Tensor = inputs[0].detach()
        x = x if x.dtype == torch.float64 else x.float()
        over = [dim for dim in range(x.dim()) if dim != 1]
        new = [x.sum(over), (x * x).sum(over), torch.tensor(float(x.numel() // x.shape[1]))]
        before = self._sums.get(norm)
        self._sums[norm] = new if before is None else [a + b for a, b in zip(before, new, strict=True)]


def _update_running_statistics(norm: _BatchNorm, total: Tensor, squares: Tensor, number: Tensor) -> None:
    """As torch does for one batch of ``number`` values per channel: the unbiased variance."""
    assert norm.running_mean is not None, "running statistics that are not tracked"
    assert norm.running_var is not None, "running statistics that are not tracked"
    assert norm.num_batches_tracked is not None, "running statistics that are not tracked"
    count = number.item()
    mean = total / count
    variance = (squares / count - mean * mean).clamp(min=0.0) * (count / max(count - 1, 1))
    norm.num_batches_tracked += 1
    factor = norm.momentum if norm.momentum is not None else 1.0 / norm.num_batches_tracked.item()
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), factor)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), factor)


class StageModule(nn.Module):
    """``forward`` takes whole samples on every rank, and gives every rank the whole output.

    The replica of a stage that computes is its first one.
    """

    def __init__(
        self,
        chunks: Mapping[int, nn.Sequential],
        layout: PipelineLayout,
        group: RankGroup,
        boundaries: ActivationMetaCache,
    ) -> None:
        super().__init__()
        self.chunks = nn.ModuleDict({str(chunk): module for chunk, module in chunks.items()})
        self.layout = layout
        self.group = group
        self.boundaries = boundaries

    def chunk(self, number: int) -> nn.Module:
        """One that this rank holds."""
        return self.chunks[str(number)]

    def compile(self, *arguments: Any, **more: Any) -> None:
        """Each chunk by itself: what lies between them is communication."""
        for chunk in self.chunks.values():
            chunk.compile(*arguments, **more)

    def forward(self, x: Tensor) -> Tensor:
        """Chunk after chunk, each on its rank. A collective."""
        given: Any = x
        for number in range(self.layout.chunks):
            source = self.layout.rank_of(number, 0)
            if source == self.group.place:
                given = self.chunk(number)(given)
            if number + 1 < self.layout.chunks:
                given = self._moved(given, number, source, self.layout.rank_of(number + 1, 0), len(x))
        (shape,) = self.boundaries.after(self.layout.chunks - 1, len(x)).shapes
        if self.group.size > 1:
            mine = source == self.group.place
            # Boundaries were found in training, whose arithmetic may be a lower one.
            given = given.to(shape.dtype).contiguous() if mine else x.new_empty(shape.sizes, dtype=shape.dtype)
            dist.broadcast(given, group=self.group.members(), group_src=source)
        output: Tensor = given
        return output

    def _moved(self, given: Any, number: int, source: int, target: int, samples: int) -> Any:
        boundary = self.boundaries.after(number, samples)
        if source == target or self.group.place not in (source, target):
            return given
        if self.group.place == source:
            for shape, tensor in zip(boundary.shapes, tree_leaves(given), strict=True):
                dist.send(shape.flat(tensor.to(shape.dtype)), group=self.group.members(), group_dst=target)
            return given
        found = [shape.empty(self.boundaries.device) for shape in boundary.shapes]
        for shape, tensor in zip(boundary.shapes, found, strict=True):
            dist.recv(shape.flat(tensor), group=self.group.members(), group_src=source)
        return tree_unflatten(found, boundary.tree)


class TensorLocation(NamedTuple):
    """A tensor of the whole model, and who holds it."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    chunk: int


def slice_chunks(model: nn.Sequential, blocks: Sequence[range], numbers: Iterable[int]) -> dict[int, nn.Sequential]:
    """The chunks of ``model`` with those numbers: slices, whose modules keep their names."""
    found = {number: model[blocks[number].start : blocks[number].stop] for number in numbers}
    assert all(isinstance(one, nn.Sequential) for one in found.values()), "a slice of a sequence"
    return found  # type: ignore[return-value]


def locate_tensors(
    tensors: Iterable[tuple[str, Tensor]], model: nn.Sequential, blocks: Sequence[range]
) -> dict[str, TensorLocation]:
    """Where the named ``tensors`` of the whole model are."""
    places = {name: place for place, (name, _) in enumerate(model.named_children())}
    chunk_of = {place: number for number, held in enumerate(blocks) for place in held}
    return {
        name: TensorLocation(tuple(one.shape), one.dtype, chunk_of[places[name.partition(".")[0]]])
        for name, one in tensors
    }


def tied_parameter_names(model: nn.Sequential, places: Mapping[str, TensorLocation]) -> list[list[str]]:
    """Names of parameters that are one and the same but lie on different chunks, the first one first."""
    found: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names = found.setdefault(id(one), [])
        if all(places[name].chunk != places[other].chunk for other in names):
            names.append(name)
    return [names for names in found.values() if len(names) > 1]


def gather_on_first_rank(
    mine: Mapping[str, Tensor],
    places: Mapping[str, TensorLocation],
    layout: PipelineLayout,
    group: RankGroup,
    device: torch.device,
) -> dict[str, Tensor]:
    """On the pipeline's first rank all of ``places`` that their holders have; on the others what they hold."""
    if group.size == 1:
        return dict(mine)
    found: dict[str, Tensor] = {}
    flags = torch.tensor([name in mine for name in places], dtype=torch.uint8, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group.members())
    for (name, (sizes, dtype, chunk)), there in zip(places.items(), flags.tolist(), strict=True):
        owner = layout.rank_of(chunk, 0)
        if not there:
            continue
        if owner == group.place:
            found[name] = mine[name].detach()
            if owner:
                dist.send(found[name].contiguous(), group=group.members(), group_dst=0)
        elif group.place == 0:
            found[name] = torch.empty(sizes, dtype=dtype, device=device)
            dist.recv(found[name], group=group.members(), group_src=owner)
    return found
