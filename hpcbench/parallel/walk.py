"""A walk through a pipeline's schedule: when each action begins and ends, what waits, what lives meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcbench.parallel.schedule import BACKWARD, FORWARD, WEIGHT, Action, Layout, needs


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


def walk(
    ranks: list[list[Action]],
    layout: Layout,
    duration: Callable[[Action], float],
    transfer: Callable[[Action], float] = lambda _: 0.0,
) -> Walk:
    """Every rank does its next action as soon as it is done with the one before and has what the action needs.

    ``transfer`` is the time from an action's end until the rank that waits for its result has it, where that is
    another rank. Sending costs the sender nothing.
    """
    ends: dict[Action, float] = {}
    found: list[list[Span]] = [[] for _ in ranks]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(ranks):
            spans = found[rank]
            while len(spans) < len(own):
                action = own[len(spans)]
                before = needs(action, layout)
                if not all(one in ends for one in before):
                    break
                arrived = [ends[one] + (transfer(one) if _is_elsewhere(one, action, layout) else 0.0) for one in before]
                begin = max([spans[-1].end if spans else 0.0, *arrived])
                ends[action] = begin + duration(action)
                spans.append(Span(action, begin, ends[action]))
                moved = True
    assert all(len(spans) == len(own) for spans, own in zip(found, ranks, strict=True)), "a schedule that gets stuck"
    return Walk(found)


def _is_elsewhere(one: Action, action: Action, layout: Layout) -> bool:
    return layout.rank(one.chunk, one.micro_batch) != layout.rank(action.chunk, action.micro_batch)


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
