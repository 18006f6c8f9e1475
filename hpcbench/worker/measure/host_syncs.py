"""Waits of the host for its cuda device within profiled steps: their number by the profiler, their lines by torch.

The two sources differ: the profiler has every call of the runtime, without a line; torch's sync debug mode names the
line, of the calls that torch itself makes.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

import hpcbench
from hpcbench.results.schema import HostSyncs
from hpcbench.results.timing_statistics import TimeInterval

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


class _TimedEvent(Protocol):
    """The part of a profiler's event that is read here."""

    @property
    def name(self) -> str: ...
    @property
    def begin(self) -> int: ...
    @property
    def on_device(self) -> bool: ...


def count_host_syncs(steps: Sequence[TimeInterval], events: Iterable[_TimedEvent], sites: Iterable[str]) -> HostSyncs:
    """Count the host's waits within ``steps``.

    Args:
        steps: Begin and end of each profiled step. The last call of each that waits for the whole device is the
            profiler's own and is not counted.
        events: Of the host, calls of the runtime among them, and of the device.
        sites: Lines that torch has reported, with repetitions.
    """
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
        pageable_copies=pageable_copies,
        sites=list(dict.fromkeys(sites)),
    )


def _is_pageable_copy(event: _TimedEvent) -> bool:
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
