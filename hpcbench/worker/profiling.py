"""Steps under torch's profiler, after the timed ones: where their time goes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hpcbench.config.spec import RunSpec
from hpcbench.results.schema import Phases
from hpcbench.worker.data.feed import Feed
from hpcbench.worker.phases import unmarked
from hpcbench.worker.split import MARK, STEP, Event, split
from hpcbench.worker.stop import Stop
from hpcbench.worker.strategies.base import Strategy
from hpcbench.worker.timers import synchronize


class Profiled(NamedTuple):
    """What came of the profiled steps; the run is as good without."""

    phases: Phases | None
    warnings: list[str]


def run_profiled(
    strategy: Strategy, feed: Feed, spec: RunSpec, device: torch.device, stop: Stop, any_rank: Callable[[bool], bool],
    first: int,
) -> Profiled:  # fmt: skip
    """``spec.profile_steps`` steps from number ``first`` on, all ranks together.

    A rank that is told to stop ends them on all ranks; what a profiler cannot do is a warning. Every rank makes the
    same steps whether its own profiler works or not.
    """
    if spec.profile_steps == 0:
        return Profiled(None, [])
    recorder = _Recorder(device)
    recorder.start()
    made = 0
    try:
        strategy.phases = _mark
        for step in range(first, first + spec.profile_steps):
            # The agreement is a barrier too: the ranks begin each step together.
            if any_rank(stop.due()):
                break
            with record_function(STEP):
                strategy.step(feed, step)
                synchronize(device)
            made += 1
    finally:
        strategy.phases = unmarked
        events = recorder.stop()
    if made < spec.profile_steps:
        recorder.warnings.append(f"{made} of {spec.profile_steps} profiled steps were made: no time was left")
    return Profiled(split(events, device.type == "cuda") if made else None, recorder.warnings)


def _mark(name: str) -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = record_function(MARK + name)
    return context


class _Recorder:
    """torch's profiler, whose failures are warnings."""

    def __init__(self, device: torch.device) -> None:
        self.warnings: list[str] = []
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: Any = None

    def start(self) -> None:
        # Otherwise the profiler's library prints a line to stdout at every start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with self._forgiven():
            # The first start sets the library up, which must not fall into a step.
            with profile(activities=self._activities):
                pass
            self._profile = profile(activities=self._activities)
            self._profile.start()

    def stop(self) -> list[Event]:
        if self._profile is None:
            return []
        with self._forgiven():
            self._profile.stop()
            # The public list of events costs a second for a few thousand and lacks what launched a kernel.
            return to_events(self._profile.profiler.kineto_results.events())
        return []

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no profile is worth a measured run
            self._profile = None
            self.warnings.append(f"no profile of the steps: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def to_events(raw: list[Any]) -> list[Event]:
    """The profiler's events in our words; marks that it repeats for the device are left out."""
    began = {
        event.correlation_id(): event.start_ns()
        for event in raw
        # What the runtime's own calls (linked to an operator) are numbered with is another sequence.
        if _on_host(event) and event.linked_correlation_id() == 0 and not event.is_async()
    }
    found = []
    for event in raw:
        on_device = not _on_host(event)
        if on_device and event.is_user_annotation():
            continue
        begin = event.start_ns()
        found.append(
            Event(
                name=event.name(),
                begin=begin,
                end=begin + event.duration_ns(),
                on_device=on_device,
                is_async=event.is_async(),
                launched=began.get(event.linked_correlation_id()) if on_device else None,
            )
        )
    return found


def _on_host(event: Any) -> bool:
    return bool(event.device_type().name == "CPU")
