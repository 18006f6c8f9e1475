"""The timed training loop of all strategies, and the evaluation between its timed steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.schema import EvaluationPoint, RankResult
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.measure.clocks import StepClock, make_step_clock, process_age_s, synchronize
from hpcbench.worker.model_execution import count_compiled_graphs, force_eager, recompilation_warning
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.strategy import Strategy


class LoopProgress:
    """The measurements of a rank so far. The stop thread reads them too, while the loop may be stuck."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self.warmup_steps = spec.warmup_steps
        self.device = device
        self.clock: StepClock = make_step_clock(device)
        self.losses: list[Tensor] = []
        self.time_to_first_step_s: float | None = None
        self.warmup_time_s = 0.0
        self.began_s = time.perf_counter()
        self.samples: list[int] = []
        self.evaluations: list[EvaluationPoint] = []
        self.recompiled = 0
        """Graphs compiled within the timed steps."""
        self.complete = False
        """The timed steps are complete: a signal or an error from here on does not invalidate them."""
        self._read: list[float | None] | None = None

    def step_times_s(self) -> list[float]:
        """Seconds of each timed step that has ended."""
        return self.clock.times_s()

    def train_time_s(self) -> float:
        """Seconds of training so far: warm-up and timed steps, without what lay between them."""
        return self.warmup_time_s + math.fsum(self.step_times_s())

    def read_losses(self, may_wait: bool) -> list[float | None]:
        """This rank's part of each step's loss, ``None`` where it is not finite; empty where reading would wait."""
        if self._read is not None:
            return self._read
        if self.device.type == "cuda" and not may_wait:
            return []
        values = [float(value) for value in torch.stack(self.losses).tolist()] if self.losses else []
        return [value if math.isfinite(value) else None for value in values]

    def warnings(self) -> list[str]:
        warning = recompilation_warning(self.recompiled)
        return [warning] if warning else []

    def write_into(self, result: RankResult, may_wait: bool) -> None:
        """Set the fields of ``result`` that come from the steps so far."""
        times = self.step_times_s()
        result.steps_done, result.step_times_s = len(times), times
        result.step_samples = self.samples[: len(times)]
        result.losses = self.read_losses(may_wait)
        result.time_to_first_step_s = self.time_to_first_step_s
        result.evaluations = self.evaluations
        result.accuracy = self.evaluations[-1].accuracy if self.evaluations else None

    def complete_timing(self) -> None:
        """The device is idle after the last timed step: reading never waits from here on."""
        self._read = self.read_losses(may_wait=True)
        self.complete = True


EvaluateHook = Callable[[int], bool]
"""Called between timed steps with the number of steps made; whether training is at its target, equal on all ranks."""


def run_training_loop(
    strategy: Strategy, feed: DataFeed, spec: RunSpec, progress: LoopProgress, stop: StopController,
    barrier: Callable[[], None], evaluate: EvaluateHook | None = None, at_end: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Warm-up steps, a barrier, then the timed steps; ``progress`` holds what was measured, however it ends.

    Inside the timed region nothing waits for the device and no loss is read. With ``evaluate`` the clock rests while
    it is called: after every ``spec.evaluate_every`` steps and after the last; training ends where it returns true.
    ``barrier`` and ``at_end`` stand right around the timed steps, around each part of them where there are several.
    Raises ``stop.Stopped`` at the boundary of a step after a signal to stop.
    """
    total = spec.warmup_steps + spec.steps
    progress.samples = [feed.replica_count(step, strategy.replica) for step in range(spec.warmup_steps, total)]
    feed.prepare(strategy.replica)
    began = progress.began_s = time.perf_counter()
    for step in range(spec.warmup_steps):
        stop.raise_if_stopped()
        progress.losses.append(strategy.step(feed, step))
        _record_first_step(progress)
    synchronize(progress.device)
    progress.warmup_time_s = time.perf_counter() - began if spec.warmup_steps else 0.0
    for steps in timed_segments(spec.warmup_steps, spec.steps, spec.evaluate_every if evaluate else 0):
        barrier()
        compiled = count_compiled_graphs() if spec.compile else 0
        _run_timed_steps(strategy, feed, progress, stop, steps)
        at_end()
        progress.recompiled += count_compiled_graphs() - compiled if spec.compile else 0
        if len(progress.losses) < steps.stop:
            stop.raise_if_stopped()
        if steps.stop == total:
            progress.complete_timing()
        if evaluate is not None and evaluate(steps.stop):
            break
    progress.complete_timing()


def timed_segments(warmup_steps: int, steps: int, every: int) -> list[range]:
    """The timed steps, cut where an evaluation is due: after each step whose number from 1 is a multiple of ``every``.

    >>> timed_segments(3, 6, 4)
    [range(3, 4), range(4, 8), range(8, 9)]
    """
    total = warmup_steps + steps
    inner = [cut for cut in range(every, total, every) if cut > warmup_steps] if every else []
    return [range(begin, end) for begin, end in zip([warmup_steps, *inner], [*inner, total], strict=True)]


def _run_timed_steps(
    strategy: Strategy, feed: DataFeed, progress: LoopProgress, stop: StopController, steps: range
) -> None:
    mark, append = progress.clock.mark, progress.losses.append
    progress.clock.begin()
    for step in steps:
        if stop.should_stop():
            break
        append(strategy.step(feed, step))
        mark()
        if progress.time_to_first_step_s is None:
            _record_first_step(progress)
    synchronize(progress.device)


def _record_first_step(progress: LoopProgress) -> None:
    if progress.time_to_first_step_s is None:
        synchronize(progress.device)
        progress.time_to_first_step_s = process_age_s()


def held_out_accuracy(module: nn.Module, feed: DataFeed) -> float | None:
    """Share of held-out targets that ``module`` names right, in eval mode.

    ``None`` for a synthetic data set, and where the targets are values, which are never right or wrong.
    """
    batches = feed.held_out()
    if batches is None:
        return None
    was_training = module.training
    module.eval()
    right = total = 0
    # Other batch sizes would be compiled anew, and crowd out training's graphs.
    with torch.no_grad(), force_eager():
        for inputs, targets in batches:
            if targets.is_floating_point():
                break
            right += int((module(inputs).argmax(dim=-1) == targets).sum().item())
            total += targets.numel()
    module.train(was_training)
    return right / total if total else None


def make_evaluate_hook(
    strategy: Strategy, feed: DataFeed, spec: RunSpec, progress: LoopProgress, rank: int,
    any_rank: Callable[[bool], bool],
) -> EvaluateHook | None:  # fmt: skip
    """Return the evaluation between timed steps; ``None`` if there is nothing to evaluate on.

    Rank 0 evaluates and the others wait for its answer, or compute along if the shards of all are needed.
    """
    if feed.held_out() is None:
        return None

    def evaluate(step: int) -> bool:
        reached = False
        if rank == 0 or strategy.forward_is_collective:
            train_time_s = progress.train_time_s()
            accuracy = held_out_accuracy(strategy.module, feed)
            if accuracy is not None and rank == 0:
                wall_s = time.perf_counter() - progress.began_s
                point = EvaluationPoint(step=step, train_time_s=train_time_s, wall_s=wall_s, accuracy=accuracy)
                progress.evaluations.append(point)
                reached = spec.target_accuracy is not None and accuracy >= spec.target_accuracy
        return any_rank(reached)

    return evaluate
