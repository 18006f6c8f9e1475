"""Profiled steps after the timed ones, and the split of a step's time into phases by interval arithmetic."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.schema import StepPhases
from hpcbench.results.timing_statistics import (
    TimeInterval,
    clip_intervals,
    covered_seconds,
    subtract_intervals,
    union_intervals,
)
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.measure.clocks import no_marker, synchronize
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.strategies.base import Strategy

MARK_PREFIX = "hpcbench."
STEP_MARK = MARK_PREFIX + "step"

_COMM_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""Namespaces of operators that start a collective or wait for one."""
_HOST_COMM_PREFIXES = ("gloo:", "mpi:", "ucc:", "horovod:")
"""How the libraries that communicate on the host call a collective or message, from its begin to its end."""
_NCCL_PREFIXES = ("nccl", "rccl", "mscclKernel")
_COMPILED_GRAPH_PREFIX = "## Call CompiledFxGraph"
_DEVICE_COPIES = ("Memcpy DtoD", "Memset")


class ProfilerEvent(NamedTuple):
    """What the profiler saw. Times are nanoseconds of one clock for host and device."""

    name: str
    begin: int
    end: int
    on_device: bool = False
    is_async: bool = False
    """It ended elsewhere than in the call that began it."""
    launched: int | None = None
    """Of work on the device: when the host's operator that asked for it began."""

    @property
    def interval(self) -> TimeInterval:
        """From its begin to its end."""
        return self.begin, self.end


def split_phases(events: Iterable[ProfilerEvent], cuda: bool) -> StepPhases | None:
    """The parts of one step: of each part the median over the profiled steps; ``None`` where no step was marked."""
    found = list(events)
    steps = sorted(event.interval for event in found if event.name == STEP_MARK and not event.on_device)
    parts = [_split_step(found, window, cuda) for window in steps]
    if not parts:
        return None
    names = [name for name in StepPhases.__struct_fields__ if any(name in part for part in parts)]
    return StepPhases(**{name: statistics.median(part[name] for part in parts if name in part) for name in names})


def _split_step(events: list[ProfilerEvent], window: TimeInterval, cuda: bool) -> dict[str, float]:
    found = {"step_s": covered_seconds([window])}
    for phase in ("data", "forward", "backward", "optimizer"):
        marks = clip_intervals(
            (event.interval for event in events if event.name == MARK_PREFIX + phase and not event.on_device), window
        )
        if not marks:
            continue
        # A device computes after the mark is over: its time is that of the work which was asked for within the mark.
        device_time = cuda and phase != "data"
        found[f"{phase}_s"] = covered_seconds(
            clip_intervals(_kernels_launched_in(events, marks), window) if device_time else marks
        )
    compute = clip_intervals(_compute_intervals(events, cuda), window)
    comm = clip_intervals(_comm_intervals(events, cuda), window)
    if compute:
        found["compute_s"] = covered_seconds(compute)
    if comm:
        found["comm_s"] = covered_seconds(comm)
        found["exposed_comm_s"] = covered_seconds(subtract_intervals(comm, compute))
    return found


def _kernels_launched_in(events: list[ProfilerEvent], marks: list[TimeInterval]) -> list[TimeInterval]:
    return [
        event.interval
        for event in events
        if event.on_device
        and event.launched is not None
        and not event.name.startswith(_NCCL_PREFIXES)
        and any(begin <= event.launched < end for begin, end in marks)
    ]


def _comm_intervals(events: list[ProfilerEvent], cuda: bool) -> list[TimeInterval]:
    """While a collective or a message is under way, waiting for the other ranks included."""
    if cuda:
        return [event.interval for event in events if event.on_device and event.name.startswith(_NCCL_PREFIXES)]
    return [event.interval for event in events if event.name.startswith(_HOST_COMM_PREFIXES)]


def _compute_intervals(events: list[ProfilerEvent], cuda: bool) -> list[TimeInterval]:
    """While operators or kernels run, without those that pass data between ranks or between host and device."""
    if cuda:
        return [event.interval for event in events if event.on_device and _is_device_compute(event.name)]
    on_host = [event for event in events if not event.on_device and not event.is_async]
    waiting = [event.interval for event in on_host if _operator_namespace(event.name) in _COMM_NAMESPACES]
    working = [event.interval for event in on_host if _is_operator(event.name)]
    return subtract_intervals(union_intervals(working), waiting)


def _is_device_compute(name: str) -> bool:
    return not name.startswith((*_NCCL_PREFIXES, "Memcpy")) or name.startswith(_DEVICE_COPIES)


def _is_operator(name: str) -> bool:
    # Marks around operators (autograd's, DDP's, the optimizer's) are none: waiting hides in them.
    namespace = _operator_namespace(name)
    return (namespace is not None and namespace not in _COMM_NAMESPACES) or name.startswith(_COMPILED_GRAPH_PREFIX)


def _operator_namespace(name: str) -> str | None:
    """``aten::add -> aten``; ``None`` where ``name`` is no operator's."""
    namespace, colons, operator = name.partition("::")
    return namespace if colons and namespace.isidentifier() and operator.isidentifier() else None


def run_profiled_steps(
    strategy: Strategy, feed: DataFeed, spec: RunSpec, device: torch.device, stop: StopController,
    any_rank: Callable[[bool], bool], first: int, warnings: list[str],
) -> StepPhases | None:  # fmt: skip
    """Profile ``spec.profile_steps`` steps on all ranks together and return their phases.

    A rank that is stopped ends them on all ranks. Every rank runs the same steps whether its own profiler works or not:
    its failure is only appended to ``warnings``.

    Args:
        any_rank: whether a flag is true on any rank; the ranks wait for each other in it.
        first: number of the first step.
    """
    if spec.profile_steps == 0:
        return None
    profiler = _SafeProfiler(device, warnings)
    profiler.start()
    count = 0
    try:
        strategy.phases = _mark_phase
        for step in range(first, first + spec.profile_steps):
            # The agreement is a barrier too: the ranks begin each step together.
            if any_rank(stop.should_stop()):
                break
            with record_function(STEP_MARK):
                strategy.step(feed, step)
                synchronize(device)
            count += 1
    finally:
        strategy.phases = no_marker
        events = profiler.stop()
    if count < spec.profile_steps:
        warnings.append(f"{count} of {spec.profile_steps} profiled steps were made: no time was left")
    return split_phases(events, device.type == "cuda") if count else None


def _mark_phase(name: str) -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = record_function(MARK_PREFIX + name)
    return context


class _SafeProfiler:
    """torch's profiler, whose failures are warnings."""

    def __init__(self, device: torch.device, warnings: list[str]) -> None:
        self._warnings = warnings
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

    def stop(self) -> list[ProfilerEvent]:
        if self._profile is None:
            return []
        with self._forgiven():
            self._profile.stop()
            # The public list of events costs a second for a few thousand and lacks what launched a kernel.
            return profiler_events(self._profile.profiler.kineto_results.events())
        return []

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no profile is worth a measured run
            self._profile = None
            self._warnings.append(
                f"no profile of the steps: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            )


def profiler_events(raw: list[Any]) -> list[ProfilerEvent]:
    """The profiler's events in our words; marks that it repeats for the device are left out."""
    began = {
        event.correlation_id(): event.start_ns()
        for event in raw
        # What the runtime's own calls (linked to an operator) are numbered with is another sequence.
        if _is_host_event(event) and event.linked_correlation_id() == 0 and not event.is_async()
    }
    found = []
    for event in raw:
        on_device = not _is_host_event(event)
        if on_device and event.is_user_annotation():
            continue
        begin = event.start_ns()
        found.append(
            ProfilerEvent(
                name=event.name(),
                begin=begin,
                end=begin + event.duration_ns(),
                on_device=on_device,
                is_async=event.is_async(),
                launched=began.get(event.linked_correlation_id()) if on_device else None,
            )
        )
    return found


def _is_host_event(event: Any) -> bool:
    return bool(event.device_type().name == "CPU")
