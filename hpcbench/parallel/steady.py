"""The steady step of a pipeline that is never emptied: what bounds it is a circle of actions that wait for each other.

In a steady state everything happens once per minibatch, and no faster than the slowest circle allows: the time around
it over the minibatches that are under way on it (the largest mean of a timed graph's circuits, Baccelli et al. 1992).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from hpcbench.parallel.schedule import BACKWARD, FORWARD, UPDATE, Action, Layout
from hpcbench.parallel.versions import Delay, steps_of
from hpcbench.parallel.walk import Order, in_order, times


class Stage(NamedTuple):
    """What one stage does for a minibatch, in seconds."""

    forward_s: float
    backward_s: float
    update_s: float
    """Of one update, with all that is waited for before it."""
    forward_send_s: float = 0.0
    """To the next stage."""
    backward_send_s: float = 0.0
    """To the stage before."""

    @property
    def sends_s(self) -> float:
        """Messages that leave it for one minibatch, one after another."""
        return self.forward_send_s + self.backward_send_s


def steady_step_s(stages: Sequence[Stage], delay: Delay, micro_batches: int) -> float:
    """Of ``micro_batches`` minibatches, with an update each or (double buffers) one for all.

    With fewer micro-batches than stages double buffers let the pipeline run dry: that is walked through.
    """
    if not delay.double_buffered:
        return micro_batches * max(circle / count for circle, count, _ in circles(stages, True))
    if micro_batches >= len(stages):
        around_s = max(
            micro_batches * circle / count + stages[first].update_s for circle, count, first in circles(stages, False)
        )
        return max(around_s, micro_batches * max(stage.sends_s for stage in stages))
    return walked_step_s(stages, delay, micro_batches)


def circles(stages: Sequence[Stage], with_update: bool) -> list[tuple[float, int, int]]:
    """Every circle: its seconds, the minibatches under way on it, and the stage that it begins at.

    Forward from stage s to stage t, back again, and the update of s, after which s begins another minibatch: it is
    t - s ahead of t, so t - s + 1 are under way. A stage alone is a circle, and so are the messages that it sends.
    """
    found = [(stage.sends_s, 1, place) for place, stage in enumerate(stages)] if with_update else []
    for first, stage in enumerate(stages):
        around_s = stage.update_s if with_update else 0.0
        for last in range(first, len(stages)):
            around_s += stages[last].forward_s + stages[last].backward_s
            if last > first:
                around_s += stages[last - 1].forward_send_s + stages[last].backward_send_s
            found.append((around_s, last - first + 1, first))
    return found


def walked_step_s(stages: Sequence[Stage], delay: Delay, micro_batches: int) -> float:
    """As ``steady_step_s``, by a walk through enough steps for them to be alike."""
    layout = Layout(len(stages))
    many = ceil(2 * layout.stages / micro_batches) + 2
    seconds = {
        FORWARD: [stage.forward_s for stage in stages],
        BACKWARD: [stage.backward_s for stage in stages],
        UPDATE: [stage.update_s for stage in stages],
    }
    sends = {FORWARD: [stage.forward_send_s for stage in stages], BACKWARD: [stage.backward_send_s for stage in stages]}

    def duration(action: Action) -> float:
        return seconds[action.kind][action.chunk]

    def transfer(action: Action) -> float:
        return sends[action.kind][action.chunk]

    shorter_s, longer_s = (
        _ended(_order(layout, delay, micro_batches, steps), layout, duration, transfer) for steps in (many, 2 * many)
    )
    return (longer_s - shorter_s) / many


def _ended(
    order: Order, layout: Layout, duration: Callable[[Action], float], transfer: Callable[[Action], float]
) -> float:
    return max(times(order, layout.ranks, duration, transfer)[1])


@lru_cache(maxsize=64)
def _order(layout: Layout, delay: Delay, micro_batches: int, steps: int) -> Order:
    """What is forwarded of later steps is left out."""
    every = [steps_of(layout, delay, stage, micro_batches, steps) for stage in range(layout.stages)]
    return in_order([[one for one in own if one.micro_batch < steps * micro_batches] for own in every], layout)
