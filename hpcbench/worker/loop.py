"""The one timed loop of all strategies."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hpcbench.config.spec import RunSpec
from hpcbench.worker.data.feed import Feed
from hpcbench.worker.stop import Stop
from hpcbench.worker.strategies.base import Strategy
from hpcbench.worker.timers import StepClock, make_clock, process_age_s, synchronize


class Progress:
    """What a rank has measured so far. Read by the stop thread too, while the loop may be stuck."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self.warmup_steps = spec.warmup_steps
        self.device = device
        self.clock: StepClock = make_clock(device)
        self.losses: list[Tensor] = []
        self.time_to_first_step_s: float | None = None
        self.samples: list[int] = []

    def step_times_s(self) -> list[float]:
        """Seconds of each timed step that has ended."""
        return self.clock.times_s()

    def read_losses(self, may_wait: bool) -> list[float | None]:
        """This rank's part of each step's loss, ``None`` where it is not finite; empty where reading would wait."""
        if self.device.type == "cuda" and not may_wait:
            return []
        values = [float(value) for value in torch.stack(self.losses).tolist()] if self.losses else []
        return [value if math.isfinite(value) else None for value in values]


def run_loop(
    strategy: Strategy,
    feed: Feed,
    spec: RunSpec,
    progress: Progress,
    stop: Stop,
    barrier: Callable[[], None],
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """Warm-up steps, a barrier, then the timed steps; ``progress`` holds what was measured, however it ends.

    ``at_end`` is called when the device has done the last timed step, also where a stop has cut them short.

    Inside the timed region nothing waits for the device and no loss is read. Raises ``stop.Stopped`` at the boundary
    of a step when told to stop.
    """
    total = spec.warmup_steps + spec.steps
    progress.samples = [feed.count(step, strategy.replica) for step in range(spec.warmup_steps, total)]
    feed.prepare(strategy.replica)
    for step in range(spec.warmup_steps):
        stop.check()
        progress.losses.append(strategy.step(feed, step))
        _note_first_step(progress)
    synchronize(progress.device)
    barrier()
    mark, append = progress.clock.mark, progress.losses.append
    mark()
    for step in range(spec.warmup_steps, total):
        if stop.due():
            break
        append(strategy.step(feed, step))
        mark()
        if progress.time_to_first_step_s is None:
            _note_first_step(progress)
    synchronize(progress.device)
    at_end()
    if len(progress.losses) < total:
        stop.check()


def _note_first_step(progress: Progress) -> None:
    if progress.time_to_first_step_s is None:
        synchronize(progress.device)
        progress.time_to_first_step_s = process_age_s()


def instrument_cost_s(device: torch.device, repeats: int = 10_000) -> float:
    """What the loop's own bookkeeping adds to one timed step, in seconds, measured now."""
    import time

    stop, clock, loss = Stop(), make_clock(device), torch.zeros(())
    losses: list[Tensor] = []
    append, mark = losses.append, clock.mark
    first_step_s: float | None = 0.0
    stop.set_deadline(time.time() + 3600, 3600)
    began = time.perf_counter()
    for _ in range(repeats):
        if stop.due():
            break
        append(loss)
        mark()
        if first_step_s is None:
            break
    return (time.perf_counter() - began) / repeats
