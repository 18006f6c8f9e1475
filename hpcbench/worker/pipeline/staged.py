"""The chunks of one rank as a module: named as in the whole model, and callable by all ranks of a pipeline together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from hpcbench.parallel.schedule import Layout
from hpcbench.worker.groups import Group
from hpcbench.worker.pipeline.boundary import Boundaries


class Staged(nn.Module):
    """``forward`` takes whole samples on every rank, and gives every rank the whole output.

    The replica of a stage that computes is its first one.
    """

    def __init__(
        self, chunks: Mapping[int, nn.Sequential], layout: Layout, group: Group, boundaries: Boundaries
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
            source = self.layout.rank(number, 0)
            if source == self.group.place:
                given = self.chunk(number)(given)
            if number + 1 < self.layout.chunks:
                given = self._moved(given, number, source, self.layout.rank(number + 1, 0), len(x))
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


class Slot(NamedTuple):
    """A tensor of the whole model, and who holds it."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    chunk: int


def take_chunks(model: nn.Sequential, blocks: Sequence[range], numbers: Iterable[int]) -> dict[int, nn.Sequential]:
    """The chunks of ``model`` with those numbers: slices, whose modules keep their names."""
    found = {number: model[blocks[number].start : blocks[number].stop] for number in numbers}
    assert all(isinstance(one, nn.Sequential) for one in found.values()), "a slice of a sequence"
    return found  # type: ignore[return-value]


def slots(tensors: Iterable[tuple[str, Tensor]], model: nn.Sequential, blocks: Sequence[range]) -> dict[str, Slot]:
    """Where the named ``tensors`` of the whole model are."""
    places = {name: place for place, (name, _) in enumerate(model.named_children())}
    chunk_of = {place: number for number, held in enumerate(blocks) for place in held}
    return {name: Slot(tuple(one.shape), one.dtype, chunk_of[places[name.partition(".")[0]]]) for name, one in tensors}


def tied_names(model: nn.Sequential, places: Mapping[str, Slot]) -> list[list[str]]:
    """Names of parameters that are one and the same but lie on different chunks, the first one first."""
    found: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names = found.setdefault(id(one), [])
        if all(places[name].chunk != places[other].chunk for other in names):
            names.append(name)
    return [names for names in found.values() if len(names) > 1]


def gathered(
    mine: Mapping[str, Tensor], places: Mapping[str, Slot], layout: Layout, group: Group, device: torch.device
) -> dict[str, Tensor]:
    """On the pipeline's first rank all of ``places`` that their holders have; on the others what they hold."""
    if group.size == 1:
        return dict(mine)
    found: dict[str, Tensor] = {}
    flags = torch.tensor([name in mine for name in places], dtype=torch.uint8, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group.members())
    for (name, (sizes, dtype, chunk)), there in zip(places.items(), flags.tolist(), strict=True):
        owner = layout.rank(chunk, 0)
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
