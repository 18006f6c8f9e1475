"""Kernels by those that were measured: exact where they were, as their kind where they are far off, the roofline where nothing is like them."""

from __future__ import annotations

import random
from math import dist, exp, log

import pytest

from hpcbench.parallel.roofline import (
    _NEIGHBOURS,
    BACKWARD,
    FORWARD,
    DeviceCompute,
    Kernel,
    KernelSample,
    RooflineModel,
    _nearest_samples,
)

BARE = DeviceCompute(peak_flops_per_s={"fp32": 1e9}, memory_bandwidth_bytes_per_s=1e9, launch_s=1e-5)


def kernel(flops: float, kind: str = "Conv2d", direction: str = FORWARD) -> Kernel:
    return Kernel(kind, direction, "fp32", flops, 1e4, 1e4, 5e3, 5e3)


def sample(of: Kernel, seconds: float) -> KernelSample:
    return KernelSample(kernel=of, seconds=seconds)


def measured(*samples: KernelSample) -> RooflineModel:
    return RooflineModel(
        DeviceCompute(
            peak_flops_per_s={"fp32": 1e9}, memory_bandwidth_bytes_per_s=1e9, launch_s=1e-5, samples=list(samples)
        )
    )


def test_kernel_time_is_the_roofline_without_samples() -> None:
    alike = RooflineModel(BARE)
    assert alike.seconds(kernel(6e8)) == pytest.approx(1.0 + 1e-5)
    # Bytes: 1e4 moved and twice 1e4 of weights, at 0.8 of the bandwidth; two launches.
    assert alike.seconds(kernel(1.0, direction=BACKWARD)) == pytest.approx(3e4 / 0.8e9 + 2e-5)


def test_measured_kernels_are_returned_and_near_ones_scaled() -> None:
    alike = measured(sample(kernel(6e8), 3.0))
    assert alike.seconds(kernel(6e8)) == pytest.approx(3.0)
    assert alike.seconds(kernel(6.6e8)) == pytest.approx(3.3, rel=0.02)
    assert alike.seconds(kernel(6e8, kind="Linear")) == pytest.approx(3.0)


def test_a_distant_kernel_takes_the_factor_of_its_kind() -> None:
    # Twice and eight times the roofline; of both together the long one decides.
    alike = measured(sample(kernel(6e6), 2 * 1e-2), sample(kernel(6e9), 8 * 10.0))
    bare = RooflineModel(BARE)
    far = kernel(6e15)
    assert alike.seconds(far) / bare.seconds(far) == pytest.approx(8.0, rel=0.02)
    near = kernel(7e6)
    assert 1.9 < alike.seconds(near) / bare.seconds(near) < 3.0


def test_a_kind_that_was_not_measured_is_left_to_the_roofline_where_nothing_is_near() -> None:
    alike, bare = measured(sample(kernel(6e3), 1.0)), RooflineModel(BARE)
    far = kernel(6e12, kind="Linear")
    assert 1.0 < alike.seconds(far) / bare.seconds(far) < 2.0
    near = kernel(1.2e4, kind="Linear")
    assert alike.seconds(near) / bare.seconds(near) > 1000
    # Nothing of the backward pass was measured.
    assert alike.seconds(kernel(6e3, direction=BACKWARD)) == bare.seconds(kernel(6e3, direction=BACKWARD))


def test_the_nearest_are_found_whatever_the_order() -> None:
    noise = random.Random(2)
    known = sorted((tuple(noise.gauss(0, 2) for _ in range(5)), noise.random()) for _ in range(200))
    for _ in range(100):
        at = tuple(noise.gauss(0, 3) for _ in range(5))
        expected = sorted((dist(at, features), value) for features, value in known)[:_NEIGHBOURS]
        assert _nearest_samples(at, known) == expected
    assert _nearest_samples((0.0,) * 5, []) == []


def test_in_between_logarithms_are_weighted() -> None:
    low, high = kernel(1e8), kernel(1.2e8)
    alike = measured(sample(low, 1.0), sample(high, 16.0))
    middle, bare = kernel(1.1e8), RooflineModel(BARE)
    ratio = log(alike.seconds(middle) / bare.seconds(middle))
    ends = sorted(log(alike.seconds(one) / bare.seconds(one)) for one in (low, high))
    assert ends[0] < ratio < ends[1]
    assert exp(ratio) > 1
