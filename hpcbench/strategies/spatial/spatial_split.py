"""Spatial parallelism: registry entry, limits, and the layers of a model that are split along spatial dims.
The split is read from the layer table, so that the worker executes the split that the oracle prices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.strategies import layer_table
from hpcbench.strategies.layer_table import LayerRow as Row
from hpcbench.strategies.spatial.halo import HaloLayer, SlidingWindow
from hpcbench.workloads.datasets import DATASETS, sample_shape

LOCAL_STATISTICS_TOLERANCE = 16.0
"""BatchNorm over a rank's own part computes another function, for which there is no bound: this one only shows numbers
that are out of all proportion. Measured: 2.0 for resnet18 on 8x8 images, where a part has few values per channel."""


CONVOLUTION_KINDS = frozenset({"Conv2d", "Conv3d"})
MAX_POOL_KINDS = frozenset({"MaxPool2d", "MaxPool3d"})
POOL_KINDS = MAX_POOL_KINDS | {"AvgPool2d", "AvgPool3d"}
WINDOWED_KINDS = CONVOLUTION_KINDS | POOL_KINDS
NORM_KINDS = frozenset({"BatchNorm2d", "BatchNorm3d"})
GLOBAL_POOL_KINDS = frozenset({"AdaptiveAvgPool2d", "AdaptiveAvgPool3d"})
POINTWISE_KINDS = frozenset({
    "ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Hardswish", "Hardsigmoid", "Hardtanh",
    "Sigmoid", "Tanh", "Softplus", "Identity",
})  # fmt: skip
"""Each position by itself, with no numbers drawn. Anything else ends the cut part."""

COMPOSITE_SUFFIX = ".other"


class SpatialSplit(NamedTuple):
    """The layers that are cut: ``rows[:end]``. The layer at ``end`` and all after it are whole on every rank."""

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
        """Extents of the input of the first whole layer."""
        return spatial_extents(self.rows[self.end - 1].output_shape)

    def is_cut(self, tensor: str) -> bool:
        """Whether a parameter or buffer, by its name in the model, belongs to the cut part."""
        owner = layer_table.owning_row(tensor, _first_rows(self.rows))
        return owner is not None and owner < self.end


_first_rows = layer_table.cached_by_identity(32)(layer_table.first_rows_by_name)


def spatial_extents(shape: Sequence[int]) -> tuple[int, ...]:
    """The spatial dims of a shape without its batch: channels come first."""
    return tuple(shape[1:])


def parse_spatial_grid(text: str, degree: int, dims: int) -> tuple[int, ...]:
    """Parse ``"2x2"`` as numbers, one for each of ``dims``; by default the first dim takes all of ``degree``.

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


@layer_table.cached_by_identity(4096)
def halo_layer(row: Row) -> HaloLayer:
    """The geometry of a convolution or pool."""
    extents = spatial_extents(row.input_shape)
    geometry = {"stride": 1, "padding": 0, "dilation": 1} | row.attributes
    kernel, stride, padding, dilation = (
        [geometry[name]] * len(extents) if isinstance(geometry[name], int | str) else geometry[name]
        for name in ("kernel_size", "stride", "padding", "dilation")
    )
    if isinstance(padding[0], str):
        is_same = padding[0] == "same"
        padding = [d * (k - 1) // 2 if is_same else 0 for k, d in zip(kernel, dilation, strict=True)]
    ceil_mode = bool(geometry.get("ceil_mode", False))
    numbers = zip(kernel, stride, padding, dilation, strict=True)
    windows = tuple(SlidingWindow(*of_dim, ceil_mode) for of_dim in numbers)
    return HaloLayer(extents, windows, pads_itself=row.kind in CONVOLUTION_KINDS)


@layer_table.cached_by_identity(256)
def spatial_split(table: layer_table.LayerTable, grid: tuple[int, ...], until: int = 0) -> SpatialSplit:
    """Return the part of a model that is cut over ``grid``.

    By itself the cut part ends before the first layer that cannot be cut: one with fewer positions than ranks along a
    dim, or one that mixes positions in a way of its own. ``until`` ends it before that block, whatever could be cut.
    Raises ``ConfigError`` where nothing is left, or a layer before ``until`` cannot be cut.
    """
    end, row_of_reason, reason = _spatial_region_end(table.layers, grid, until)
    if until and table.layers[row_of_reason].block < until:
        raise ConfigError(f"the blocks until {until} cannot be cut: {reason}")
    if not any(row.kind in WINDOWED_KINDS for row in table.layers[:end]):
        raise ConfigError(f"nothing of {table.model} can be cut: {reason}")
    row, before = table.layers[end], table.layers[end - 1]
    is_mean = row.kind in GLOBAL_POOL_KINDS and set(spatial_extents(row.output_shape)) == {1}
    by_mean = end == row_of_reason and is_mean and row.input_shape == before.output_shape
    return SpatialSplit(grid, tuple(table.layers), end, by_mean)


@layer_table.cached_by_identity(4096)
def _spatial_region_end(rows: Sequence[Row], grid: tuple[int, ...], until: int) -> tuple[int, int, str]:
    """Return the first row that is not cut, the row that cannot be cut, and why it cannot."""
    extents = {spatial_extents(rows[0].input_shape)}
    seen: set[str] = set()
    for number, row in enumerate(rows):
        reason = f"blocks from {until} on are asked to be whole" if until and row.block >= until else None
        reason = reason or _uncuttable_reason(row, grid, extents, seen)
        if reason:
            return _composite_block_start(rows, number, extents), number, reason
        seen.add(row.name)
        extents.add(spatial_extents(row.output_shape))
    raise AssertionError("a table without the row of the loss")


def _uncuttable_reason(row: Row, grid: tuple[int, ...], extents: set[tuple[int, ...]], seen: set[str]) -> str | None:
    """Return the reason why a layer cannot be cut."""
    named = f"layer {row.name} ({row.kind})"
    if not row.kind.endswith(COMPOSITE_SUFFIX) and row.kind not in WINDOWED_KINDS | NORM_KINDS | POINTWISE_KINDS:
        return f"{named} is none that can be cut"
    if row.kind.endswith(COMPOSITE_SUFFIX) and row.parameters:
        return f"{named} has parameters of its own"
    for shape in (row.input_shape, row.output_shape):
        if len(shape) != len(grid) + 1:
            return f"{named} has no feature maps of {len(grid)} dims"
        for dim, (extent, parts) in enumerate(zip(spatial_extents(shape), grid, strict=True)):
            if extent < parts:
                return f"{named} has an extent of {extent} in dim {dim}, fewer than {parts} ranks"
    if row.kind in WINDOWED_KINDS | NORM_KINDS and row.name in seen:
        return f"{named} is called several times"
    if row.attributes.get("padding") == "same" and any(
        dilation * (kernel - 1) % 2
        for kernel, dilation in zip(row.attributes["kernel_size"], row.attributes["dilation"], strict=True)
    ):
        return f"{named} is padded more on one side than on the other"
    moves = row.kind in WINDOWED_KINDS
    came = spatial_extents(row.input_shape) in extents
    went = moves or spatial_extents(row.output_shape) in extents
    return None if came and went else f"{named} works on positions that no layer made: something around it moves them"


def _composite_block_start(rows: Sequence[Row], number: int, extents: set[tuple[int, ...]]) -> int:
    """Return the first layer of the block of a layer in a module that computes something itself.

    Operations between the layers of such a module (shortcuts, reshaping) are cut or whole together.
    """
    row = rows[number]
    composites = [other.name for other in rows if other.kind.endswith(COMPOSITE_SUFFIX)]
    is_within = row.kind.endswith(COMPOSITE_SUFFIX) or any(row.name.startswith(f"{name}.") for name in composites)
    is_moved = spatial_extents(row.input_shape) not in extents
    if row.kind == "Loss" or not (is_within or is_moved):
        return number
    return next(index for index, first in enumerate(rows) if first.block == row.block)


def largest_spatial_degree(table: layer_table.LayerTable, grid: tuple[int, ...], until: int = 0) -> int | None:
    """The most ranks along the longest dim of ``grid`` that work; ``None`` where not even two do."""
    longest = max(range(len(grid)), key=lambda dim: grid[dim])
    for parts in range(grid[longest] - 1, 1, -1):
        try:
            spatial_split(table, (*grid[:longest], parts, *grid[longest + 1 :]), until)
        except ConfigError:
            continue
        return parts * prod(grid) // grid[longest]
    return None


def spatial_exclusion(spec: RunSpec) -> str | None:
    """Samples without spatial dims, modes that would be wrong, and more ranks than positions.

    ParaDL's limit, p <= min(W_l * H_l) over the layers that are cut (Kahira et al., HPDC 2021), is held dim by dim.
    Without a shipped table only the samples' own extents are known here; the worker checks the layers.
    """
    dataset = DATASETS[spec.dataset]
    if dataset.kind == "tokens":
        return f"spatial cuts images and volumes; {spec.dataset} holds tokens"
    if spec.compile:
        return "spatial exchanges halos, and torch.compile fails on their varying shapes: compile = false is right"
    if spec.precision == "fp16":
        return "spatial with fp16 would need a loss scale that all parts agree on: use bf16"
    extents = sample_shape(spec.dataset, spec.input_size)[1:]
    try:
        grid = spatial_grid(spec)
    except ConfigError as error:
        return f"spatial: {error.message}"
    until = spec.options.get("until", 0)
    if not isinstance(until, int) or until < 0:
        return f"spatial: until {until} is not a number of blocks"
    for dim, (extent, parts) in enumerate(zip(extents, grid, strict=True)):
        if extent < parts:
            return (
                f"spatial: samples have an extent of {extent} in dim {dim}, fewer than the {parts} ranks of the grid; "
                f"{extent} is the most there"
            )
    table = layer_table.read_shipped_table(spec.model, spec.dataset, spec.input_size, shape_changing_options(spec))
    return None if table is None else spatial_table_exclusion(spec, table)


def shape_changing_options(spec: RunSpec) -> dict[str, Any]:
    """Return the model options that change shapes, for ``read_shipped_table``.

    Dropout's probability changes none.
    """
    return {name: value for name, value in spec.model_options.items() if name != "dropout"}


def spatial_grid(spec: RunSpec) -> tuple[int, ...]:
    """The run's grid, one number per spatial dim; ``ConfigError`` as ``parse_spatial_grid``."""
    dims = len(DATASETS[spec.dataset].shape) - 1
    return parse_spatial_grid(str(spec.options.get("grid", "")), spec.sp_degree, dims)


def spatial_split_of_run(spec: RunSpec, table: layer_table.LayerTable) -> SpatialSplit:
    """Return the split of a run that the limits allow; raises as ``spatial_split``."""
    return spatial_split(table, spatial_grid(spec), int(spec.options.get("until", 0)))


def spatial_table_exclusion(spec: RunSpec, table: layer_table.LayerTable) -> str | None:
    """Return the reason why the model of ``table`` cannot be cut as asked, with the largest degree that works."""
    if spec.sp_degree == 1:
        return None
    if table.is_transformer:
        return f"spatial cuts what convolutions look at; {table.model} is a transformer: use tensor"
    grid, until = spatial_grid(spec), int(spec.options.get("until", 0))
    try:
        spatial_split(table, grid, until)
    except ConfigError as error:
        most = largest_spatial_degree(table, grid, until)
        fix = f"sp_degree {most} is the largest that works" if most else "no sp_degree works"
        return f"spatial on {prod(grid)} ranks as {'x'.join(map(str, grid))}: {error.message}; {fix} in that direction"
    return None
