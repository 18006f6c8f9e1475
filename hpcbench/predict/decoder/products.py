"""Matrix products of a step by whole waves of tiles, in seconds at the device's peak."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from hpcbench.predict.decoder.layout import GpuNode

TILE_ROWS, TILE_COLUMNS = 128, 256
ALIGNED_SIDE, MISALIGNED = 64, 1.1
"""NVIDIA's Matrix Multiplication Background User's Guide recommends sides that are multiples of 64 numbers (128 bytes).
Products with others take about a tenth longer in BigScience's published runs."""
TILE_DEPTH = 64
"""Depth of one pass of a tile's main loop; the fitted prologue counts in these."""


class ProductTime(NamedTuple):
    """Seconds at peak of products, and of one pass of the main loops of their tiles."""

    seconds: float
    tile_s: float

    def times(self, factor: float) -> ProductTime:
        return ProductTime(self.seconds * factor, self.tile_s * factor)


def total(products: list[ProductTime]) -> ProductTime:
    return ProductTime(sum(each.seconds for each in products), sum(each.tile_s for each in products))


def product(
    rows: float, columns: float, depth: float, node: GpuNode, parts: tuple[float, ...] = (1.0,), groups: int = 1
) -> ProductTime:
    """Return the time of a product forward (by parts of the rows), for the input's gradient, and the weight's.

    ``groups`` products of the same sides run as one kernel and share its waves.
    """
    return _product(rows, columns, depth, node.multiprocessors, node.peak_flops, parts, groups)


@lru_cache(maxsize=10_000)
def _product(
    rows: float, columns: float, depth: float, processors: int, peak: float, parts: tuple[float, ...], groups: int
) -> ProductTime:
    sides = [*((rows * part, columns, depth) for part in parts), (rows, depth, columns), (columns, depth, rows)]
    return total([_one(*each, processors, peak, groups) for each in sides])


def _one(rows: float, columns: float, depth: float, processors: int, peak: float, groups: int) -> ProductTime:
    if not min(rows, columns, depth):
        return ProductTime(0.0, 0.0)
    if any(side % ALIGNED_SIDE for side in (columns, depth)):
        columns *= MISALIGNED
    tiles = groups * math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS)
    exact = groups * rows * columns / (TILE_ROWS * TILE_COLUMNS)
    waves = math.ceil(tiles / processors) * processors
    # Kernels of several tile sizes soften a nearly empty last wave: half of its loss remains.
    counted = 0.5 * (exact + waves)
    wave_s = counted * TILE_ROWS * TILE_COLUMNS * 2.0 / peak
    return ProductTime(wave_s * depth, max(waves, 1) * TILE_ROWS * TILE_COLUMNS * 2.0 / peak * TILE_DEPTH)
