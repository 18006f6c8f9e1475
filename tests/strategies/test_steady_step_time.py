"""The circles that bound a pipeline that is never emptied, by hand and against a walk through many steps."""

from __future__ import annotations

import pytest

from hpcbench.strategies.pipeline.schedule_simulator import (
    StageTimes,
    simulated_step_time_s,
    steady_step_time_s,
)
from hpcbench.strategies.pipeline.weight_versions import Staleness

UNEVEN = [StageTimes(1.0, 2.0, 0.5, 0.3), StageTimes(1.5, 2.5, 0.2, 0.1, 0.3), StageTimes(0.5, 1.5, 0.4, 0.0, 0.1)]


@pytest.mark.parametrize(
    ("delay", "micro_batches", "expected"),
    [
        # The second stage is busy all the time, and updates after every minibatch or once.
        (Staleness(3), 1, 4.2),
        (Staleness(3), 4, 16.8),
        (Staleness(3, vertical_sync=True), 4, 16.8),
        (Staleness(3, double_buffered=True), 4, 16.2),
    ],
)
def test_the_steady_step_time_is_that_by_hand(delay: Staleness, micro_batches: int, expected: float) -> None:
    assert steady_step_time_s(UNEVEN, delay, micro_batches) == pytest.approx(expected)


def test_slow_links_determine_the_steady_step_time() -> None:
    stages = [StageTimes(1.0, 2.0, 0.0, 9.0), StageTimes(1.0, 2.0, 0.0, 0.0, 9.0)]
    assert steady_step_time_s(stages, Staleness(2), 1) == (6.0 + 18.0) / 2


@pytest.mark.parametrize("sent", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 3, 5])
@pytest.mark.parametrize("delay", [Staleness(4), Staleness(4, double_buffered=True)], ids=["stash", "2bw"])
def test_the_steady_step_time_is_that_of_a_simulation(delay: Staleness, micro_batches: int, sent: float) -> None:
    """Circles of several minibatches make some steps longer than others: a walk of finite length averages them."""
    stages = [StageTimes(1.0, 2.0, 0.3, sent, sent), StageTimes(1.2, 2.2, 0.3, sent, sent)] * 2
    walked_s = simulated_step_time_s(stages, delay, micro_batches)
    assert steady_step_time_s(stages, delay, micro_batches) == pytest.approx(walked_s, rel=0.02)


def test_double_buffers_and_few_micro_batches_run_dry() -> None:
    """Four equal stages, one micro-batch a step: two thirds of the time are lost."""
    stages = [StageTimes(1.0, 2.0, 0.0)] * 4
    assert steady_step_time_s(stages, Staleness(4, double_buffered=True), 1) == pytest.approx(9.0)
    assert steady_step_time_s(stages, Staleness(4), 1) == pytest.approx(3.0)
