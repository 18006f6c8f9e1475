"""The module of one pipeline rank: its chunks, weights tied across stages, and deferred BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from hpcbench.strategies.pipeline.schedules import FORWARD, Action, PipelineLayout
from hpcbench.strategies.pipeline.train.chunk import ActivationMetaCache
from hpcbench.worker.distributed import point_to_point
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.model_parallel_layers import update_running_statistics


class TiedParameter(NamedTuple):
    """A weight of which several ranks of the pipeline hold a copy; ``parameter`` is this rank's copy, if any."""

    ranks: tuple[int, ...]
    parameter: nn.Parameter | None
    name: str
    """Its first name."""


def sum_tied_gradients(ties: Sequence[TiedParameter], group: RankGroup) -> None:
    """Replace every copy's gradient by the sum of all copies', computed on the first holder: bitwise equal."""

    def receive(source: int, like: Tensor) -> Tensor:
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        point_to_point.receive(received, group.members(), source)
        return received

    for ranks, parameter, _ in ties:
        if parameter is None or len(ranks) == 1 or not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad, (first, *others) = parameter.grad, ranks
        if group.place != first:
            point_to_point.send(grad.contiguous(), group.members(), first)
            grad.copy_(receive(first, grad))
            continue
        for rank in others:
            grad.add_(receive(rank, grad))
        for rank in others:
            point_to_point.send(grad.contiguous(), group.members(), rank)


_BatchNorm = nn.modules.batchnorm._BatchNorm


class DeferredBatchNorm:
    """Running statistics move once per step, by the whole batch; micro-batches are normalised by their own.

    Sums are kept in fp32 at least. Recomputed forward passes are not counted twice.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]
        self._sums: dict[_BatchNorm, list[Tensor]] = {}
        self._is_counting = False
        for norm in self._norms:
            norm.register_forward_pre_hook(self._add)

    def before(self, action: Action) -> None:
        """Count in forward actions only: backward passes may recompute."""
        self._is_counting = action.kind == FORWARD

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return the context of all forward and backward passes of a step."""
        settings = [(norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        for norm in self._norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            yield
        finally:
            for norm, (momentum, count) in zip(self._norms, settings, strict=True):
                norm.momentum, norm.num_batches_tracked = momentum, count
            step_sums, self._sums = self._sums, {}
        for norm, (total, squares, values) in step_sums.items():
            n = values.item()
            mean = total / n
            variance = (squares / n - mean * mean).clamp(min=0.0)
            update_running_statistics(norm, mean, variance * (n / max(n - 1, 1)))

    def _add(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not (self._is_counting and norm.training):
            return
        assert isinstance(norm, _BatchNorm)
        x: Tensor = inputs[0].detach()
        x = x if x.dtype == torch.float64 else x.float()
        dims = [dim for dim in range(x.dim()) if dim != 1]
        sums = [x.sum(dims), (x * x).sum(dims), torch.tensor(float(x.numel() // x.shape[1]))]
        if norm in self._sums:
            sums = [previous + new for previous, new in zip(self._sums[norm], sums, strict=True)]
        self._sums[norm] = sums


class StageModule(nn.Module):
    """This rank's chunks; ``forward`` takes whole samples and returns the whole output on every rank.

    In a stage with several replicas the first one computes.
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
        """Return chunk ``number``, which this rank holds."""
        return self.chunks[str(number)]

    def compile(self, *arguments: Any, **more: Any) -> None:
        """Compile each chunk alone: between them is communication."""
        for chunk in self.chunks.values():
            chunk.compile(*arguments, **more)

    def forward(self, x: Tensor) -> Tensor:
        """Run chunk after chunk, each on its rank: [n, *sample shape] -> outputs [n, ...], equal on all ranks.

        Collective over the pipeline's ranks; all pass the same samples ``x``.
        """
        value: Any = x
        for number in range(self.layout.chunks):
            source = self.layout.rank_of(number, 0)
            if source == self.group.place:
                value = self.chunk(number)(value)
            if number + 1 < self.layout.chunks:
                value = self._move(value, number, source, self.layout.rank_of(number + 1, 0), len(x))
        (shape,) = self.boundaries.outputs_of(self.layout.chunks - 1, len(x)).shapes
        if self.group.size > 1:
            # The shapes are from training, whose precision may be lower.
            is_source = source == self.group.place
            value = value.to(shape.dtype).contiguous() if is_source else x.new_empty(shape.sizes, dtype=shape.dtype)
            dist.broadcast(value, group=self.group.members(), group_src=source)
        output: Tensor = value
        return output

    def _move(self, value: Any, chunk: int, source: int, target: int, samples: int) -> Any:
        """Send the output of ``chunk`` from rank ``source`` to ``target``."""
        if source == target or self.group.place not in (source, target):
            return value
        meta, group = self.boundaries.outputs_of(chunk, samples), self.group.members()
        if self.group.place == source:
            for shape, tensor in zip(meta.shapes, tree_leaves(value), strict=True):
                point_to_point.send(shape.flat(tensor.to(shape.dtype)), group, target)
            return value
        received = [shape.empty(self.boundaries.device) for shape in meta.shapes]
        for shape, tensor in zip(meta.shapes, received, strict=True):
            point_to_point.receive(shape.flat(tensor), group, source)
        return tree_unflatten(received, meta.treespec)


def slice_chunks(model: nn.Sequential, blocks: Sequence[range], numbers: Iterable[int]) -> dict[int, nn.Sequential]:
    """Return the chunks with those numbers as slices of ``model``, whose modules keep their names."""
    chunks = {number: model[blocks[number].start : blocks[number].stop] for number in numbers}
    assert all(isinstance(chunk, nn.Sequential) for chunk in chunks.values()), "a slice of a sequence"
    return chunks  # type: ignore[return-value]


def chunks_of_tensors(names: Iterable[str], model: nn.Sequential, blocks: Sequence[range]) -> dict[str, int]:
    """Return the chunk of each named tensor of the whole model; ``blocks`` are those of every chunk."""
    children = [name for name, _ in model.named_children()]
    chunk_of = {children[block]: chunk for chunk, held in enumerate(blocks) for block in held}
    return {name: chunk_of[name.partition(".")[0]] for name in names}


def tied_parameters(model: nn.Sequential, blocks: Sequence[range], layout: PipelineLayout) -> list[TiedParameter]:
    """Return the parameters of the whole model that lie on several chunks; the first chunk's rank comes first."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    chunks_of: dict[nn.Parameter, dict[int, None]] = {}
    for name, chunk in chunks_of_tensors(parameters, model, blocks).items():
        chunks_of.setdefault(parameters[name], {})[chunk] = None
    return [
        TiedParameter(
            tuple(dict.fromkeys(layout.rank_of(chunk, 0) for chunk in chunks)), parameter, first_names[parameter]
        )
        for parameter, chunks in chunks_of.items()
        if len(chunks) > 1
    ]


def gather_on_first_rank(
    tensors: Mapping[str, Tensor],
    chunk_of: Mapping[str, int],
    layout: PipelineLayout,
    group: RankGroup,
    device: torch.device,
) -> dict[str, Tensor]:
    """Collect the tensors of all stages on the pipeline's first rank. Collective over ``group``.

    Args:
        tensors: This rank's weights or gradients, in their unsplit shapes, by their names in the whole model.
        chunk_of: The chunk of every tensor to collect, in the order of the result.
        layout: The pipeline's stages.
        group: The pipeline's ranks.
        device: The device of received tensors.

    Returns:
        On the first rank all tensors that exist; on the others their own.
    """
    own_tensors = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if name in chunk_of and layout.rank_of(chunk_of[name], 0) == group.place
    }
    if group.size == 1:
        return own_tensors
    gathered: list[dict[str, Tensor]] | None = [{}] * group.size if group.place == 0 else None
    host_tensors = {name: tensor.cpu() for name, tensor in own_tensors.items()}
    dist.gather_object(host_tensors, gathered, group=group.members(), group_dst=0)
    collected = {name: tensor.to(device) for part in gathered or [] for name, tensor in part.items()} | own_tensors
    return {name: collected[name] for name in chunk_of if name in collected}
