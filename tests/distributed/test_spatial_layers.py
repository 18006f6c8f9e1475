"""Every kind of layer that can be cut equals the whole one: output, gradients of input and parameters, in fp64."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.spatial_layers import LayerCase, all_differences

pytestmark = [pytest.mark.slow, pytest.mark.strategy("spatial")]

BOUND = 1e-12

GRIDS_2D: list[tuple[int, ...]] = [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
GRIDS_3D: list[tuple[int, ...]] = [(2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1)]


def conv(extents: tuple[int, ...], grid: tuple[int, ...], kernel: int, **more: Any) -> LayerCase:
    case = {name: more.pop(name) for name in ("overlap", "channels_last") if name in more}
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": kernel, **more}
    return LayerCase(f"Conv{len(extents)}d", arguments, extents, grid, **case)


def convolutions() -> list[LayerCase]:
    """Kernels, strides, padding, dilation and groups, each on every grid; extents that no grid divides."""
    cases = []
    for (kernel, stride), grid in product(product((1, 3, 5, 7), (1, 2)), GRIDS_2D):
        cases.append(conv((11, 13), grid, kernel, stride=stride, padding=kernel // 2))
    for grid, overlap in product(GRIDS_2D, (False, True)):
        cases += [
            conv((11, 13), grid, 3, padding=0, overlap=overlap),
            conv((11, 13), grid, 3, padding=2, dilation=2, overlap=overlap),
            conv((13, 11), grid, 3, padding=1, dilation=2, stride=2, bias=False, overlap=overlap),
            conv((24, 16), grid, 3, padding=1, groups=2, overlap=overlap),
            conv((8, 9), grid, 2, stride=2, overlap=overlap),
            conv((11, 10), grid, 2, stride=3, padding=1, overlap=overlap),
            conv((9, 8), grid, 3, padding="same", overlap=overlap),
            conv((5, 5), grid, 7, padding=3, overlap=overlap),
            conv((9, 12), grid, 3, padding=1, channels_last=True, overlap=overlap),
        ]
        cases.append(LayerCase("Conv2d", {"in_channels": 4, "out_channels": 4, "kernel_size": (3, 1), "groups": 4,
                                          "padding": (1, 0), "stride": (1, 2)}, (9, 11), grid, overlap=overlap))  # fmt: skip
    for (kernel, stride), grid in product(((1, 2), (3, 1), (3, 2), (5, 1), (7, 2)), GRIDS_3D):
        cases.append(conv((7, 6, 9), grid, kernel, stride=stride, padding=kernel // 2))
    for grid in ((1, 2, 1), (2, 1, 2)):
        cases.append(conv((7, 6, 9), grid, 3, padding=2, dilation=2, groups=2))
    return cases


def pools() -> list[LayerCase]:
    """Windows that the cuts meet, and windows that reach beyond the image."""
    cases = []
    for (kernel, stride, padding), ceil_mode, grid in product(
        ((2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 0), (3, 2, 0)), (False, True), GRIDS_2D
    ):
        window = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil_mode}
        cases.append(LayerCase("MaxPool2d", window, (13, 14), grid))
        cases.append(LayerCase("AvgPool2d", {**window, "count_include_pad": padding == 1}, (13, 14), grid))
        cases.append(LayerCase("AvgPool2d", {**window, "count_include_pad": False}, (13, 14), grid))
    for grid in GRIDS_3D:
        cases.append(LayerCase("MaxPool3d", {"kernel_size": 2}, (9, 8, 11), grid))
        cases.append(LayerCase("AvgPool3d", {"kernel_size": 3, "stride": 2, "padding": 1}, (7, 8, 9), grid))
    cases.append(LayerCase("MaxPool2d", {"kernel_size": 2, "stride": 1, "dilation": 3}, (9, 10), (2, 2)))
    cases.append(LayerCase("AvgPool2d", {"kernel_size": 3, "divisor_override": 5}, (12, 12), (2, 2)))
    return cases


def norms_and_switches() -> list[LayerCase]:
    cases = []
    for grid, kind in product(GRIDS_2D, ("BatchNorm2d", "AdaptiveAvgPool2d", "Identity")):
        arguments = {"BatchNorm2d": {"num_features": 4}, "AdaptiveAvgPool2d": {"output_size": 1}}.get(kind, {})
        cases.append(LayerCase(kind, arguments, (7, 5), grid))
    for grid in GRIDS_3D:
        cases.append(LayerCase("BatchNorm3d", {"num_features": 4, "momentum": None}, (5, 4, 6), grid))
        cases.append(LayerCase("Identity", {}, (5, 4, 6), grid))
    cases.append(LayerCase("BatchNorm2d", {"num_features": 4, "affine": False}, (7, 5), (2, 2)))
    cases.append(LayerCase("BatchNorm2d", {"num_features": 4, "track_running_stats": False}, (7, 5), (2, 2)))
    return cases


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("make", [convolutions, pools, norms_and_switches])
def test_a_cut_layer_is_the_whole_one(pool: Pool, make: Any, ranks: int) -> None:
    cases = [case for case in make() if prod(case.grid) == ranks]
    for of_rank in pool.call(ranks, all_differences, cases):
        for case, found in zip(cases, of_rank, strict=True):
            assert max(found.values()) <= BOUND, f"{case}: {found}"
