"""When each action of a step began and ended on one rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpcbench.parallel.schedule import Action
from hpcbench.parallel.walk import Span


class Recorder:
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
            self._zero = _event(self._device)
        self._zero_s = time.perf_counter()

    @contextmanager
    def of(self, action: Action) -> Iterator[None]:
        """Around what ``action`` computes; waiting for its inputs is outside."""
        if self._on_cuda:
            begun = _event(self._device)
            yield
            self._events.append((action, begun, _event(self._device)))
        else:
            begun_s = time.perf_counter()
            yield
            self._begun.append((action, begun_s - self._zero_s, time.perf_counter() - self._zero_s))

    def spans_s(self) -> list[Span]:
        """In the order of execution, in seconds. Waits for the device."""
        if not self._on_cuda:
            return [Span(*one) for one in self._begun]
        torch.cuda.synchronize(self._device)
        return [
            Span(action, self._zero.elapsed_time(begun) / 1e3, self._zero.elapsed_time(ended) / 1e3)
            for action, begun, ended in self._events
        ]


class Asked:
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


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
