"""Clocks for steps and for short calls, and the markers of a step's phases."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Protocol

import psutil
import torch

from hpcbench.results.timing_statistics import quantile

PhaseMarker = Callable[[str], AbstractContextManager[object]]
"""Called with one of ``PHASE_NAMES``; the part runs inside the context that it gives."""

PHASE_NAMES = ("data", "forward", "backward", "optimizer")

_NO_CONTEXT = nullcontext()


def no_marker(_name: str) -> AbstractContextManager[object]:
    """No mark at all."""
    return _NO_CONTEXT


class StepClock(Protocol):
    """Marks the boundaries of steps; the time between two marks is one step, unless the second one begins anew."""

    def begin(self) -> None:
        """A boundary before which nothing counts: what has passed since the last mark is in no step."""

    def mark(self) -> None:
        """A boundary, now. Must not wait for the device."""

    def times_s(self) -> list[float]:
        """Seconds of each step, as far as the device has come. Does not wait."""


class HostClock:
    """``perf_counter``: right where a step has ended when its last call returns."""

    def __init__(self) -> None:
        self._marks: list[int] = []
        self._first = {0}

    def begin(self) -> None:
        """A boundary, now, that ends no step."""
        self._first.add(len(self._marks))
        self.mark()

    def mark(self) -> None:
        """A boundary, now."""
        self._marks.append(time.perf_counter_ns())

    def times_s(self) -> list[float]:
        """Seconds of each step."""
        ends = enumerate(pairwise(self._marks), 1)
        return [(later - earlier) / 1e9 for number, (earlier, later) in ends if number not in self._first]


class CudaClock:
    """Events in the stream's order; the stream is never waited for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._events: list[torch.cuda.Event] = []
        self._first = {0}

    def begin(self) -> None:
        """A boundary where the stream is now, that ends no step."""
        self._first.add(len(self._events))
        self.mark()

    def mark(self) -> None:
        """A boundary where the stream is now."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._events.append(event)

    def times_s(self) -> list[float]:
        """Seconds of each step that the device has ended."""
        passed = []
        for event in self._events:
            if not event.query():  # type: ignore[no-untyped-call]
                break
            passed.append(event)
        ends = enumerate(pairwise(passed), 1)
        return [earlier.elapsed_time(later) / 1e3 for number, (earlier, later) in ends if number not in self._first]


def make_step_clock(device: torch.device) -> StepClock:
    """The clock that is right for ``device``."""
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


SLEEP_CYCLES = 20_000_000
"""So long a GPU sleeps (about 10 ms) while it is given work: what launching takes of the host is then in no reading."""


class CallTimer:
    """Times calls one by one. On cuda events are recorded, and read when all is done.

    On a cpu a rank with one thread reads the processor time of that thread: what others take of the machine, and what a
    quota holds back, is in the time of whole steps alone. With several threads it is the time that passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._pending: list[tuple[list[float], torch.cuda.Event, torch.cuda.Event]] = []

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

    def queue_sleep(self) -> None:
        """Give the device something to wait on."""
        if self._device.type == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]

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
