"""Profiled steps after the timed ones, the split of a step's time into phases by interval arithmetic, and the host's
waits for the device.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import hpcbench
from hpcbench.config.run_spec import RunSpec
from hpcbench.results.schema import HostSyncs, StepPhases
from hpcbench.results.timing_statistics import (
    TimeInterval,
    clip_intervals,
    covered_seconds,
    subtract_intervals,
    union_intervals,
)
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.measure.clocks import PHASE_NAMES, no_marker, synchronize
from hpcbench.worker.measure.layer_trace import COMM_NAMESPACES
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.strategy import Strategy

MARK_PREFIX = "hpcbench."
STEP_MARK = MARK_PREFIX + "step"

_COMM_NAMESPACES = (*COMM_NAMESPACES, "_c10d_functional_autograd", "symm_mem")
"""Namespaces of operators that start a collective or wait for one."""
_HOST_COMM_PREFIXES = ("gloo:", "mpi:", "ucc:", "horovod:")
"""Prefixes of the events of libraries that communicate on the host; an event lasts as long as its collective or
message."""
_NCCL_PREFIXES = ("nccl", "rccl", "mscclKernel")
_COMPILED_GRAPH_PREFIX = "## Call CompiledFxGraph"
_DEVICE_COPIES = ("Memcpy DtoD", "Memset")


class ProfilerEvent(NamedTuple):
    """One event of the profiler. Times are nanoseconds of one clock for host and device."""

    name: str
    begin: int
    end: int
    on_device: bool = False
    is_async: bool = False
    """It ended elsewhere than in the call that began it."""
    launched: int | None = None
    """Begin (ns) of the host's operator that launched the work, for work on the device."""

    @property
    def interval(self) -> TimeInterval:
        """Return begin and end."""
        return self.begin, self.end


class ProfiledSteps(NamedTuple):
    """The findings of the profiled steps; ``None`` where nothing was profiled."""

    phases: StepPhases | None = None
    host_syncs: HostSyncs | None = None
    """``None`` on a cpu, too."""


def split_phases(events: Iterable[ProfilerEvent], cuda: bool) -> StepPhases | None:
    """The parts of one step: of each part the median over the profiled steps; ``None`` where no step was marked."""
    step_events = list(events)
    parts = [_split_step(step_events, window, cuda) for window in _step_intervals(step_events)]
    if not parts:
        return None
    names = [name for name in StepPhases.__struct_fields__ if any(name in part for part in parts)]
    return StepPhases(**{name: statistics.median(part[name] for part in parts if name in part) for name in names})


def _step_intervals(events: Iterable[ProfilerEvent]) -> list[TimeInterval]:
    return sorted(event.interval for event in events if event.name == STEP_MARK and not event.on_device)


def _split_step(events: list[ProfilerEvent], window: TimeInterval, cuda: bool) -> dict[str, float]:
    parts = {"step_s": covered_seconds([window])}
    for phase in PHASE_NAMES:
        marks = [event.interval for event in events if event.name == MARK_PREFIX + phase and not event.on_device]
        marks = clip_intervals(marks, window)
        if marks:
            # A device computes after the mark is over: its time is that of the work that was asked for within the mark.
            device_time = cuda and phase != "data"
            intervals = clip_intervals(_kernels_launched_in(events, marks), window) if device_time else marks
            parts[f"{phase}_s"] = covered_seconds(intervals)
    compute, comm = (clip_intervals(intervals, window) for intervals in _compute_and_comm(events, cuda))
    if compute:
        parts["compute_s"] = covered_seconds(compute)
    if comm:
        parts["comm_s"] = covered_seconds(comm)
        parts["exposed_comm_s"] = covered_seconds(subtract_intervals(comm, compute))
    return parts


def _kernels_launched_in(events: list[ProfilerEvent], marks: list[TimeInterval]) -> list[TimeInterval]:
    return [
        event.interval
        for event in events
        if event.on_device
        and event.launched is not None
        and not event.name.startswith(_NCCL_PREFIXES)
        and any(begin <= event.launched < end for begin, end in marks)
    ]


def _compute_and_comm(events: list[ProfilerEvent], cuda: bool) -> tuple[list[TimeInterval], list[TimeInterval]]:
    """Return the time in which operators or kernels run, and that of collectives and messages.

    Computation excludes transfers between ranks and between host and device. Communication includes the wait for other
    ranks.
    """
    if cuda:
        kernels = [event for event in events if event.on_device]
        comm = [event.interval for event in kernels if event.name.startswith(_NCCL_PREFIXES)]
        others = [event for event in kernels if not event.name.startswith((*_NCCL_PREFIXES, "Memcpy"))]
        copies = [event for event in kernels if event.name.startswith(_DEVICE_COPIES)]
        return [event.interval for event in (*others, *copies)], comm
    comm = [event.interval for event in events if event.name.startswith(_HOST_COMM_PREFIXES)]
    working, waiting = [], []
    for event in events:
        # Marks around operators (autograd's, DDP's, the optimizer's) are none: waiting hides in them.
        namespace = None if event.on_device or event.is_async else _operator_namespace(event.name)
        if namespace in _COMM_NAMESPACES:
            waiting.append(event.interval)
        elif namespace is not None:
            working.append(event.interval)
    return subtract_intervals(union_intervals(working), waiting), comm


def _operator_namespace(name: str) -> str | None:
    """Return ``aten`` for ``aten::add``; ``None`` where ``name`` is no operator's."""
    if name.startswith(_COMPILED_GRAPH_PREFIX):
        return "inductor"
    namespace, colons, operator = name.partition("::")
    return namespace if colons and namespace.isidentifier() and operator.isidentifier() else None


def run_profiled_steps(
    strategy: Strategy, feed: DataFeed, spec: RunSpec, device: torch.device, stop: StopController,
    any_rank: Callable[[bool], bool], first: int, warnings: list[str],
) -> ProfiledSteps:  # fmt: skip
    """Profile ``spec.profile_steps`` steps on all ranks together and return their phases and the host's waits.

    A rank that is stopped ends them on all ranks. Every rank runs the same steps whether its own profiler works or not:
    its failure is only appended to ``warnings``.

    Args:
        any_rank: whether a flag is true on any rank; the ranks wait for each other in it.
        first: number of the first step.
    """
    if spec.profile_steps == 0:
        return ProfiledSteps()
    profiler = _SafeProfiler(device, warnings)
    profiler.start()
    count = 0
    sites: list[str] = []
    try:
        strategy.phases = lambda name: record_function(MARK_PREFIX + name)
        for step in range(first, first + spec.profile_steps):
            # The agreement is a barrier too: the ranks begin each step together.
            if any_rank(stop.should_stop()):
                break
            with record_function(STEP_MARK):
                with record_sync_sites(device, sites):
                    strategy.step(feed, step)
                synchronize(device)
            count += 1
    finally:
        strategy.phases = no_marker
        events = profiler.stop()
    if count < spec.profile_steps:
        warnings.append(f"{count} of {spec.profile_steps} profiled steps were made: no time was left")
    if not count:
        return ProfiledSteps()
    steps = _step_intervals(events)
    host_syncs = count_host_syncs(steps, events, sites) if steps and device.type == "cuda" else None
    if host_syncs is not None and host_syncs.launches is None:
        warnings.append(NO_DEVICE_EVENTS)
    return ProfiledSteps(split_phases(events, device.type == "cuda"), host_syncs)


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
    return [
        ProfilerEvent(
            name=event.name(),
            begin=event.start_ns(),
            end=event.start_ns() + event.duration_ns(),
            on_device=not _is_host_event(event),
            is_async=event.is_async(),
            launched=None if _is_host_event(event) else began.get(event.linked_correlation_id()),
        )
        for event in raw
        if _is_host_event(event) or not event.is_user_annotation()
    ]


def _is_host_event(event: Any) -> bool:
    return bool(event.device_type().name == "CPU")


NO_DEVICE_EVENTS = (
    "no device events: the profiler recorded none of the GPU, so launches and copies of memory that is not pinned are "
    "unknown (CUPTI needs rights that containers and virtual machines may lack)"
)
_WAITING_CALLS = frozenset(
    f"{runtime}{call}"
    for runtime in ("cuda", "hip")
    for call in ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy", "Memcpy2D", "Free")
)
"""Calls of the runtime that return only after work on the device."""
_STEP_END_CALLS = ("cudaDeviceSynchronize", "hipDeviceSynchronize")
_SYNC_WARNING = "called a synchronizing CUDA operation"
_PACKAGE_PARENT = Path(hpcbench.__file__).resolve().parent.parent
_SKIPPED_FILES = (str(Path(torch.__file__).parent), str(Path(warnings.__file__)), __file__)


def count_host_syncs(steps: Sequence[TimeInterval], events: Iterable[ProfilerEvent], sites: Iterable[str]) -> HostSyncs:
    """Count the host's waits within ``steps``, and its launches.

    Args:
        steps: Begin and end of each profiled step. The last call of each that waits for the whole device is the
            profiler's own and is not counted.
        events: Of the host, calls of the runtime among them, and of the device. Without any of the device (CUPTI may
            be forbidden) copies and launches are unknown.
        sites: Lines that torch has reported, with repetitions.
    """
    events = list(events)
    on_device = sorted(event.begin for event in events if event.on_device)
    launches = [bisect_left(on_device, end) - bisect_left(on_device, begin) for begin, end in steps]
    relevant = [
        event for event in events if (event.name in _WAITING_CALLS and not event.on_device) or _is_pageable_copy(event)
    ]
    per_step, pageable_copies = 0, 0
    calls: Counter[str] = Counter()
    for begin, end in steps:
        inside = sorted((event for event in relevant if begin <= event.begin < end), key=lambda event: event.begin)
        waits = [event.name for event in inside if not event.on_device]
        pageable_copies += len(inside) - len(waits)
        if ends := [number for number, name in enumerate(waits) if name in _STEP_END_CALLS]:
            del waits[ends[-1]]
        calls.update(waits)
        per_step = max(per_step, len(waits))
    return HostSyncs(
        per_step=per_step,
        calls=dict(sorted(calls.items())),
        pageable_copies=pageable_copies if on_device else None,
        launches=statistics.median_low(launches) if on_device else None,
        sites=list(dict.fromkeys(sites)),
    )


def _is_pageable_copy(event: ProfilerEvent) -> bool:
    return event.on_device and event.name.startswith("Memcpy") and "Pageable" in event.name


@contextlib.contextmanager
def record_sync_sites(device: torch.device, sites: list[str]) -> Iterator[None]:
    """Append to ``sites`` the line of each wait that torch reports within the context; nothing happens on a cpu."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_SYNC_WARNING)
        show = warnings.showwarning

        def keep(message: Warning | str, *details: Any, **named: Any) -> None:
            if str(message).startswith(_SYNC_WARNING):
                sites.append(_calling_site())
            else:
                show(message, *details, **named)

        warnings.showwarning = keep
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _calling_site() -> str:
    """Return ``file:line`` of the innermost frame outside of torch; files of hpcbench without their folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED_FILES):
        frame = frame.f_back
    if frame is None:
        return "torch"
    path = Path(frame.f_code.co_filename).resolve()
    inside = path.is_relative_to(_PACKAGE_PARENT / "hpcbench")
    return f"{path.relative_to(_PACKAGE_PARENT) if inside else path}:{frame.f_lineno}"
