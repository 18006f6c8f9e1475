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


class Order(NamedTuple):
    """All ranks' actions in an order in which every one finds done what it needs; an entry an action in each list."""

    ranks: list[int]
    actions: list[Action]
    awaited: list[int]
    """Place of the action of another rank that this one waits for; -1 where it waits for none."""
    sent: list[bool]
    """Whether another rank waits for the result."""


def in_order(ranks: Sequence[Sequence[Action]], layout: Layout) -> Order:
    """The actions of all ranks, each rank's in its own order."""
    found = Order([], [], [], [])
    width = 1 + max((one.micro_batch for own in ranks for one in own), default=0)
    backwards, last = layout.chunks * width, (2 * layout.chunks - 1) * width
    done: dict[int, int] = {}
    waiting: dict[int, int] = {}
    places = [0] * len(ranks)
    ready = list(range(len(ranks) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        own, place = ranks[rank], places[rank]
        while place < len(own):
            kind, chunk, one = action = own[place]
            # What the neighbouring chunk must have done; what the own one has done comes earlier in the own order.
            slot, needed = -1, -1
            if kind == FORWARD:
                slot = chunk * width + one
                needed = slot - width
            elif kind in (BACKWARD, INPUT):
                slot = backwards + chunk * width + one
                needed = slot + width if slot < last else -1
            other = -1
            if needed >= 0:
                if needed not in done:
                    waiting[needed] = rank
                    break
                other = done[needed]
                if found.ranks[other] == rank:
                    other = -1
                else:
                    found.sent[other] = True
            if slot >= 0:
                done[slot] = len(found.ranks)
                if slot in waiting:
                    ready.append(waiting.pop(slot))
            found.ranks.append(rank)
            found.actions.append(action)
            found.awaited.append(other)
            found.sent.append(False)
            place += 1
        places[rank] = place
    assert all(place == len(own) for place, own in zip(places, ranks, strict=True)), "a schedule that gets stuck"
    return found


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
    order = in_order(ranks, layout)
    found: list[list[Span]] = [[] for _ in ranks]
    spent = times(order, len(ranks), duration, transfer)
    for rank, action, begin, end in zip(order.ranks, order.actions, *spent, strict=True):
        found[rank].append(Span(action, begin, end))
    return Walk(found)


def times(
    order: Order, ranks: int, duration: Callable[[Action], float], transfer: Callable[[Action], float]
) -> tuple[list[float], list[float]]:
    """When each of the actions of so many ranks begins and ends; see ``walk``."""
    begins: list[float] = []
    ends: list[float] = []
    arrivals: list[float] = []
    free, gone = [0.0] * ranks, [0.0] * ranks
    for rank, action, awaited, is_sent in zip(*order, strict=True):
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
