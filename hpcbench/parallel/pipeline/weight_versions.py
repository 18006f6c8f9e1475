"""PipeDream's weight versions: the version that each stage uses for a minibatch, and the schedules that follow from it.
Version ``v`` is the state of a stage's weights after ``v`` updates. Minibatches and updates are numbered from 0 over
the whole training, and update ``t`` uses the gradient of minibatch ``t``.
"""

from __future__ import annotations

from typing import NamedTuple

from hpcbench.parallel.pipeline.schedules import BACKWARD, FORWARD, UPDATE, Action, PipelineLayout, pipedream_window

WEIGHT_VERSION_SCHEMES = ("stash", "2bw")


class Staleness(NamedTuple):
    """How old weights are, for one of ``stages`` stages.

    * weight stashing (Narayanan et al. 2019, section 3.3): a stage computes a minibatch with the newest version that
      it has when the minibatch comes by: stage ``s`` of ``n`` is ``n - 1 - s`` updates behind;
    * vertical sync (the same section): all stages take the version that the first one has: ``n - 1`` updates behind;
    * double-buffered weights (Narayanan et al. 2021, PipeDream-2BW, section 3.1): there is one update for all
      micro-batches of a step, and every stage is one update behind.
    """

    stages: int
    vertical_sync: bool = False
    double_buffered: bool = False

    def updates(self, stage: int) -> int:
        """Updates that are made between the version that a minibatch is computed with and its own."""
        if self.double_buffered:
            return 1
        return self.stages - 1 - (0 if self.vertical_sync else stage)

    def version(self, stage: int, update: int) -> int:
        """The version that ``stage`` computes minibatch ``update`` with (with double buffers: that step's)."""
        return max(0, update - self.updates(stage))

    def held(self, stage: int) -> int:
        """Versions that ``stage`` holds at most, the live weights among them.

        >>> [Delay(4).held(stage) for stage in range(4)]
        [4, 3, 2, 1]
        """
        return self.updates(stage) + 1


def forwards_ahead_at_step_end(delay: Staleness, stage: int, next_micro_batches: int) -> int:
    """Forward passes that ``stage`` has made of steps to come when a step has ended.

    ``next_micro_batches`` are those of the step after it; with double buffers a stage goes no further, because the
    weights of the one after that are not made yet.
    """
    ahead = delay.stages - 1 - stage
    return min(ahead, next_micro_batches) if delay.double_buffered else ahead


def double_buffered_actions(
    stage: int, ahead: int, micro_batches: int, next_micro_batches: int, done: int
) -> list[Action]:
    """What a stage does in one step with double-buffered weights: as ``pipedream_window``, with one update at the end.

    ``ahead`` is how many forward passes the stage is before its backward passes, ``done`` how many of this step it has
    made already.
    """
    found: list[Action] = []
    forwards = done
    for number in range(micro_batches):
        until = min(number + ahead + 1, micro_batches + next_micro_batches)
        found += [Action(FORWARD, stage, one) for one in range(forwards, until)]
        forwards = max(forwards, until)
        found.append(Action(BACKWARD, stage, number))
    return [*found, Action(UPDATE, stage, micro_batches - 1)]


def stage_step_actions(
    layout: PipelineLayout, delay: Staleness, stage: int, micro_batches: int, next_micro_batches: int, is_first: bool
) -> list[Action]:
    """What ``stage`` does in one step; ``next_micro_batches`` are those of the step after it.

    Micro-batches are numbered from 0 in the step, those of steps to come follow. The first step fills the pipeline.
    """
    if not delay.double_buffered:
        return pipedream_window(layout, stage, micro_batches, is_first, False)
    done = 0 if is_first else forwards_ahead_at_step_end(delay, stage, micro_batches)
    return double_buffered_actions(stage, layout.stages - 1 - stage, micro_batches, next_micro_batches, done)


def stage_actions_over_steps(
    layout: PipelineLayout, delay: Staleness, stage: int, micro_batches: int, steps: int
) -> list[Action]:
    """What ``stage`` does in the first ``steps`` steps, micro-batches numbered on from step to step."""
    return [
        one._replace(micro_batch=one.micro_batch + step * micro_batches)
        for step in range(steps)
        for one in stage_step_actions(layout, delay, stage, micro_batches, micro_batches, step == 0)
    ]
