"""Begin and end times of the actions of a step, and a watchdog for a pipeline that makes no progress.

On a CPU each wait for a message has its own time limit. On CUDA the host only enqueues work, and NCCL's time limit
would
end the process without a report; the watchdog reports first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.pipeline.schedule_simulator import ActionSpan
from hpcbench.parallel.pipeline.schedules import Action
from hpcbench.results.schema import TimelineSpan
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.strategies.base import Strategy


class ActionRecorder:
    """Times of actions since ``start``: the host's clock on a cpu, events in the stream's order on cuda."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._device = device
        self._begun: list[tuple[Action, float, float]] = []
        self._events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Everything counts from here; the ranks call it together."""
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
            self._zero = _record_event(self._device)
        self._zero_s = time.perf_counter()

    @contextmanager
    def of(self, action: Action) -> Iterator[None]:
        """Around what ``action`` computes; waiting for its inputs is outside."""
        if self._on_cuda:
            begun = _record_event(self._device)
            yield
            self._events.append((action, begun, _record_event(self._device)))
        else:
            begun_s = time.perf_counter()
            yield
            self._begun.append((action, begun_s - self._zero_s, time.perf_counter() - self._zero_s))

    def spans_s(self) -> list[ActionSpan]:
        """In the order of execution, in seconds. Waits for the device."""
        if not self._on_cuda:
            return [ActionSpan(*one) for one in self._begun]
        torch.cuda.synchronize(self._device)
        return [
            ActionSpan(action, self._zero.elapsed_time(begun) / 1e3, self._zero.elapsed_time(ended) / 1e3)
            for action, begun, ended in self._events
        ]


class PendingActions:
    """Actions that a device was asked for and is not done with. On a cpu there are none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left: deque[tuple[Action, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()

    def add(self, action: Action) -> None:
        """The host has asked for all of ``action``."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._left.append((action, event))

    def forget_done(self) -> int:
        """How many are left; from any thread, and without waiting."""
        with self._lock:
            while self._left and self._left[0][1].query():  # type: ignore[no-untyped-call]
                self._left.popleft()
            return len(self._left)

    def first(self) -> Action | None:
        """The first that is left."""
        return next((action for action, _ in tuple(self._left)), None)


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


WATCHDOG_TIMEOUT_FRACTION = 0.9
"""Of NCCL's limit: said before that ends the process."""

_CHECKS_PER_TIMEOUT = 20


@contextmanager
def watch_progress(
    progress: Callable[[], int | None],
    state: Callable[[], str],
    patience_s: float,
    stuck: Callable[[WorkerError], None],
) -> Iterator[None]:
    """While in here, ``stuck`` is called from a thread when ``progress`` has stayed the same for ``patience_s``.

    ``progress`` is ``None`` while nothing is under way.
    """
    done = threading.Event()

    def watch() -> None:
        seen, since = progress(), time.monotonic()
        while not done.wait(patience_s / _CHECKS_PER_TIMEOUT):
            now = progress()
            if now is None or now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > patience_s:
                stuck(pipeline_stuck_error(state(), patience_s))
                return

    thread = threading.Thread(target=watch, name="pipeline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def pipeline_stuck_error(state: str, waited_s: float) -> WorkerError:
    """What a run that is stuck has failed of."""
    return WorkerError(
        f"the pipeline is stuck: for {waited_s:g} s nothing was done ({state})",
        hint="the state of every rank is in the result's ranks",
    )


def watch_pipeline(
    strategy: Strategy, place: RankContext, abandon: Callable[[BaseException], None]
) -> AbstractContextManager[None]:
    """On cuda, ``abandon`` the run from a thread when the schedule is stuck. Elsewhere, and for whatever is no
    pipeline, nothing is to be watched."""
    runtime = getattr(strategy, "runtime", None)
    if runtime is None or place.device.type != "cuda":
        return nullcontext()
    return watch_progress(runtime.progress, runtime.state, WATCHDOG_TIMEOUT_FRACTION * place.wait_s, abandon)


def record_timeline(
    strategy: Strategy,
    feed: DataFeed,
    spec: RunSpec,
    place: RankContext,
    stop: StopController,
    any_rank: Callable[[bool], bool],
    step: int,
) -> list[TimelineSpan]:
    """The spans of this rank in ``step``; none where the run is no pipeline of single steps, or profiles nothing.

    A whole batch is taken. A rank that is told to stop leaves it out on all of them. The ranks begin
    together, as closely as a barrier parts them.
    """
    runtime = getattr(strategy, "runtime", None)
    if spec.profile_steps == 0 or runtime is None or not get_strategy(spec.strategy).records_timeline:
        return []
    if any_rank(stop.should_stop()):
        return []
    while feed.global_count(step) < feed.global_batch_size and feed.steps_per_epoch > 1:
        step += 1
    runtime.recorder = recorder = ActionRecorder(place.device)
    try:
        dist.barrier(device_ids=[place.device.index] if place.device.type == "cuda" else None)
        recorder.start()
        strategy.step(feed, step)
    finally:
        runtime.recorder = None
    return [
        TimelineSpan(span.action.kind, span.action.chunk, span.action.micro_batch, span.begin, span.end)
        for span in recorder.spans_s()
    ]
