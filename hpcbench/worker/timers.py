"""Clocks around steps. The host's on a cpu; events on cuda, read only after the last timed step."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch


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


def make_clock(device: torch.device) -> StepClock:
    """The clock that is right for ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done what it was given; nothing to wait for on a cpu."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def process_age_s() -> float:
    """Seconds since this process was started, to 10 ms; the kernel's boot clock, which no one sets."""
    import os

    try:
        # The name (field 2) may hold spaces and brackets; the start time is the 20th field after it.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        import psutil

        return time.time() - float(psutil.Process().create_time())
