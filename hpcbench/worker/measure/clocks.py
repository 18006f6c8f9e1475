"""Clocks for steps and for short calls, and the markers of a step's phases."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from hpcbench.results.timing_statistics import quantile

PhaseMarker = Callable[[str], AbstractContextManager[object]]
"""Called with one of ``PHASE_NAMES``; the part runs inside the context that it gives."""

PHASE_NAMES = ("data", "forward", "backward", "optimizer")

_NO_CONTEXT = nullcontext()


def no_marker(_name: str) -> AbstractContextManager[object]:
    """Mark nothing."""
    return _NO_CONTEXT


class StepClock(ABC):
    """Marks the boundaries of steps; the time between two marks is one step, unless the second one begins anew."""

    def __init__(self) -> None:
        self._marks: list[Any] = []
        self._first = {0}

    def begin(self) -> None:
        """Mark a boundary before which nothing counts: the time since the last mark is in no step."""
        self._first.add(len(self._marks))
        self.mark()

    @abstractmethod
    def mark(self) -> None:
        """Mark a boundary, now. Must not wait for the device."""

    @abstractmethod
    def times_s(self) -> list[float]:
        """Return the seconds of each step that the device has ended. Does not wait."""

    def _steps(self, marks: list[Any]) -> list[tuple[Any, Any]]:
        return [ends for number, ends in enumerate(pairwise(marks), 1) if number not in self._first]


class HostClock(StepClock):
    """``perf_counter``: right where a step has ended when its last call returns."""

    def mark(self) -> None:
        self._marks.append(time.perf_counter_ns())

    def times_s(self) -> list[float]:
        return [(later - earlier) / 1e9 for earlier, later in self._steps(self._marks)]


class CudaClock(StepClock):
    """Events in the stream's order; the stream is never waited for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.cuda.current_stream(device)

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._marks.append(event)

    def times_s(self) -> list[float]:
        passed = list(takewhile(lambda event: event.query(), self._marks))
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in self._steps(passed)]


def make_step_clock(device: torch.device) -> StepClock:
    """Create the clock that is right for ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done what it was given; nothing to wait for on a cpu."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def process_age_s() -> float:
    """Seconds since this process was started, to 10 ms; the kernel's boot clock, which no one sets."""
    try:
        # The name (field 2) may hold spaces and brackets; the start time is the 20th field after it.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time() - float(psutil.Process().create_time())


_SLEEP_HZ = 2e9
"""Cycles of a GPU that sleeps for a second, at most: at a lower clock it sleeps longer."""
_LEAST_SLEEP_S, _LONGEST_SLEEP_S = 10e-3, 1.0
_CALL_S = 250e-6
"""Host time of a call that was not timed before: a layer backward through autograd takes 100 to 150 us."""
_SLEEP_MARGIN = 1.5


class CallTimer:
    """Times calls one by one. On cuda events are recorded, and read when all is done.

    On a cpu a rank with one thread reads the processor time of that thread: what others take of the machine, and what a
    quota holds back, is in the time of whole steps alone. With several threads it is the time that passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._pending: list[tuple[list[float], torch.cuda.Event, torch.cuda.Event]] = []
        self._host_s: dict[Hashable, float] = {}

    def time_all(self, calls: Iterable[tuple[Callable[[], object], list[float]]], count: int, name: Hashable) -> None:
        """Time ``calls`` that follow each other, ``count`` of them. A GPU sleeps until all have been launched.

        The host's time for launching is then in no reading. The sleep is as long as the host took for the calls of
        this ``name`` the last time, and a margin.
        """
        if self._device.type == "cuda":
            sleep_s = max(_LEAST_SLEEP_S, count * _CALL_S, _SLEEP_MARGIN * self._host_s.get(name, 0.0))
            torch.cuda._sleep(int(min(sleep_s, _LONGEST_SLEEP_S) * _SLEEP_HZ))  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        for call, into in calls:
            self.time(call, into)
        self._host_s[name] = time.perf_counter() - began

    def time(self, call: Callable[[], object], into: list[float]) -> None:
        """Append the seconds that ``call`` takes to ``into``, at the latest in ``flush``."""
        if self._device.type != "cuda":
            began = self._read()
            call()
            into.append(self._read() - began)
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        call()
        last.record()
        self._pending.append((into, first, last))

    def flush(self) -> None:
        """Wait for the device, and write what is missing."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for into, first, last in self._pending:
            into.append(first.elapsed_time(last) / 1e3)
        self._pending.clear()


def relative_spread(values: Sequence[float]) -> float:
    """Return half the distance between the 16th and the 84th percentile over the median.

    For a normal distribution that is one standard deviation over the mean.
    """
    ordered, middle = sorted(values), median(values)
    return (quantile(ordered, 0.84) - quantile(ordered, 0.16)) / 2 / middle if middle else 0.0


def reading_statistics(readings: Sequence[float]) -> dict[str, Any]:
    """Return the fields ``seconds`` (the median), ``spread`` and ``repeats`` of a probe's result."""
    return {"seconds": median(readings), "spread": relative_spread(readings), "repeats": len(readings)}
