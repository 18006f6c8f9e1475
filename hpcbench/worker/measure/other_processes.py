"""Processor time that processes outside of a run use on the cores of one of its ranks, from the kernel's ``/proc``.

The kernel counts the time of a thread on all cores together. All of it lies on the rank's cores where the thread may
use no others; where it may, the core that it used last is taken as its place.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Identity = tuple[int, int]
"""A process' or a thread's number, and the tick at which it started: numbers are used again."""

_KTHREADD = 2
"""The parent of the kernel's own threads, whose time is no process'."""


class TaskTime(NamedTuple):
    """Processor time of a process or a thread since it started."""

    cpu_s: float
    share: float
    """Fraction of it that is taken to lie on the rank's cores, by the core that was used last: 0 or 1."""


class OtherTimes(NamedTuple):
    """Times of processes outside of a run that may use a core of a rank's mask."""

    siblings: dict[Identity, TaskTime]
    """Ranks of other runs and what they started: processes that may use no core but the mask's, threads of others."""
    pinned: dict[Identity, TaskTime]
    """Processes that are of no run, and may use no core but the mask's."""
    read_at: float
    """Time of the reading, in ticks since the machine's start, the unit of ``Identity``."""


class _Task(NamedTuple):
    """Fields of ``stat`` of a process or a thread."""

    parent: int
    cpu_s: float
    started: int
    core: int


def read_other_times(mask: Sequence[int], arguments: Sequence[str], rank_pid: int | None = None) -> OtherTimes | None:
    """Return the times of other processes that may use a core of ``mask``; ``None`` without Linux' ``/proc``.

    Args:
        mask: The cores of this rank.
        arguments: Its arguments: the ranks of its run have the same.
        rank_pid: Its process; this one, if it is ``None``.
    """
    rank_pid = os.getpid() if rank_pid is None else rank_pid
    read_at = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK") if sys.platform == "linux" else 0.0
    cores, tasks, affinities = set(mask), dict[int, _Task](), dict[int, set[int]]()
    try:
        numbers = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        get_affinity = os.sched_getaffinity
    except (OSError, AttributeError):
        return None
    for number in numbers:
        try:
            affinity = get_affinity(number)
        except OSError:
            continue
        task = _read_stat(Path(f"/proc/{number}/stat")) if affinity & cores else None
        if task is not None and _KTHREADD not in (number, task.parent):
            tasks[number], affinities[number] = task, affinity
    kinds = {number: "own" if number == rank_pid else _kind_of_process(number, arguments) for number in tasks}
    times = OtherTimes({}, {}, read_at)
    for number, task in tasks.items():
        kind, is_pinned = _kind_of_tree(number, tasks, kinds), affinities[number] <= cores
        if is_pinned and kind != "own":
            (times.pinned if kind is None else times.siblings)[number, task.started] = TaskTime(task.cpu_s, 1.0)
        elif kind == "sibling":
            times.siblings.update(_thread_times(number, cores))
    return times


def used_between(before: Mapping[Identity, TaskTime], after: Mapping[Identity, TaskTime], read_at: float) -> float:
    """Return the seconds on the rank's cores between two readings, the first of them at tick ``read_at``.

    What ended in between is unknown, and left out; so is what was older but of no kind in the first reading. A thread
    that was on these cores in one reading only counts half.
    """
    seconds = 0.0
    for identity, task in after.items():
        _, started = identity
        if identity not in before and started < read_at:
            continue
        earlier = before.get(identity, TaskTime(0.0, task.share))
        seconds += (task.cpu_s - earlier.cpu_s) * (task.share + earlier.share) / 2
    return seconds


def _read_stat(file: Path) -> _Task | None:
    try:
        # The name in parentheses may hold anything.
        fields = file.read_bytes().rpartition(b")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return _Task(int(fields[1]), ticks / os.sysconf("SC_CLK_TCK"), int(fields[19]), int(fields[36]))
    except (OSError, ValueError, IndexError):
        return None


def _kind_of_process(number: int, arguments: Sequence[str]) -> str | None:
    """Return ``own`` for a rank of this run, ``sibling`` for one of another run, ``None`` for other processes."""
    try:
        words = Path(f"/proc/{number}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return None
    if not ("hpcbench.worker" in words and "--tasks" in words and "-m" in words):
        return None
    return "own" if words[-len(arguments) :] == list(arguments) else "sibling"


def _kind_of_tree(number: int, tasks: Mapping[int, _Task], kinds: Mapping[int, str | None]) -> str | None:
    """Return the kind of a process, or of the nearest process above it that has one."""
    visited: set[int] = set()
    while number in tasks and number not in visited:
        kind = kinds[number]
        if kind is not None:
            return kind
        visited.add(number)
        number = tasks[number].parent
    return None


def _thread_times(number: int, cores: set[int]) -> dict[Identity, TaskTime]:
    times = {}
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{number}/task")]
    except OSError:
        return {}
    for thread in threads:
        task = _read_stat(Path(f"/proc/{number}/task/{thread}/stat"))
        if task is not None:
            times[thread, task.started] = TaskTime(task.cpu_s, 1.0 if task.core in cores else 0.0)
    return times
