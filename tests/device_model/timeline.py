"""A hang as a timeline: a row per transition, a column per rank, and what each rank waits for at the end."""

from __future__ import annotations

from tests.device_model.device import Enter, Machine, State, Step, SyncPoint
from tests.device_model.search import SyncSet, first_choice

_COLUMN = 40


def timeline(machine: Machine, syncs: SyncSet) -> list[str]:
    """Return the lines of the run in which hosts wait for their devices at ``syncs``.

    A host's steps are calls that enqueue a kernel; a device's are the ends of kernels and begin with ``|``.
    """
    steps, end = _run(machine, syncs)
    ranks = range(len(machine.programs))
    lines = ["".join(f"rank {rank}".ljust(_COLUMN) for rank in ranks).rstrip()]
    for step in steps:
        mark = "" if step.where == "host" else "| "
        lines.append((" " * _COLUMN * step.rank + mark + step.text).rstrip())
    if machine.is_finished(end):
        return [*lines, "all ranks are done"]
    return [*lines, "nothing can go on:", *(f"  {line}" for rank in ranks for line in _waits(machine, end, rank))]


def _run(machine: Machine, syncs: SyncSet) -> tuple[list[Step], State]:
    """Take transitions in turn of the ranks, so that the rows of a rank do not stand alone."""
    steps: list[Step] = []
    state, turn = machine.start, 0
    while True:
        certain = sorted(machine.certain_transitions(state), key=lambda each: (each[0].rank - turn) % len(state))
        rank = first_choice(machine, state)
        if certain:
            step, state = certain[0]
            turn = step.rank + 1
            if step.text:
                steps.append(step)
        elif rank is not None:
            point = machine.instruction(state, rank)
            assert isinstance(point, SyncPoint)
            is_sync = (rank, state[rank].position) in syncs
            state = machine.choose(state, rank, is_sync)
            if is_sync:
                steps.append(Step(rank, "host", f"waits at {point.reason}"))
        else:
            return steps, state


def _waits(machine: Machine, state: State, rank: int) -> list[str]:
    lines = []
    instruction = machine.instruction(state, rank)
    if isinstance(instruction, SyncPoint):
        lines.append(f"rank {rank}: the host waits at {instruction.reason} for all that its device has queued")
    elif isinstance(instruction, Enter):
        lines.append(f"rank {rank}: the host waits for the ranks {instruction.members} of a new communicator")
    for number in machine.pending(state, rank):
        if machine.is_running(state, rank, number):
            part = machine.part(rank, number)
            reasons = ", ".join(
                f"rank {other} {_obstacle(machine, state, other, bit)}"
                for other, bit in machine.counterparts(rank, number)
                if not machine.is_running(state, other, bit)
            )
            lines.append(f"rank {rank}: the device {part.label}: {reasons}")
    return lines


def _obstacle(machine: Machine, state: State, rank: int, number: int) -> str:
    if not machine.is_queued(state, rank, number):
        return "has not called"
    first = machine.part(rank, machine.pending(state, rank)[0])
    return f"has it queued, its device first {first.label}"
