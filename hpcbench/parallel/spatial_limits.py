"""What spatial parallelism cannot do, as far as integers and names tell."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

from hpcbench.config.spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.parallel.channel_table import has_attention
from hpcbench.parallel.datasets import DATASETS, input_shape
from hpcbench.parallel.layers import LayerTable, is_shipped, read_table
from hpcbench.parallel.spatial import Split, largest, parse_grid, split


def spatial(spec: RunSpec) -> str | None:
    """Samples without spatial dims, modes that would be wrong, and more ranks than positions.

    ParaDL's limit, p <= min(W_l * H_l) over the layers that are cut (Kahira et al., HPDC 2021), is held dim by dim.
    Without a shipped table only the samples' own extents are known here; the worker checks the layers.
    """
    dataset = DATASETS[spec.dataset]
    if dataset.kind == "tokens":
        return f"spatial cuts images and volumes; {spec.dataset} holds tokens"
    if spec.compile:
        return "spatial exchanges halos with calls that torch.compile cannot trace: compile = false is right"
    if spec.precision == "fp16":
        return "spatial with fp16 would need a loss scale that all parts agree on: use bf16"
    extents = input_shape(spec.dataset, spec.input_size)[1:]
    try:
        grid = grid_of(spec)
    except ConfigError as error:
        return f"spatial: {error.message}"
    until = spec.options.get("until", 0)
    if not isinstance(until, int) or until < 0:
        return f"spatial: until {until} is no number of blocks"
    for dim, (extent, parts) in enumerate(zip(extents, grid, strict=True)):
        if extent < parts:
            return (
                f"spatial: samples have an extent of {extent} in dim {dim}, fewer than the {parts} ranks of the grid; "
                f"{extent} is the most there"
            )
    if spec.sp_degree == 1 or not is_shipped(spec.model, spec.dataset, spec.input_size, differing(spec)):
        return None
    return _of_shipped(spec.model, spec.dataset, grid, until)


def differing(spec: RunSpec) -> dict[str, Any]:
    """Model options that change shapes: what ``read_table`` is to be asked with. Dropout's probability changes none."""
    return {name: value for name, value in spec.model_options.items() if name != "dropout"}


def grid_of(spec: RunSpec) -> tuple[int, ...]:
    """The run's grid, one number per spatial dim; ``ConfigError`` as ``parse_grid``."""
    dims = len(DATASETS[spec.dataset].shape) - 1
    return parse_grid(str(spec.options.get("grid", "")), spec.sp_degree, dims)


def split_of(spec: RunSpec, table: LayerTable) -> Split:
    """What is cut in a run that the limits allow; ``ConfigError`` as ``split``."""
    return split(table, grid_of(spec), int(spec.options.get("until", 0)))


def cannot(table: LayerTable, grid: tuple[int, ...], until: int) -> str | None:
    """Why a model cannot be cut like this, with the largest degree that works."""
    if has_attention(table):
        return f"spatial cuts what convolutions look at; {table.model} is a transformer: use tensor"
    try:
        split(table, grid, until)
    except ConfigError as error:
        most = largest(table, grid, until)
        fix = f"sp_degree {most} is the largest that works" if most else "no sp_degree works"
        return f"spatial on {prod(grid)} ranks as {'x'.join(map(str, grid))}: {error.message}; {fix} in that direction"
    return None


@lru_cache(maxsize=1024)
def _of_shipped(model: str, dataset: str, grid: tuple[int, ...], until: int) -> str | None:
    table = read_table(model, dataset)
    return None if table is None else cannot(table, grid, until)
