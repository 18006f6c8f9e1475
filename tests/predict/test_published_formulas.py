"""ParaDL's and DDLBench's formulas give the numbers that their authors printed."""

from __future__ import annotations

import pytest

from benchmarks.oracle import published_formulas
from benchmarks.oracle.published_formulas import ParadlJob, ParadlLayer
from hpcbench.predict.collective_formulas import HockneyLink

SAMPLES = 1_280_000
RESNET50 = ParadlLayer(0, 0, 22_734_016, forward_s=3.119502e-3)
INTRA_NODE = HockneyLink(9e-6, 1 / 50e9)
"""Of ABCI; between nodes the latency grows with the switches on the path."""


@pytest.mark.parametrize(
    ("p", "alpha_s", "bandwidth", "compute_s", "comm_s"),
    [
        (2, 9e-6, 50e9, 1996.48128, 18.3672128),
        (8, 30.31e-6, 12.5e9, 499.12032, 32.8884724),
        (64, 30.31e-6, 12.5e9, 62.39004, 5.67828639504),
        (1024, 30.98e-6, 12.5e9, 3.8993775, 1.5584128296),
    ],
)
def test_data_parallel_resnet50_has_paradls_printed_times(
    p: int, alpha_s: float, bandwidth: float, compute_s: float, comm_s: float
) -> None:
    found = published_formulas.paradl_data(
        ParadlJob(SAMPLES, 64 * p, [RESNET50]), p, HockneyLink(alpha_s, 1 / bandwidth)
    )
    assert found.compute_s == pytest.approx(compute_s, rel=1e-9)
    assert found.comm_s == pytest.approx(comm_s, rel=1e-9)


UNSPLIT_S = (1150.44474057 / SAMPLES - 3.119502e-3 / 4) * 4 / 3
"""Seconds per sample of the layers that are not split, from the first row below: the other rows must follow from it."""


@pytest.mark.parametrize(
    ("p", "compute_s", "comm_s"),
    [
        (4, 1150.44474057, 2175.1573824),
        (8, 575.222370284, 1180.7945424),
        (64, 71.9027962855, 159.1174734),
    ],
)
def test_data_filter_resnet50_has_paradls_printed_times(p: int, compute_s: float, comm_s: float) -> None:
    """49 convolutions are split, and what follows them is not; a device holds 7,219,504 weights."""
    outputs, weights, split_s = 9_096_256 / 49, 22_734_016, RESNET50.forward_s - UNSPLIT_S
    split = (weights - 7_219_504) * 4 / 3
    layers = [ParadlLayer(0, outputs, split / 49, split_s / 49) for _ in range(49)]
    layers.append(ParadlLayer(0, 0, weights - split, UNSPLIT_S, is_split=False))
    found = published_formulas.paradl_data_filter(
        ParadlJob(SAMPLES, 64 * p // 4, layers), p // 4, 4, INTRA_NODE, HockneyLink(40.31e-6, 1 / 12.5e9), phi=4
    )
    assert found.compute_s == pytest.approx(compute_s, rel=1e-9)
    assert found.comm_s == pytest.approx(comm_s, rel=1e-9)


@pytest.mark.parametrize(("micro_batches", "factor"), [(12, 0.3125), (20, 0.2875), (28, 0.276785714), (30, 0.275)])
def test_gpipe_factors_are_those_of_ddlbenchs_table(micro_batches: int, factor: float) -> None:
    """Table 6.1, four workers."""
    assert published_formulas.ddlbench_gpipe_compute_s(1.0, 4, micro_batches) == pytest.approx(factor, rel=1e-8)


@pytest.mark.parametrize(
    ("transfers_s", "micro_batches", "expected_s"),
    [([], 4, 0), ([1.0], 4, 8), ([1.0, 1.0, 1.0], 4, 12), ([1.0, 3.0, 2.0], 5, 2 * (1 + 3 + 3 * 3 + 3 + 2))],
)
def test_gpipe_transfers_follow_ddlbenchs_formula(
    transfers_s: list[float], micro_batches: int, expected_s: float
) -> None:
    assert published_formulas.ddlbench_gpipe_comm_s(transfers_s, micro_batches) == pytest.approx(expected_s)


def test_ddlbenchs_horovod_formula_hides_all_but_a_buffer() -> None:
    links = [HockneyLink(0, 1 / 10e9), HockneyLink(1e-5, 1 / 5e9)] * 2
    assert published_formulas.ddlbench_horovod_step_s(1.0, links, 200e6, 64e6) == pytest.approx(
        0.25 + 6 * (1e-5 + 64e6 / 20e9)
    )
    assert published_formulas.ddlbench_horovod_step_s(1.0, links[:1], 200e6, 64e6) == 1.0
