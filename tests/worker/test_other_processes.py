"""Processes beside a rank: real ones, pinned to cores, some of which look like ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcbench.worker.measure.other_processes import (
    OtherTimes,
    TaskTime,
    read_other_times,
    used_between,
)
from tests.conftest import absent

ARGUMENTS = ["--tasks", "t", "--index", "1", "--attempt", "1"]
OTHERS = ["--tasks", "t", "--index", "2", "--attempt", "1"]
WAIT = "import sys; print(flush=True); sys.stdin.read()"
WITH_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAIT!r}])"
"""Its child reads the same pipes."""
CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def several_cores() -> None:
    if len(CORES) < 2:
        absent("several-cores", "this machine grants one core")


@contextmanager
def process_on(cores: list[int], program: str = WAIT, rank_arguments: list[str] | None = None) -> Iterator[int]:
    """A process that may use ``cores``; with arguments it looks like a rank: ``-m hpcbench.worker --tasks ...``."""
    words = [sys.executable, "-c", program, *(["-m", "hpcbench.worker", *rank_arguments] if rank_arguments else [])]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    finally:
        os.sched_setaffinity(0, before)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid


def times_on(mask: list[int], *, rank_pid: int = 0) -> OtherTimes:
    """What a rank sees on ``mask`` that is no parent of these processes."""
    times = read_other_times(mask, ARGUMENTS, rank_pid)
    assert times is not None
    return times


def numbers(times: dict[tuple[int, int], TaskTime]) -> set[int]:
    return {number for number, _ in times}


def test_ranks_of_other_runs_are_separated_from_other_processes() -> None:
    mask = CORES[:1]
    with (
        process_on(mask) as stranger,
        process_on(mask, WAIT, OTHERS) as sibling,
        process_on(mask, WAIT, ARGUMENTS) as own,
    ):
        times = times_on(mask)
    assert stranger in numbers(times.pinned)
    assert sibling in numbers(times.siblings)
    assert own not in numbers({**times.pinned, **times.siblings})
    assert all(task.share == 1.0 for task in times.pinned.values())


def test_child_processes_of_a_rank_belong_to_its_run() -> None:
    mask = CORES[:1]
    with process_on(mask, WITH_CHILD, OTHERS) as sibling, process_on(mask, WITH_CHILD, ARGUMENTS) as own:
        times = times_on(mask)
        children = [
            int(number)
            for pid in (sibling, own)
            for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    assert {sibling, children[0]} <= numbers(times.siblings)
    assert not {own, children[1]} & numbers({**times.pinned, **times.siblings})


def test_child_processes_of_this_rank_are_not_listed() -> None:
    with process_on(CORES) as started:
        assert started in numbers(times_on(CORES).pinned)
        times = times_on(CORES, rank_pid=os.getpid())
    assert not {started, os.getpid()} & numbers({**times.pinned, **times.siblings})


@pytest.mark.usefixtures("several_cores")
def test_processes_on_other_cores_are_not_counted() -> None:
    with process_on(CORES[1:]) as stranger, process_on(CORES[1:], WAIT, OTHERS) as sibling:
        times = times_on(CORES[:1])
    assert not {stranger, sibling} & numbers({**times.pinned, **times.siblings})


@pytest.mark.usefixtures("several_cores")
def test_threads_that_may_use_other_cores_count_by_the_core_that_they_used_last() -> None:
    with process_on(CORES, WAIT, OTHERS) as sibling, process_on(CORES) as stranger:
        core = int(Path(f"/proc/{sibling}/stat").read_text().rpartition(")")[2].split()[36])
        # It sleeps, so it stays where it is.
        shares = [
            task.share for mask in ([core], [other for other in CORES if other != core])
            for (number, _), task in times_on(mask).siblings.items() if number == sibling
        ]  # fmt: skip
        assert stranger not in numbers(times_on(CORES[:1]).pinned)
        assert stranger in numbers(times_on(CORES).pinned)
    assert shares == [1.0, 0.0]


def test_seconds_between_two_readings_count_new_tasks() -> None:
    before = {
        (1, 5): TaskTime(10.0, 1.0),
        (2, 5): TaskTime(3.0, 0.0),
        (3, 5): TaskTime(1.0, 1.0),
        (4, 5): TaskTime(1, 1),
    }
    after = {
        (1, 5): TaskTime(14.0, 1.0),
        # On the cores in the later reading only.
        (2, 5): TaskTime(5.0, 1.0),
        (3, 5): TaskTime(9.0, 0.0),
        # Another process with the number of an earlier one.
        (4, 7): TaskTime(0.5, 1.0),
        (6, 7): TaskTime(2.0, 0.0),
        # Pinned to the cores since, but old.
        (7, 5): TaskTime(7200.0, 1.0),
    }
    assert used_between(before, after, read_at=6.0) == 4.0 + 1.0 + 4.0 + 0.5
