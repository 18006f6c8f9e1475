"""PipeDream's weight versions: the version that each stage uses for a minibatch, and the schedules that follow from it.
Version ``v`` is the state of a stage's weights after ``v`` updates. Minibatches and updates are numbered from 0 over
the whole training, and update ``t`` uses the gradient of minibatch ``t``.
"""

from __future__ import annotations

from typing import NamedTuple

from hpcbench.strategies.pipeline.schedules import BACKWARD, FORWARD, UPDATE, Action, PipelineLayout, pipedream_window

WEIGHT_VERSION_SCHEMES = ("stash", "2bw")


class Staleness(NamedTuple):
    """Staleness of the weights of ``stages`` stages.

    * weight stashing (Narayanan et al. 2019, section 3.3): a stage computes a minibatch with the newest version that
      it has when the minibatch arrives: stage ``s`` of ``n`` is ``n - 1 - s`` updates behind;
    * vertical sync (the same section): all stages use the version of the first one: ``n - 1`` updates behind;
    * double-buffered weights (Narayanan et al. 2021, PipeDream-2BW, section 3.1): there is one update for all
      micro-batches of a step, and every stage is one update behind.
    """

    stages: int
    vertical_sync: bool = False
    double_buffered: bool = False

    def updates_behind(self, stage: int) -> int:
        """Updates between the version that a minibatch is computed with and the one that it updates."""
        if self.double_buffered:
            return 1
        return self.stages - 1 - (0 if self.vertical_sync else stage)

    def version(self, stage: int, update: int) -> int:
        """The version that ``stage`` computes minibatch ``update`` with (with double buffers: step ``update``)."""
        return max(0, update - self.updates_behind(stage))

    def versions_held(self, stage: int) -> int:
        """The most versions that ``stage`` holds, including the live weights.

        >>> [Staleness(4).versions_held(stage) for stage in range(4)]
        [4, 3, 2, 1]
        """
        return self.updates_behind(stage) + 1


def forwards_ahead_at_step_end(staleness: Staleness, stage: int, next_micro_batches: int) -> int:
    """Return the forward passes of later steps that ``stage`` has made at the end of a step.

    ``next_micro_batches`` are those of the next step. With double buffers a stage goes no further than that, because
    the weights of the step after it do not exist yet.
    """
    ahead = staleness.stages - 1 - stage
    return min(ahead, next_micro_batches) if staleness.double_buffered else ahead


def stage_step_actions(
    layout: PipelineLayout,
    staleness: Staleness,
    stage: int,
    micro_batches: int,
    next_micro_batches: int,
    is_first: bool,
) -> list[Action]:
    """Return the actions of ``stage`` in one step; ``next_micro_batches`` are those of the next step.

    Micro-batches are numbered from 0 in the step, and on into later steps. The first step fills the pipeline. With
    double-buffered weights (F forward, B backward, U update; 2 stages, 2 micro-batches a, b; c, d of the next step)::

        stage 0  Fa Fb Ba Fc Bb U | Fd Bc Fe Bd U | ...
        stage 1  Fa Ba Fb Bb U    | Fc Bc Fd Bd U | ...
    """
    if not staleness.double_buffered:
        return pipedream_window(layout, stage, micro_batches, is_first, False)
    ahead = layout.stages - 1 - stage
    next_forward = 0 if is_first else forwards_ahead_at_step_end(staleness, stage, micro_batches)
    actions: list[Action] = []
    for number in range(micro_batches):
        until = min(number + ahead + 1, micro_batches + next_micro_batches)
        actions += [Action(FORWARD, stage, forward) for forward in range(next_forward, until)]
        next_forward = max(next_forward, until)
        actions.append(Action(BACKWARD, stage, number))
    return [*actions, Action(UPDATE, stage, micro_batches - 1)]


def stage_actions_over_steps(
    layout: PipelineLayout, staleness: Staleness, stage: int, micro_batches: int, steps: int
) -> list[Action]:
    """Return the actions of ``stage`` in the first ``steps`` steps, micro-batches numbered on from step to step."""
    return [
        action._replace(micro_batch=action.micro_batch + step * micro_batches)
        for step in range(steps)
        for action in stage_step_actions(layout, staleness, stage, micro_batches, micro_batches, step == 0)
    ]
