"""Clocks for short stretches, and how far their readings lie apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

AHEAD_CYCLES = 20_000_000
"""So long a GPU sleeps (about 10 ms) while it is given work: what launching takes of the host is then in no reading."""


class Watch:
    """Times calls one by one. On cuda events are recorded, and read when all is done.

    On a cpu a rank with one thread reads the processor time of that thread: what others take of the machine, and what a
    quota holds back, is in the time of whole steps alone. With several threads it is the time that passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._pending: list[tuple[list[float], torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, call: Callable[[], object], into: list[float]) -> None:
        """Append the seconds that ``call`` takes to ``into``, at the latest in ``settle``."""
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

    def get_ahead(self) -> None:
        """Give the device something to wait on."""
        if self._device.type == "cuda":
            torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Wait for the device, and write what is missing."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for into, first, last in self._pending:
            into.append(first.elapsed_time(last) / 1e3)
        self._pending.clear()


def median(values: Sequence[float]) -> float:
    """Of a list that is not empty."""
    return quantile(values, 0.5)


def quantile(values: Sequence[float], share: float) -> float:
    """Between two values in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> float:
    """Half of what lies between the 16th and the 84th percentile, over the median: one deviation of a normal one."""
    middle = median(values)
    return (quantile(values, 0.84) - quantile(values, 0.16)) / 2 / middle if middle else 0.0
