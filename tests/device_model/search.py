"""Exhaustive search of a machine's interleavings for states in which nothing can go on.

Certain transitions never disable each other (``Machine.certain_transitions``), so that any order of them leads to the
same state: one of them alone is a persistent set (Godefroid 1996, *Partial-order methods*), and following one order
loses no end. What is left to branch on are the choices at sync points. They do not disable each other either, so that
one rank's two choices are a persistent set again. ``all_ends`` does without any of this, for a test of the reduction.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.device_model.device import Machine, State, SyncPoint

SyncSet = frozenset[tuple[int, int]]
"""Rank and position of the sync points at which hosts wait for their devices."""


class Search(NamedTuple):
    """The states that were looked at, and the first hang: the sync points that lead to it."""

    states: int
    hang: SyncSet | None


def search_hang(machine: Machine, are_choices_early: bool = False) -> Search:
    """Look at all interleavings and all choices until one hangs.

    Args:
        machine: The ranks.
        are_choices_early: Whether hosts choose while their devices have not begun, instead of when nothing else is
            left to do. Both find the same hangs. Late choices are few: most devices are idle by then.
    """
    start = _next_choice(machine, machine.start, are_choices_early)
    syncs: dict[State, SyncSet] = {start: frozenset()}
    stack = [start]
    while stack:
        state = stack.pop()
        rank = first_choice(machine, state)
        if rank is None:
            if not machine.is_finished(state):
                return Search(len(syncs), syncs[state])
            continue
        for is_sync in (False, True):
            after = _next_choice(machine, machine.choose(state, rank, is_sync), are_choices_early)
            if after not in syncs:
                syncs[after] = syncs[state] | {(rank, state[rank].position)} if is_sync else syncs[state]
                stack.append(after)
    return Search(len(syncs), None)


def first_choice(machine: Machine, state: State) -> int | None:
    """Return the lowest rank whose host is at a choice."""
    return next((rank for rank in range(len(state)) if machine.is_at_choice(state, rank)), None)


def _next_choice(machine: Machine, state: State, is_early: bool) -> State:
    if not is_early:
        return machine.settle(state)
    while first_choice(machine, after := machine.run_hosts(state)) is None:
        after = machine.run_devices(after)
        if after == state:
            return state
        state = after
    return after


def end_with(machine: Machine, syncs: SyncSet) -> State:
    """Return the one state in which everything ends if hosts wait at exactly ``syncs``."""
    state = machine.settle(machine.start)
    while (rank := first_choice(machine, state)) is not None:
        state = machine.settle(machine.choose(state, rank, (rank, state[rank].position) in syncs))
    return state


def hangs_with_all_syncs(machine: Machine) -> bool:
    """Whether ranks hang whose hosts wait at every sync point.

    One more wait never enables a transition. So what hangs with some of the waits hangs with all of them, and what does
    not hang with all of them never does.
    """
    points = frozenset(
        (rank, position)
        for rank, program in enumerate(machine.programs)
        for position, instruction in enumerate(program)
        if isinstance(instruction, SyncPoint)
    )
    return not machine.is_finished(end_with(machine, points))


def all_ends(machine: Machine) -> tuple[set[State], int]:
    """Return the states without a transition that are reached by any interleaving, and the number of all states."""
    seen, stack, ends = {machine.start}, [machine.start], set[State]()
    while stack:
        state = stack.pop()
        successors = [after for _, after in machine.certain_transitions(state)]
        for rank in range(len(state)):
            if machine.is_at_choice(state, rank):
                successors += [machine.choose(state, rank, False), machine.choose(state, rank, True)]
        if not successors:
            ends.add(state)
        fresh = [after for after in successors if after not in seen]
        seen.update(fresh)
        stack += fresh
    return ends, len(seen)


def reduced_ends(machine: Machine) -> set[State]:
    """Return the ends that ``search_hang`` would reach."""
    seen, stack, ends = set[State](), [machine.settle(machine.start)], set[State]()
    while stack:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        rank = first_choice(machine, state)
        if rank is None:
            ends.add(state)
        else:
            stack += [machine.settle(machine.choose(state, rank, is_sync)) for is_sync in (False, True)]
    return ends
