"""Where a profiled step's time went, from the profiler's events by interval arithmetic. No torch here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from hpcbench.results.intervals import Interval, clip, length_s, subtract, union
from hpcbench.results.schema import Phases

MARK = "hpcbench."
STEP = MARK + "step"

_COMMUNICATION = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""Namespaces of operators that start a collective or wait for one."""
_UNDER_WAY = ("gloo:", "mpi:", "ucc:", "horovod:")
"""How the libraries that communicate on the host call a collective or message, from its begin to its end."""
_NCCL = ("nccl", "rccl", "mscclKernel")
_COMPILED = "## Call CompiledFxGraph"
_DEVICE_COPIES = ("Memcpy DtoD", "Memset")


class Event(NamedTuple):
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
    def interval(self) -> Interval:
        """From its begin to its end."""
        return self.begin, self.end


def split(events: Iterable[Event], cuda: bool) -> Phases | None:
    """The parts of one step: of each part the median over the profiled steps; ``None`` where no step was marked."""
    found = list(events)
    steps = sorted(event.interval for event in found if event.name == STEP and not event.on_device)
    parts = [_split_step(found, window, cuda) for window in steps]
    if not parts:
        return None
    names = [name for name in Phases.__struct_fields__ if any(name in part for part in parts)]
    return Phases(**{name: statistics.median(part[name] for part in parts if name in part) for name in names})


def _split_step(events: list[Event], window: Interval, cuda: bool) -> dict[str, float]:
    found = {"step_s": length_s([window])}
    for phase in ("data", "forward", "backward", "optimizer"):
        marks = clip((event.interval for event in events if event.name == MARK + phase and not event.on_device), window)
        if not marks:
            continue
        # A device computes after the mark is over: its time is that of the work which was asked for within the mark.
        device_time = cuda and phase != "data"
        found[f"{phase}_s"] = length_s(clip(_launched_in(events, marks), window) if device_time else marks)
    compute = clip(_computing(events, cuda), window)
    comm = clip(_communicating(events, cuda), window)
    if compute:
        found["compute_s"] = length_s(compute)
    if comm:
        found["comm_s"] = length_s(comm)
        found["exposed_comm_s"] = length_s(subtract(comm, compute))
    return found


def _launched_in(events: list[Event], marks: list[Interval]) -> list[Interval]:
    return [
        event.interval
        for event in events
        if event.on_device
        and event.launched is not None
        and not event.name.startswith(_NCCL)
        and any(begin <= event.launched < end for begin, end in marks)
    ]


def _communicating(events: list[Event], cuda: bool) -> list[Interval]:
    """While a collective or a message is under way, waiting for the other ranks included."""
    if cuda:
        return [event.interval for event in events if event.on_device and event.name.startswith(_NCCL)]
    return [event.interval for event in events if event.name.startswith(_UNDER_WAY)]


def _computing(events: list[Event], cuda: bool) -> list[Interval]:
    """While operators or kernels run, without those that pass data between ranks or between host and device."""
    if cuda:
        return [event.interval for event in events if event.on_device and _is_device_compute(event.name)]
    on_host = [event for event in events if not event.on_device and not event.is_async]
    waiting = [event.interval for event in on_host if _namespace(event.name) in _COMMUNICATION]
    working = [event.interval for event in on_host if _is_operator(event.name)]
    return subtract(union(working), waiting)


def _is_device_compute(name: str) -> bool:
    return not name.startswith((*_NCCL, "Memcpy")) or name.startswith(_DEVICE_COPIES)


def _is_operator(name: str) -> bool:
    # Marks around operators (autograd's, DDP's, the optimizer's) are none: waiting hides in them.
    namespace = _namespace(name)
    return (namespace is not None and namespace not in _COMMUNICATION) or name.startswith(_COMPILED)


def _namespace(name: str) -> str | None:
    """``aten::add -> aten``; ``None`` where ``name`` is no operator's."""
    namespace, colons, operator = name.partition("::")
    return namespace if colons and namespace.isidentifier() and operator.isidentifier() else None
