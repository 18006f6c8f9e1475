"""Kernels take what was measured; others the roofline, times what it misses of the most similar ones."""

from __future__ import annotations

import msgspec
import pytest

from hpcbench.predict.kernel_prices import (
    BACKWARD,
    FORWARD,
    DeviceCompute,
    Kernel,
    KernelConditions,
    KernelPrices,
    MeasuredKernel,
    crowding_of,
    roofline_s,
)

BARE = DeviceCompute(peak_flops_per_s={"fp32": 1e9}, memory_bandwidth_bytes_per_s=1e9, launch_s=1e-5)
ALONE, BESIDE = KernelConditions(1), KernelConditions(2)


def kernel(flops: float, kind: str = "Conv2d", direction: str = FORWARD) -> Kernel:
    return Kernel(kind, direction, "fp32", flops, 1e4, 1e4, 5e3, 5e3)


def measured(of: Kernel, seconds: float, conditions: KernelConditions = ALONE) -> MeasuredKernel:
    return MeasuredKernel(kernel=of, conditions=conditions, seconds=seconds)


def prices(*kernels: MeasuredKernel, crowding: dict[int, float] | None = None) -> KernelPrices:
    return KernelPrices(msgspec.structs.replace(BARE, kernels=list(kernels), crowding=crowding or {}))


def test_kernel_time_is_the_roofline_without_measurements() -> None:
    assert [*prices().price(kernel(6e8), ALONE)] == [pytest.approx(1.0 + 1e-5), False]
    # Bytes: 1e4 moved and twice 1e4 of weights, at 0.8 of the bandwidth; two launches.
    backward = kernel(1.0, direction=BACKWARD)
    assert prices().price(backward, ALONE).seconds == pytest.approx(3e4 / 0.8e9 + 2e-5)


def test_a_measured_kernel_takes_its_time_and_a_similar_one_its_factor() -> None:
    known = prices(measured(kernel(6e8), 3.0))
    assert [*known.price(kernel(6e8), ALONE)] == [3.0, True]
    assert [*known.price(kernel(6.6e8), ALONE)] == [pytest.approx(3.3, rel=1e-3), False]
    # Without any of its kind those of all kinds count; of the backward pass nothing was measured.
    assert [*known.price(kernel(6e8, kind="Linear"), ALONE)] == [pytest.approx(3.0, rel=1e-3), False]
    backward = kernel(6e8, direction=BACKWARD)
    assert [*known.price(backward, ALONE)] == [roofline_s(backward, BARE), False]


def test_the_nearest_of_several_counts_most() -> None:
    known = prices(*(measured(kernel(6e6 * 10**power), factor * 1e-2 * 10**power)
                     for power, factor in enumerate((2.0, 4.0, 8.0))))  # fmt: skip
    for flops, factor in ((6.3e6, 2.0), (6.3e7, 4.0), (6.3e8, 8.0)):
        assert known.price(kernel(flops), ALONE).seconds / roofline_s(kernel(flops), BARE) == pytest.approx(
            factor, rel=0.02
        )
    between = known.price(kernel(6e6 * 10**0.5), ALONE).seconds / roofline_s(kernel(6e6 * 10**0.5), BARE)
    assert 2.0 < between < 4.0


def test_ranks_beside_others_take_what_was_measured_there_else_the_factor_of_the_node() -> None:
    both = [measured(kernel(6e8), 1.0), measured(kernel(6e8), 1.5, BESIDE), measured(kernel(6e6), 0.01)]
    assert crowding_of(both) == {1: 1.0, 2: 1.5}
    known = prices(*both, crowding=crowding_of(both))
    assert [*known.price(kernel(6e8), BESIDE)] == [1.5, True]
    # Nothing was measured with four ranks: on the line through one and two.
    assert known.price(kernel(6e8), KernelConditions(4)).seconds == pytest.approx(2.5, rel=1e-3)
    assert crowding_of([measured(kernel(6e8), 1.0), measured(kernel(6e8), 0.5, BESIDE)])[2] == 1.0
