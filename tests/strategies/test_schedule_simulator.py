from __future__ import annotations

import pytest

from hpcbench.strategies.pipeline.schedule_simulator import schedule_step_time
from hpcbench.strategies.pipeline.schedules import PipelineLayout
from hpcbench.strategies.pipeline.stage_partition import BlockTimes
from hpcbench.strategies.pipeline.weight_versions import Staleness

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
