from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.measure.clocks import HostClock
from hpcbench.worker.shutdown import StopController, Stopped
from hpcbench.worker.training_loop import (
    LoopProgress,
    make_evaluate_hook,
    run_training_loop,
    timed_segments,
)
from tests.worker.helpers import make_spec
from tests.worker.only_steps import OnlySteps

CPU = torch.device("cpu")


class Recorder(OnlySteps):
    """A strategy that writes down what the loop asks of it."""

    def __init__(self, stop: StopController, stop_after: int | None = None, losses: list[float] | None = None) -> None:
        self.calls: list[Any] = []
        self._stop, self._stop_after, self._losses = stop, stop_after, losses

    def step(self, feed: DataFeed, step: int) -> torch.Tensor:
        self.calls.append(step)
        if step == self._stop_after:
            self._stop.reason = Stopped("cancelled", "told")
        return torch.tensor(self._losses[step] if self._losses else float(step))


def run(
    warmup: int, steps: int, stop_after: int | None = None, losses: list[float] | None = None, **spec: Any
) -> tuple[Recorder, LoopProgress]:
    stop = StopController()
    chosen = make_spec(warmup_steps=warmup, steps=steps, **spec)
    recorder, progress = Recorder(stop, stop_after, losses), LoopProgress(chosen, CPU)
    try:
        run_training_loop(
            recorder, make_feed(chosen, CPU), chosen, progress, stop, lambda: recorder.calls.append("barrier")
        )
    except Stopped:
        recorder.calls.append("stopped")
    return recorder, progress


def test_warm_up_then_a_barrier_then_the_timed_steps() -> None:
    recorder, progress = run(2, 3)
    assert recorder.calls == [0, 1, "barrier", 2, 3, 4]
    assert len(progress.step_times_s()) == 3
    assert progress.read_losses(may_wait=True) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert progress.time_to_first_step_s is not None


def test_without_warm_up_the_first_step_is_timed_and_noted() -> None:
    recorder, progress = run(0, 2)
    assert recorder.calls == ["barrier", 0, 1]
    assert len(progress.step_times_s()) == 2
    assert progress.time_to_first_step_s is not None


@pytest.mark.parametrize(
    ("stop_after", "calls", "timed"),
    [
        (0, [0, "stopped"], 0),
        (1, [0, 1, "barrier", "stopped"], 0),
        (3, [0, 1, "barrier", 2, 3, "stopped"], 2),
        # Told during the last step: everything was measured, so nothing was stopped.
        (4, [0, 1, "barrier", 2, 3, 4], 3),
    ],
)
def test_a_stop_ends_the_loop_at_the_next_boundary(stop_after: int, calls: list[Any], timed: int) -> None:
    recorder, progress = run(2, 3, stop_after)
    assert recorder.calls == calls
    assert len(progress.step_times_s()) == timed


@pytest.mark.parametrize(
    ("warmup", "steps", "every", "expected"),
    [
        (2, 3, 0, [range(2, 5)]),
        (2, 6, 3, [range(2, 3), range(3, 6), range(6, 8)]),
        # An evaluation that would fall into the warm-up, or after the last step, needs no cut.
        (4, 4, 2, [range(4, 6), range(6, 8)]),
        (0, 4, 4, [range(4)]),
        (5, 2, 100, [range(5, 7)]),
    ],
)
def test_the_timed_steps_are_cut_where_an_evaluation_is_due(
    warmup: int, steps: int, every: int, expected: list[range]
) -> None:
    assert timed_segments(warmup, steps, every) == expected


def test_evaluation_lies_between_timed_steps_and_in_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    spec = make_spec(warmup_steps=1, steps=5, evaluate_every=2)
    recorder, progress = Recorder(StopController()), LoopProgress(spec, CPU)

    def evaluate(step: int) -> bool:
        recorder.calls.append(f"evaluate {step}")
        now[0] += 1_000_000_000
        return False

    run_training_loop(
        recorder,
        make_feed(spec, CPU),
        spec,
        progress,
        StopController(),
        lambda: recorder.calls.append("barrier"),
        evaluate,
    )
    assert recorder.calls == [
        0, "barrier", 1, "evaluate 2", "barrier", 2, 3, "evaluate 4", "barrier", 4, 5, "evaluate 6",
    ]  # fmt: skip
    assert progress.step_times_s() == [0.0] * 5, "each evaluation took a second, the steps none"


def test_training_ends_at_its_target() -> None:
    spec = make_spec(warmup_steps=1, steps=7, evaluate_every=2, target_accuracy=0.1)
    recorder, progress = Recorder(StopController()), LoopProgress(spec, CPU)
    feed = make_feed(spec, CPU)
    # Every image is taken for a 1, from the next evaluation on for a 2, then for a 3.
    last = torch.nn.Linear(64, 10)
    recorder.module = torch.nn.Sequential(torch.nn.Flatten(), last)
    with torch.no_grad():
        last.weight.zero_()
        last.bias.zero_()[1] = 1.0
    said: list[bool] = []

    def any_rank(flag: bool) -> bool:
        said.append(flag)
        with torch.no_grad():
            last.bias.zero_()[1 + len(said)] = 1.0
        return flag

    evaluate = make_evaluate_hook(recorder, feed, spec, progress, 0, any_rank)
    run_training_loop(recorder, feed, spec, progress, StopController(), lambda: None, evaluate)
    shares = [(feed_labels(feed) == digit).float().mean().item() for digit in (1, 2, 3)]
    assert [one.accuracy for one in progress.evaluations] == pytest.approx(shares[: len(progress.evaluations)])
    first = next(number for number, share in enumerate(shares) if share >= 0.1)
    assert said == [False] * first + [True]
    assert [one.step for one in progress.evaluations] == [2, 4, 6][: first + 1]
    assert len(progress.step_times_s()) == progress.evaluations[-1].step - 1
    assert progress.complete
    for point in progress.evaluations:
        assert point.wall_s is not None
        assert point.wall_s > point.train_time_s, "evaluations are in the one and not in the other"


def feed_labels(feed: DataFeed) -> torch.Tensor:
    batches = feed.held_out()
    assert batches is not None
    return torch.cat([labels for _, labels in batches])


def test_time_before_a_restart_of_the_clock_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 1, 3, 100, 104, 200])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks) * 1_000_000_000)
    clock = HostClock()
    assert clock.times_s() == []
    for move in (clock.begin, clock.mark, clock.mark, clock.begin, clock.mark, clock.begin):
        move()
    assert clock.times_s() == [1.0, 2.0, 4.0]
