"""Pipeline schedules: the list of actions that each rank executes in one step.

The worker executes these lists and the oracle simulates them. Sends and receives follow from them: a rank sends a
result as soon as it has computed it. Each schedule is drawn above its function: a row per rank, time to the right.
Small letters are forward passes (``a`` is micro-batch 0), pairs of capitals the backward passes, dots idle time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, UPDATE = "F", "B", "I", "W", "U"
"""Kinds of actions. A backward pass is whole (``B``) or split into the gradient of the chunk's input (``I``), which the
previous chunk waits for, and those of its weights (``W``), which no other action needs. ``U`` updates the weights."""


class Action(NamedTuple):
    """An action of a rank. ``chunk`` counts along the whole model: in a pipeline without virtual stages, the stage."""

    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(chunk {self.chunk}, micro-batch {self.micro_batch})"


class PipelineLayout(NamedTuple):
    """Assignment of chunks and micro-batches to the ranks of one pipeline.

    Chunk ``c`` is on stage ``c % stages``. The micro-batches of a stage with several replicas go round-robin::

        stages=2, virtual_stages=2:  rank 0 holds chunks 0 and 2, rank 1 holds chunks 1 and 3
        stages=2, replicas=(2, 1):   stage 0 is ranks 0 (micro-batches 0, 2, ...) and 1 (1, 3, ...), stage 1 is rank 2
    """

    stages: int
    virtual_stages: int = 1
    replicas: tuple[int, ...] = ()
    """Ranks of each stage; one each where empty."""

    @property
    def chunks(self) -> int:
        return self.stages * self.virtual_stages

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """Ranks of each stage."""
        return self.replicas or (1,) * self.stages

    @property
    def ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return sum(self.stage_sizes)

    def stage_of(self, rank: int) -> int:
        for stage, size in enumerate(self.stage_sizes):
            if rank < size:
                return stage
            rank -= size
        raise AssertionError("a rank beyond the pipeline")

    def ranks_of(self, stage: int) -> range:
        first = sum(self.stage_sizes[:stage])
        return range(first, first + self.stage_sizes[stage])

    def rank_of(self, chunk: int, micro_batch: int) -> int:
        """The rank that computes ``chunk`` for ``micro_batch``."""
        ranks = self.ranks_of(chunk % self.stages)
        return ranks[micro_batch % len(ranks)]

    def chunks_of(self, rank: int) -> list[int]:
        """The chunks that ``rank`` holds, ascending."""
        return list(range(self.stage_of(rank), self.chunks, self.stages))

    def micro_batches_of(self, rank: int, micro_batches: int) -> list[int]:
        """The micro-batches that pass through ``rank``."""
        ranks = self.ranks_of(self.stage_of(rank))
        return list(range(rank - ranks.start, micro_batches, len(ranks)))


def schedule_actions(schedule: str, layout: PipelineLayout, micro_batches: int) -> list[list[Action]]:
    """Return the actions of one step for every rank of the pipeline, each rank's in order of execution.

    ``schedule`` is a key of ``SCHEDULES``. That of ``pipedream`` is one window from an empty pipeline to an empty one.

    >>> [[str(action) for action in actions] for actions in schedule_actions("gpipe", PipelineLayout(1), 1)]
    [['F(chunk 0, micro-batch 0)', 'B(chunk 0, micro-batch 0)']]
    """
    return [rank_schedule_actions(schedule, layout, rank, micro_batches) for rank in range(layout.ranks)]


def rank_schedule_actions(schedule: str, layout: PipelineLayout, rank: int, micro_batches: int) -> list[Action]:
    """Return the entry of ``rank`` in ``schedule_actions``."""
    assert layout.virtual_stages == 1 or SCHEDULES[schedule].has_virtual_stages, f"{schedule} has one chunk per rank"
    extra = _extra_warmup_forwards(schedule, layout, micro_batches)
    return SCHEDULES[schedule].rank_actions(layout, rank, micro_batches, extra)


def warmup_forwards(layout: PipelineLayout, stage: int) -> int:
    """Forward passes that ``pipedream`` and ``1f1b`` are ahead of their backward passes on ``stage``.

    ``stages - 1 - stage`` with one rank per stage; with replicas PipeDream's NOAM of this stage, minus one.
    """
    remaining_ranks = sum(layout.stage_sizes[stage:])
    return -(-remaining_ranks // layout.stage_sizes[stage]) - 1


@lru_cache(maxsize=1024)
def _extra_warmup_forwards(schedule: str, layout: PipelineLayout, micro_batches: int) -> int:
    """Forward passes to add to the formula's warm-up until the ranks do not deadlock.

    The formula's warm-up is known to work where micro-batches divide evenly into rounds and no stage has replicas. It
    can be too short otherwise; all forward passes first always work.
    """
    has_even_rounds = layout.virtual_stages == 1 or micro_batches % layout.stages == 0
    if has_even_rounds and max(layout.stage_sizes) == 1:
        return 0
    rank_actions = SCHEDULES[schedule].rank_actions
    for extra in range(layout.chunks * micro_batches + 1):
        actions = [rank_actions(layout, rank, micro_batches, extra) for rank in range(layout.ranks)]
        if not deadlocked_actions(actions, layout):
            return extra
    raise AssertionError(f"{layout} cannot be executed with {micro_batches} micro-batches")


def _stage_passes(layout: PipelineLayout, rank: int, micro_batches: int) -> tuple[list[Action], list[Action]]:
    """The forward and the backward passes of ``rank``, which holds one chunk."""
    stage, numbers = layout.stage_of(rank), layout.micro_batches_of(rank, micro_batches)
    return [Action(FORWARD, stage, number) for number in numbers], [
        Action(BACKWARD, stage, number) for number in numbers
    ]


# model: no pipelining, the baseline of every speed-up
#
#     rank 0  a . . . . . . A A b . . . . . . B B
#     rank 1  . a . . . A A . . . b . . . B B . .
#     rank 2  . . a A A . . . . . . b B B . . . .
def _model_actions(layout: PipelineLayout, rank: int, micro_batches: int, _extra: int) -> list[Action]:
    """Return the passes of one micro-batch after another."""
    return [action for pair in zip(*_stage_passes(layout, rank, micro_batches), strict=True) for action in pair]


# gpipe: bubble (p - 1) / (m + p - 1); each rank keeps the activations of all m micro-batches
#
#     rank 0  a b c d . . . . . . D D C C B B A A
#     rank 1  . a b c d . . . D D C C B B A A . .
#     rank 2  . . a b c d D D C C B B A A . . . .
def _gpipe_actions(layout: PipelineLayout, rank: int, micro_batches: int, _extra: int) -> list[Action]:
    """Return all forward passes, then all backward passes in reverse order (Huang et al. 2019)."""
    forwards, backwards = _stage_passes(layout, rank, micro_batches)
    return forwards + backwards[::-1]


# 1f1b: the bubble of gpipe, but rank r keeps the activations of at most p - r micro-batches
#
#     rank 0  a b c . . . . A A d B B . C C . D D
#     rank 1  . a b . . A A c B B d C C . D D . .
#     rank 2  . . a A A b B B c C C d D D . . . .
def _one_f_one_b_actions(layout: PipelineLayout, rank: int, micro_batches: int, extra: int) -> list[Action]:
    """Alternate forward and backward passes, after a warm-up of one forward per later stage (Narayanan et al. 2019)."""
    forwards, backwards = _stage_passes(layout, rank, micro_batches)
    return _alternate_passes(forwards, backwards, warmup_forwards(layout, layout.stage_of(rank)) + extra)


# interleaved_1f1b: v chunks per rank (here 2: a0 and a2 on rank 0) divide the bubble by v and multiply the messages
#
#     rank 0  a0 b0 a2 b2 .  .  A2 A2 .  B2 B2 A0 A0 B0 B0
#     rank 1  .  a1 b1 a3 A3 A3 b3 B3 B3 A1 A1 B1 B1 .  .
def _interleaved_actions(layout: PipelineLayout, rank: int, micro_batches: int, extra: int) -> list[Action]:
    """Several chunks per rank, in rounds of ``stages`` micro-batches (Narayanan et al. 2021, section 2.2.2)."""
    stages, chunks = layout.stages, layout.chunks_of(rank)
    rounds = [range(first, min(first + stages, micro_batches)) for first in range(0, micro_batches, stages)]
    forwards = [Action(FORWARD, chunk, number) for numbers in rounds for chunk in chunks for number in numbers]
    backwards = [Action(BACKWARD, chunk, number) for numbers in rounds for chunk in chunks[::-1] for number in numbers]
    warmup = 2 * (stages - 1 - rank) + (layout.virtual_stages - 1) * stages
    return _alternate_passes(forwards, backwards, warmup + extra)


# zero_bubble: capitals are gradients of inputs, digits those of weights, which fill the bubble of 1f1b
#
#     rank 0  a b c . . A 0 d B 1 C 2 D 3
#     rank 1  . a b . A c B 0 d C 1 D 2 3
#     rank 2  . . a A b B c C 0 d D 1 2 3
def _zero_bubble_actions(layout: PipelineLayout, rank: int, micro_batches: int, extra: int) -> list[Action]:
    """1f1b with split backward passes, ZB-H1 (Qi et al. 2023, section 2.2).

    Stage ``s`` defers weight gradients by ``s`` micro-batches, so that all stages keep as many activations as stage 0
    of 1f1b.
    """
    actions: list[Action] = []
    deferred: list[Action] = []
    for action in _one_f_one_b_actions(layout, rank, micro_batches, extra):
        if action.kind == FORWARD:
            actions.append(action)
            continue
        actions.append(action._replace(kind=BACKWARD_INPUT))
        deferred.append(action._replace(kind=BACKWARD_WEIGHT))
        if len(deferred) > layout.stage_of(rank):
            actions.append(deferred.pop(0))
    return actions + deferred


# pipedream: 1f1b without an end of the step. In order of execution (F forward, B backward, U update), of a first window
# of two minibatches, which also fills the pipeline, and a second one:
#
#     rank 0  Fa Fb | Fc Ba U  Fd Bb U | Fe Bc U  Ff Bd U | ...
#     rank 1  Fa    | Fb Ba U  Fc Bb U | Fd Bc U  Fe Bd U | ...
#     rank 2        | Fa Ba U  Fb Bb U | Fc Bc U  Fd Bd U | ...
def pipedream_window(
    layout: PipelineLayout, rank: int, micro_batches: int, is_first: bool, is_last: bool
) -> list[Action]:
    """The actions of ``rank`` between the updates of one step and those of the next (Narayanan et al. 2019, figure 8).

    Every micro-batch is a minibatch with an update of its own, and a rank stays ``warmup_forwards`` forward passes
    ahead of its backward passes. A window holds the backward passes and updates of ``micro_batches`` minibatches
    (numbered from 0 in every window) and as many forward passes: those numbered ``micro_batches`` and above belong to
    later windows. The first window also fills the pipeline; the last one drains it.
    """
    stage, numbers = layout.stage_of(rank), layout.micro_batches_of(rank, micro_batches)
    size, ahead = layout.stage_sizes[stage], warmup_forwards(layout, stage)
    assert size == 1 or (is_first and is_last), "stages with replicas run from empty to empty"
    forwards = [first + step * size for first in numbers[:1] for step in range(len(numbers) + ahead)]
    actions = [Action(FORWARD, stage, number) for number in (forwards[:ahead] if is_first else [])]
    for number, forward in zip(numbers, forwards[ahead:], strict=True):
        actions += [Action(FORWARD, stage, forward), Action(BACKWARD, stage, number), Action(UPDATE, stage, number)]
    return [action for action in actions if not (is_last and action.micro_batch >= micro_batches)]


def _alternate_passes(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    warmup = min(warmup, len(forwards))
    actions = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - warmup :]


class Schedule(NamedTuple):
    """A pipeline schedule; ``rank_actions(layout, rank, micro_batches, extra_warmup_forwards)`` lists its actions."""

    rank_actions: Callable[[PipelineLayout, int, int, int], list[Action]]
    has_virtual_stages: bool = False
    extrapolation_rounds: tuple[int, int] = (4, 2)
    """Rounds of ``stages`` micro-batches of the two simulations from which a long schedule is extrapolated."""


SCHEDULES = {
    "model": Schedule(_model_actions, extrapolation_rounds=(2, 1)),
    "gpipe": Schedule(_gpipe_actions, extrapolation_rounds=(2, 1)),
    "1f1b": Schedule(_one_f_one_b_actions),
    "interleaved_1f1b": Schedule(_interleaved_actions, has_virtual_stages=True),
    "zero_bubble": Schedule(_zero_bubble_actions),
    "pipedream": Schedule(lambda layout, rank, count, _extra: pipedream_window(layout, rank, count, True, True)),
}


def action_dependencies(action: Action, layout: PipelineLayout) -> list[Action]:
    """Return the actions, on any rank, that must precede ``action``."""
    kind, chunk, number = action
    if kind == FORWARD:
        return [Action(FORWARD, chunk - 1, number)] if chunk > 0 else []
    if kind == BACKWARD_WEIGHT:
        return [Action(BACKWARD_INPUT, chunk, number)]
    if kind == UPDATE:
        return [Action(BACKWARD, chunk, number)]
    return [Action(FORWARD, chunk, number), *([Action(kind, chunk + 1, number)] if chunk < layout.chunks - 1 else [])]


def deadlocked_actions(ranks: list[list[Action]], layout: PipelineLayout) -> list[Action]:
    """Return the actions at which ranks would wait forever; empty if all lists can be executed to their ends."""
    done: set[Action] = set()
    positions = [0] * len(ranks)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(ranks):
            while positions[rank] < len(actions) and done.issuperset(
                action_dependencies(actions[positions[rank]], layout)
            ):
                done.add(actions[positions[rank]])
                positions[rank] += 1
                progress = True
    return [actions[position] for actions, position in zip(ranks, positions, strict=True) if position < len(actions)]


class PipelineMessage(NamedTuple):
    """A rank's output, or the gradient of its input, sent as soon as ``action`` is done."""

    source: int
    target: int
    action: Action

    @property
    def is_forward(self) -> bool:
        """Whether activations are sent; gradients otherwise."""
        return self.action.kind == FORWARD


def message_after(action: Action, layout: PipelineLayout) -> PipelineMessage | None:
    """Return the message that follows ``action``, or ``None`` where no other rank waits for its result."""
    kind, chunk, number = action
    receiver = {FORWARD: chunk + 1, BACKWARD: chunk - 1, BACKWARD_INPUT: chunk - 1}.get(kind, -1)
    if not 0 <= receiver < layout.chunks:
        return None
    source, target = layout.rank_of(chunk, number), layout.rank_of(receiver, number)
    return None if source == target else PipelineMessage(source, target, action)


def received_messages(ranks: list[list[Action]], layout: PipelineLayout, rank: int) -> list[PipelineMessage]:
    """Return the messages sent to ``rank``, each sender's in the order in which it sends."""
    messages = (message_after(action, layout) for actions in ranks for action in actions)
    return [message for message in messages if message is not None and message.target == rank]
