"""A walk through a pipeline's schedule: when each action begins and ends, what waits, what lives meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcbench.parallel.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Layout


class Span(NamedTuple):
    """An action and its time, in the unit of the durations."""

    action: Action
    begin: float
    end: float


class Walk(NamedTuple):
    """Per rank its spans, in the order of execution."""

    ranks: list[list[Span]]

    @property
    def end(self) -> float:
        """When the last rank is done; all begin at 0."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they compute nothing."""
        busy = sum(span.end - span.begin for spans in self.ranks for span in spans)
        return 1.0 - busy / (len(self.ranks) * self.end) if self.end else 0.0


class Turn(NamedTuple):
    """An action in an order in which every one finds done what it needs."""

    rank: int
    action: Action
    awaited: int
    """Place in the order of the action of another rank that this one waits for; -1 where it waits for none."""
    is_sent: bool
    """Whether another rank waits for the result."""


def in_order(ranks: Sequence[Sequence[Action]], layout: Layout) -> list[Turn]:
    """The actions of all ranks, each rank's in its own order."""
    done: dict[Action, int] = {}
    waiting: dict[Action, int] = {}
    places = [0] * len(ranks)
    found: list[tuple[int, Action, int]] = []
    sent: set[int] = set()
    ready = list(range(len(ranks) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        own = ranks[rank]
        while places[rank] < len(own):
            action = own[places[rank]]
            awaited = _awaited(action, layout)
            if awaited is not None and awaited not in done:
                waiting[awaited] = rank
                break
            other = -1 if awaited is None else done[awaited]
            if other >= 0 and found[other][0] == rank:
                other = -1
            if other >= 0:
                sent.add(other)
            if action in waiting:
                ready.append(waiting.pop(action))
            done[action] = len(found)
            found.append((rank, action, other))
            places[rank] += 1
    assert all(place == len(own) for place, own in zip(places, ranks, strict=True)), "a schedule that gets stuck"
    return [Turn(*one, place in sent) for place, one in enumerate(found)]


def _awaited(action: Action, layout: Layout) -> Action | None:
    """What the neighbouring chunk must have done; what the own chunk has done comes earlier in the own order."""
    kind, chunk, one = action
    if kind == FORWARD and chunk > 0:
        return Action(FORWARD, chunk - 1, one)
    if kind in (BACKWARD, INPUT) and chunk < layout.chunks - 1:
        return Action(kind, chunk + 1, one)
    return None


def walk(
    ranks: list[list[Action]],
    layout: Layout,
    duration: Callable[[Action], float],
    transfer: Callable[[Action], float] = lambda _: 0.0,
) -> Walk:
    """Every rank does its next action as soon as it is done with the one before and has what the action needs.

    ``transfer`` is the time that the result of an action takes to another rank that waits for it. A rank sends one
    message after another, which costs it no time of its own.
    """
    turns = in_order(ranks, layout)
    found: list[list[Span]] = [[] for _ in ranks]
    for turn, begin, end in zip(turns, *times(turns, len(ranks), duration, transfer), strict=True):
        found[turn.rank].append(Span(turn.action, begin, end))
    return Walk(found)


def times(
    turns: Sequence[Turn], ranks: int, duration: Callable[[Action], float], transfer: Callable[[Action], float]
) -> tuple[list[float], list[float]]:
    """When each of the actions of so many ranks, ``in_order``, begins and ends; see ``walk``."""
    begins: list[float] = []
    ends: list[float] = []
    arrivals: list[float] = []
    free, gone = [0.0] * ranks, [0.0] * ranks
    for rank, action, awaited, is_sent in turns:
        begin = free[rank]
        if awaited >= 0 and arrivals[awaited] > begin:
            begin = arrivals[awaited]
        end = arrival = begin + duration(action)
        free[rank] = end
        if is_sent:
            if gone[rank] > end:
                arrival = gone[rank]
            arrival += transfer(action)
            gone[rank] = arrival
        begins.append(begin)
        ends.append(end)
        arrivals.append(arrival)
    return begins, ends


def live(own: Sequence[Action]) -> list[list[Action]]:
    """After each action, the forward passes whose activations are still kept: until ``B``, or ``W`` of a split one."""
    kept: list[Action] = []
    found: list[list[Action]] = []
    for action in own:
        if action.kind == FORWARD:
            kept.append(action)
        elif action.kind in (BACKWARD, WEIGHT):
            kept.remove(action._replace(kind=FORWARD))
        found.append(list(kept))
    return found


def peak_live(own: Sequence[Action]) -> int:
    """The most forward passes whose activations one rank keeps at the same time."""
    return max((len(kept) for kept in live(own)), default=0)
