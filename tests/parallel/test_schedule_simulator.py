from __future__ import annotations

import pytest

from hpcbench.parallel.pipeline.schedule_simulator import (
    StageTimes,
    action_times,
    schedule_step_time,
    steady_step_time_s,
    topological_order,
)
from hpcbench.parallel.pipeline.schedules import PipelineLayout, schedule_actions
from hpcbench.parallel.pipeline.stage_partition import BlockTimes
from hpcbench.parallel.pipeline.weight_versions import Staleness

DELAYS = {"pipedream": Staleness(4), "2bw": Staleness(4, double_buffered=True)}
EVEN = [[BlockTimes(1.0, 2.0)]] * 4


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "step_time_s", "bubble_fraction"),
    [
        ("gpipe", 1, 12.0, 0.75),
        ("gpipe", 8, 33.0, 3 / 11),
        ("1f1b", 8, 33.0, 3 / 11),
        ("zero_bubble", 8, 27.0, 1 / 9),
        ("pipedream", 1, 3.0, 0.0),
        ("pipedream", 3, 9.0, 0.0),
        ("2bw", 4, 12.0, 0.0),
        ("2bw", 1, 9.0, 2 / 3),
    ],
)
def test_equal_stages_give_the_published_step_and_bubble(
    schedule: str, micro_batches: int, step_time_s: float, bubble_fraction: float
) -> None:
    found = schedule_step_time(schedule, PipelineLayout(4), micro_batches, EVEN, DELAYS.get(schedule))
    assert found.step_time_s == pytest.approx(step_time_s)
    assert found.bubble_fraction == pytest.approx(bubble_fraction)
    assert found.stage_times_s == [3.0] * 4


@pytest.mark.parametrize(("schedule", "step_time_s"), [("gpipe", 23.0), ("pipedream", 20.0)])
def test_the_slowest_stage_determines_the_step_time(schedule: str, step_time_s: float) -> None:
    """Four micro-batches over stages that take 3 and 5: PipeDream takes the slowest one's time of each."""
    uneven = [[BlockTimes(1.0, 2.0)], [BlockTimes(1.0, 1.0), BlockTimes(1.0, 2.0)]]
    delay = Staleness(2) if schedule == "pipedream" else None
    assert schedule_step_time(schedule, PipelineLayout(2), 4, uneven, delay).step_time_s == pytest.approx(step_time_s)


# gpipe, two micro-batches on two ranks. Every action takes 2, but one after a wait takes 1:
#
#     time     0   1   2   3   4   5   6   7   8   9   10
#     rank 0   F0------F1------            B1--    B0--
#     rank 1           F0--    F1--B1------B0------
def test_an_action_after_a_wait_takes_the_time_that_it_is_given() -> None:
    layout = PipelineLayout(2)
    order = topological_order(schedule_actions("gpipe", layout, 2), layout)

    def after_wait(_rank: int, wait_s: float, duration_s: float) -> float:
        return duration_s / 2 if wait_s > 0 else duration_s

    begins, ends = action_times(order, 2, lambda _: 2.0, lambda _: 0.0, after_wait)
    times = {
        (rank, action.kind, action.micro_batch): (begin, end)
        for rank, action, begin, end in zip(order.ranks, order.actions, begins, ends, strict=True)
    }
    assert times == {
        (0, "F", 0): (0.0, 2.0), (0, "F", 1): (2.0, 4.0), (0, "B", 1): (7.0, 8.0), (0, "B", 0): (9.0, 10.0),
        (1, "F", 0): (2.0, 3.0), (1, "F", 1): (4.0, 5.0), (1, "B", 1): (5.0, 7.0), (1, "B", 0): (7.0, 9.0),
    }  # fmt: skip


@pytest.mark.parametrize("delay", [Staleness(2), Staleness(2, double_buffered=True)])
def test_durations_after_waits_shorten_a_steady_step(delay: Staleness) -> None:
    stages = [StageTimes(1.0, 2.0, 0.0), StageTimes(2.0, 4.0, 0.0)]
    plain_s = steady_step_time_s(stages, delay, 4)
    same_s = steady_step_time_s(stages, delay, 4, lambda: lambda _rank, _wait_s, duration_s: duration_s)
    assert same_s == pytest.approx(plain_s)
    # The second stage never waits: it determines the step, whatever the first one saves.
    first_s = steady_step_time_s(
        stages, delay, 4, lambda: lambda rank, _wait_s, duration_s: duration_s / 2 if rank == 0 else duration_s
    )
    assert first_s == pytest.approx(plain_s)
    assert steady_step_time_s(stages, delay, 4, lambda: lambda *given: given[2] / 2) == pytest.approx(plain_s / 2)
