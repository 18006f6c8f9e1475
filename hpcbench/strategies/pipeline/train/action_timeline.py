"""Begin and end times of the actions of a step, and a watchdog for a pipeline that makes no progress.

On a CPU each wait for a message has its own time limit. On CUDA the host only enqueues work, and NCCL's time limit
would end the process without a report; the watchdog reports first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hpcbench.errors import WorkerError
from hpcbench.strategies.pipeline.schedule_simulator import ActionSpan
from hpcbench.strategies.pipeline.schedules import Action


class ActionRecorder:
    """Times of actions since ``start``: by the host's clock on a cpu, by events in the stream on cuda."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._device = device
        self._spans: list[tuple[Action, Any, Any]] = []
        """Begin and end: seconds, on cuda events."""

    def start(self) -> None:
        """Set the origin of all times; the ranks call it together."""
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        self._zero = self._now()

    @contextmanager
    def of(self, action: Action) -> Iterator[None]:
        """Record the context as the time of ``action``: its computation, without the wait for its inputs."""
        begin = self._now()
        yield
        self._spans.append((action, begin, self._now()))

    def spans_s(self) -> list[ActionSpan]:
        """Return the spans in the order of execution, in seconds. Waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        return [ActionSpan(action, self._time_s(begin), self._time_s(end)) for action, begin, end in self._spans]

    def _now(self) -> Any:
        return _record_event(self._device) if self._on_cuda else time.perf_counter()

    def _time_s(self, mark: Any) -> float:
        return float(self._zero.elapsed_time(mark) / 1e3 if self._on_cuda else mark - self._zero)


class PendingActions:
    """Actions that were enqueued on a cuda device and have not finished. On a cpu there are none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._actions: deque[tuple[Action, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()

    def add(self, action: Action) -> None:
        """Register ``action``, whose work is enqueued completely."""
        if self._device.type == "cuda":
            self._actions.append((action, _record_event(self._device, enable_timing=False)))

    def remove_finished(self) -> int:
        """Return the number of unfinished actions; from any thread, without waiting."""
        with self._lock:
            while self._actions and self._actions[0][1].query():  # type: ignore[no-untyped-call]
                self._actions.popleft()
            return len(self._actions)

    def first(self) -> Action | None:
        """Return the first unfinished action; ``None`` if all are finished."""
        return next((action for action, _ in tuple(self._actions)), None)


def _record_event(device: torch.device, enable_timing: bool = True) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=enable_timing)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


WATCHDOG_TIMEOUT_FRACTION = 0.9
"""Part of NCCL's time limit: the watchdog reports before NCCL ends the process."""
STUCK_HINT = "the state of every rank is in the result's ranks"

_CHECKS_PER_TIMEOUT = 20


@contextmanager
def watch_progress(
    progress: Callable[[], int | None],
    report: Callable[[], str],
    timeout_s: float,
    on_stuck: Callable[[WorkerError], None],
) -> Iterator[None]:
    """Call ``on_stuck`` from a thread if ``progress`` stays the same for ``timeout_s`` within the context.

    Args:
        progress: Returns a growing count, or ``None`` while there is nothing to do.
        report: Returns one sentence on the rank's position, for the error.
        timeout_s: Time without progress, in seconds.
        on_stuck: Receives the error.
    """
    ended = threading.Event()

    def watch() -> None:
        last, since = progress(), time.monotonic()
        while not ended.wait(timeout_s / _CHECKS_PER_TIMEOUT):
            current = progress()
            if current is None or current != last:
                last, since = current, time.monotonic()
            elif time.monotonic() - since > timeout_s:
                message = f"the pipeline is stuck: for {timeout_s:g} s nothing was done ({report()})"
                on_stuck(WorkerError(message, hint=STUCK_HINT))
                return

    threading.Thread(target=watch, name="pipeline", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
