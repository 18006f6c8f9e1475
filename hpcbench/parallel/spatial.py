"""Which layers of a model are cut along their spatial dims, and where the cut part ends. Pure integers.

Read from the table of layers, so that the worker cuts what the oracle prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from hpcbench.errors import ConfigError
from hpcbench.parallel.halo import Layer, Window
from hpcbench.parallel.layers import Layer as Row
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.memo import once_per

CONVOLUTIONS = frozenset({"Conv2d", "Conv3d"})
MAX_POOLS = frozenset({"MaxPool2d", "MaxPool3d"})
POOLS = MAX_POOLS | {"AvgPool2d", "AvgPool3d"}
WINDOWED = CONVOLUTIONS | POOLS
NORMS = frozenset({"BatchNorm2d", "BatchNorm3d"})
GLOBAL_POOLS = frozenset({"AdaptiveAvgPool2d", "AdaptiveAvgPool3d"})
POINTWISE = frozenset({
    "ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Hardswish", "Hardsigmoid", "Hardtanh",
    "Sigmoid", "Tanh", "Softplus", "Identity",
})  # fmt: skip
"""Each position by itself, with no numbers drawn. Anything else ends the cut part."""

OTHER = ".other"


class Ending(NamedTuple):
    """The first layer that is not cut."""

    row: int
    """Its place in the table: all before it are cut."""
    reason: str
    """Why the layer cannot be cut."""
    row_of_reason: int


class Split(NamedTuple):
    """What is cut. ``rows[:end]`` are; the layer at ``end`` and all after it are whole on every rank."""

    grid: tuple[int, ...]
    rows: tuple[Row, ...]
    end: int
    by_mean: bool
    """The layer at ``end`` is a mean over all positions, to which every rank adds its own part."""

    @property
    def block(self) -> int:
        """The block that the first whole layer is in."""
        return self.rows[self.end].block

    @property
    def begins_block(self) -> bool:
        """Whether that block is whole from its beginning."""
        return self.rows[self.end - 1].block < self.block

    @property
    def extents(self) -> tuple[int, ...]:
        """Of what arrives at the first whole layer."""
        return positions(self.rows[self.end - 1].output_shape)

    def is_cut(self, tensor: str) -> bool:
        """Whether a parameter or buffer, by its name in the model, belongs to the cut part."""
        return self.are_cut([tensor])[0]

    def are_cut(self, tensors: Iterable[str]) -> list[bool]:
        """``is_cut`` of each."""
        first: dict[str, int] = {}
        for number, row in enumerate(self.rows):
            first.setdefault(row.name, number)
        found = []
        for tensor in tensors:
            owner = tensor.rpartition(".")[0]
            while owner and owner not in first:
                owner = owner.rpartition(".")[0]
            found.append(first.get(owner, self.end) < self.end)
        return found


def positions(shape: Sequence[int]) -> tuple[int, ...]:
    """The spatial dims of a shape without its batch: channels come first."""
    return tuple(shape[1:])


def parse_grid(text: str, degree: int, dims: int) -> tuple[int, ...]:
    """``"2x2"`` as numbers, one for each of ``dims``; by default the first dim takes all of ``degree``.

    Raises ``ConfigError`` where it is no such text, or does not go with ``degree`` and ``dims``.
    """
    if not text:
        return (degree, *[1] * (dims - 1))
    parts = text.split("x")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"grid {text!r} is none: numbers with x between them, such as '2x2'")
    numbers = tuple(int(part) for part in parts)
    if len(numbers) > dims:
        raise ConfigError(f"grid {text!r} has {len(numbers)} dims, the samples have {dims}")
    if prod(numbers) != degree:
        raise ConfigError(f"grid {text!r} is of {prod(numbers)} ranks, sp_degree is {degree}")
    return (*numbers, *[1] * (dims - len(numbers)))


@once_per(4096)
def window_layer(row: Row) -> Layer:
    """The geometry of a convolution or pool."""
    extents, of = positions(row.input_shape), row.attributes
    dims = len(extents)
    kernel = _each(of["kernel_size"], dims)
    dilation = _each(of.get("dilation", 1), dims)
    padding = of.get("padding", 0)
    if isinstance(padding, str):
        each = [d * (k - 1) // 2 if padding == "same" else 0 for k, d in zip(kernel, dilation, strict=True)]
    else:
        each = _each(padding, dims)
    stride, ceil_mode = _each(of["stride"], dims), bool(of.get("ceil_mode", False))
    windows = tuple(Window(*numbers, ceil_mode) for numbers in zip(kernel, stride, each, dilation, strict=True))
    return Layer(extents, windows, pads_itself=row.kind in CONVOLUTIONS)


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)


@once_per(256)
def split(table: LayerTable, grid: tuple[int, ...], until: int = 0) -> Split:
    """What of a model is cut over ``grid``.

    By itself the cut part ends before the first layer that cannot be cut: one with fewer positions than ranks along a
    dim, or one that mixes positions in a way of its own. ``until`` ends it before that block, whatever could be cut.
    Raises ``ConfigError`` where nothing is left, or a layer before ``until`` cannot be cut.
    """
    found = _ending(table.layers, grid, until)
    stopped = table.layers[found.row_of_reason]
    if until and stopped.block < until:
        raise ConfigError(f"the blocks until {until} cannot be cut: {found.reason}")
    if not any(row.kind in WINDOWED for row in table.layers[: found.row]):
        raise ConfigError(f"nothing of {table.model} can be cut: {found.reason}")
    row, before = table.layers[found.row], table.layers[found.row - 1]
    is_mean = row.kind in GLOBAL_POOLS and set(positions(row.output_shape)) == {1}
    by_mean = found.row == found.row_of_reason and is_mean and row.input_shape == before.output_shape
    return Split(grid, tuple(table.layers), found.row, by_mean)


def _ending(rows: Sequence[Row], grid: tuple[int, ...], until: int) -> Ending:
    known = {positions(rows[0].input_shape)}
    seen: set[str] = set()
    for number, row in enumerate(rows):
        reason = f"blocks from {until} on are asked to be whole" if until and row.block >= until else None
        reason = reason or _against(row, grid, known, seen)
        if reason:
            return Ending(_moved_back(rows, number, known), reason, number)
        seen.add(row.name)
        known.add(positions(row.output_shape))
    raise AssertionError("a table without the row of the loss")


def _against(row: Row, grid: tuple[int, ...], known: set[tuple[int, ...]], seen: set[str]) -> str | None:
    """Why a layer cannot be cut."""
    named = f"layer {row.name} ({row.kind})"
    if not row.kind.endswith(OTHER) and row.kind not in WINDOWED | NORMS | POINTWISE:
        return f"{named} is none that can be cut"
    if row.kind.endswith(OTHER) and row.parameters:
        return f"{named} has parameters of its own"
    for shape in (row.input_shape, row.output_shape):
        if len(shape) != len(grid) + 1:
            return f"{named} has no feature maps of {len(grid)} dims"
        for dim, (extent, parts) in enumerate(zip(positions(shape), grid, strict=True)):
            if extent < parts:
                return f"{named} has an extent of {extent} in dim {dim}, fewer than {parts} ranks"
    if row.kind in WINDOWED | NORMS and row.name in seen:
        return f"{named} is called several times"
    if row.attributes.get("padding") == "same" and not _is_centred(row):
        return f"{named} is padded more on one side than on the other"
    moves = row.kind in WINDOWED
    came = positions(row.input_shape) in known
    went = moves or positions(row.output_shape) in known
    return None if came and went else f"{named} works on positions that no layer made: something around it moves them"


def _is_centred(row: Row) -> bool:
    each = zip(row.attributes["kernel_size"], row.attributes["dilation"], strict=True)
    return all(dilation * (kernel - 1) % 2 == 0 for kernel, dilation in each)


def _moved_back(rows: Sequence[Row], number: int, known: set[tuple[int, ...]]) -> int:
    """From a layer within a module that computes something itself back to the first one of its block.

    What such a module does between its layers (shortcuts, reshaping) has to be cut or whole as one.
    """
    row = rows[number]
    composites = [one.name for one in rows if one.kind.endswith(OTHER)]
    is_within = row.kind.endswith(OTHER) or any(row.name.startswith(f"{name}.") for name in composites)
    is_moved = positions(row.input_shape) not in known
    if row.kind == "Loss" or not (is_within or is_moved):
        return number
    return next(place for place, one in enumerate(rows) if one.block == row.block)


def largest(table: LayerTable, grid: tuple[int, ...], until: int = 0) -> int | None:
    """The most ranks along the longest dim of ``grid`` that work; ``None`` where not even two do."""
    longest = max(range(len(grid)), key=lambda dim: grid[dim])
    for parts in range(grid[longest] - 1, 1, -1):
        try:
            split(table, (*grid[:longest], parts, *grid[longest + 1 :]), until)
        except ConfigError:
            continue
        return parts * prod(grid) // grid[longest]
    return None
