"""Exhaustive search of a machine's interleavings for states in which nothing can go on.

Transitions that are no choice never disable each other (``Machine.settle``): one of them alone is a persistent set
(Godefroid 1996, *Partial-order methods*), and following one order loses no end. What is left to branch on are the
choices at sync points. They do not disable each other either, so that one rank's two choices are a persistent set again.
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


def search_hang(machine: Machine) -> Search:
    """Look at all interleavings and all choices until one hangs."""
    start = machine.settle(machine.start)
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
            after = machine.settle(machine.choose(state, rank, is_sync))
            if after not in syncs:
                syncs[after] = syncs[state] | {(rank, state[rank].position)} if is_sync else syncs[state]
                stack.append(after)
    return Search(len(syncs), None)


def first_choice(machine: Machine, state: State) -> int | None:
    """Return the lowest rank whose host is at a choice."""
    return next((rank for rank in range(len(state)) if machine.is_at_choice(state, rank)), None)


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
