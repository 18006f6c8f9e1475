"""Pipeline schedules: the list of actions that each rank executes in one step.
The worker executes these lists and the oracle simulates them. Sends and receives follow from them: a rank sends a
result as soon as it has computed it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, UPDATE = "F", "B", "I", "W", "U"
"""Kinds of actions. A backward is whole (``B``), or split into the gradient of the chunk's input (``I``), which the
chunk before waits for, and those of its weights (``W``), which nobody waits for. ``U`` updates the weights."""

SCHEDULES = ("model", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "pipedream")


class Action(NamedTuple):
    """``chunk`` counts along the model, over all ranks: of a plain pipeline it is the stage."""

    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(chunk {self.chunk}, micro-batch {self.micro_batch})"


class PipelineLayout(NamedTuple):
    """Which rank of a pipeline computes what: chunk ``c`` is on stage ``c % stages``.

    A stage with several replicas has as many ranks; micro-batches go to them in turn.
    """

    stages: int
    virtual_stages: int = 1
    replicas: tuple[int, ...] = ()
    """Ranks of each stage; one each where empty."""

    @property
    def chunks(self) -> int:
        """Pieces that the model is cut into."""
        return self.stages * self.virtual_stages

    @property
    def widths(self) -> tuple[int, ...]:
        """Ranks of each stage."""
        return self.replicas or (1,) * self.stages

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return sum(self.widths)

    def stage_of(self, rank: int) -> int:
        """The stage that ``rank`` belongs to."""
        for stage, width in enumerate(self.widths):
            if rank < width:
                return stage
            rank -= width
        raise AssertionError("a rank beyond the pipeline")

    def ranks_of(self, stage: int) -> range:
        """The replicas of ``stage``."""
        first = sum(self.widths[:stage])
        return range(first, first + self.widths[stage])

    def rank(self, chunk: int, micro_batch: int) -> int:
        """Who computes ``chunk`` for ``micro_batch``."""
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
    """Per rank of the pipeline, what it does in one step of ``micro_batches`` micro-batches.

    ``pipedream`` here is one window from an empty pipeline to an empty one; see ``pipedream_window``.
    """
    assert layout.virtual_stages == 1 or schedule == "interleaved_1f1b", f"{schedule} has one chunk per rank"
    if schedule == "pipedream":
        return [pipedream_window(layout, rank, micro_batches, True, True) for rank in range(layout.ranks)]
    extra = _extra_warmup_forwards(schedule, layout, micro_batches)
    return [_RANK_SCHEDULES[schedule](layout, rank, micro_batches, extra) for rank in range(layout.ranks)]


def rank_schedule_actions(schedule: str, layout: PipelineLayout, rank: int, micro_batches: int) -> list[Action]:
    """What one rank of ``actions`` does."""
    if schedule == "pipedream":
        return pipedream_window(layout, rank, micro_batches, True, True)
    return _RANK_SCHEDULES[schedule](
        layout, rank, micro_batches, _extra_warmup_forwards(schedule, layout, micro_batches)
    )


def pipedream_window(
    layout: PipelineLayout, rank: int, micro_batches: int, is_first: bool, is_last: bool
) -> list[Action]:
    """What ``rank`` does between the updates of one step and those of the next (Narayanan et al. 2019, figure 8).

    PipeDream has no end of a step: every micro-batch is a minibatch with an update of its own, and a rank is always
    ``ahead`` forward passes before its backward passes. A window holds the backward passes and updates of
    ``micro_batches`` minibatches (numbered from 0 in every window), and the forward passes of as many: those numbered
    ``micro_batches`` and more belong to the windows that follow. The first window also fills the pipeline; the last
    one lets it run empty.
    """
    stage = layout.stage_of(rank)
    own = layout.micro_batches_of(rank, micro_batches)
    width = layout.widths[stage]
    ahead = _stage_warmup_forwards(layout, stage)
    assert width == 1 or (is_first and is_last), "replicated stages run from empty to empty"
    forwards = [first + step * width for first in own[:1] for step in range(len(own) + ahead)]
    done = [Action(FORWARD, stage, number) for number in (forwards[:ahead] if is_first else [])]
    for number, forward in zip(own, forwards[ahead:], strict=True):
        done += [Action(FORWARD, stage, forward), Action(BACKWARD, stage, number), Action(UPDATE, stage, number)]
    return [one for one in done if not (is_last and one.micro_batch >= micro_batches)]


def warmup_forwards(layout: PipelineLayout, rank: int) -> int:
    """How many forward passes a rank of ``pipedream`` and ``1f1b`` is before its backward passes."""
    return _stage_warmup_forwards(layout, layout.stage_of(rank))


def _stage_warmup_forwards(layout: PipelineLayout, stage: int) -> int:
    """With one rank per stage ``stages - 1 - stage``; with replicas PipeDream's NOAM for this stage, less one."""
    behind, own = sum(layout.widths[stage:]), layout.widths[stage]
    return -(-behind // own) - 1


_PassOrders = tuple[list[Action], list[Action], int]
"""Forward passes and backward passes, each in order, and how many of the former come first."""


@lru_cache(maxsize=1024)
def _extra_warmup_forwards(schedule: str, layout: PipelineLayout, m: int) -> int:
    """How many forward passes longer than the formula's the warm-up is that can be executed.

    Where micro-batches do not share evenly into rounds or replicas, the shortest one that can be may be longer. All
    forward passes first can always be.
    """
    if _is_minimal_warmup_executable(layout, m):
        return 0
    for extra in range(layout.chunks * m + 1):
        if not deadlocked_actions(
            [_RANK_SCHEDULES[schedule](layout, rank, m, extra) for rank in range(layout.ranks)], layout
        ):
            return extra
    raise AssertionError(f"{layout} cannot be executed with {m} micro-batches")


def _is_minimal_warmup_executable(layout: PipelineLayout, micro_batches: int) -> bool:
    """Whether the shortest warm-up of every schedule is known to do."""
    is_even = layout.virtual_stages == 1 or micro_batches % layout.stages == 0
    return is_even and max(layout.widths) == 1


def _model_actions(layout: PipelineLayout, rank: int, micro_batches: int, _extra: int) -> list[Action]:
    """One micro-batch after another, each on one rank at a time: no pipeline."""
    stage, own = layout.stage_of(rank), layout.micro_batches_of(rank, micro_batches)
    return [Action(kind, stage, one) for one in own for kind in (FORWARD, BACKWARD)]


def _gpipe_actions(layout: PipelineLayout, rank: int, micro_batches: int, _extra: int) -> list[Action]:
    """All forward passes, then all backward passes, the last micro-batch's first (Huang et al. 2019)."""
    stage, own = layout.stage_of(rank), layout.micro_batches_of(rank, micro_batches)
    forwards = [Action(FORWARD, stage, one) for one in own]
    return forwards + [Action(BACKWARD, stage, one) for one in reversed(own)]


def _one_f_one_b_actions(layout: PipelineLayout, rank: int, micro_batches: int, extra: int) -> list[Action]:
    """One forward, one backward, after as many forwards as there are stages behind (Narayanan et al. 2019)."""
    stage, own = layout.stage_of(rank), layout.micro_batches_of(rank, micro_batches)
    forwards = [Action(FORWARD, stage, one) for one in own]
    backwards = [Action(BACKWARD, stage, one) for one in own]
    return _alternate_passes(forwards, backwards, _stage_warmup_forwards(layout, stage) + extra)


def _interleaved_actions(layout: PipelineLayout, rank: int, micro_batches: int, extra: int) -> list[Action]:
    """Several chunks a rank, in rounds of as many micro-batches as there are stages (Narayanan et al. 2021, 2.2.2)."""
    stages, virtual = layout.stages, layout.virtual_stages
    rounds = [range(first, min(first + stages, micro_batches)) for first in range(0, micro_batches, stages)]
    chunks = layout.chunks_of(rank)
    forwards = [Action(FORWARD, chunk, one) for numbers in rounds for chunk in chunks for one in numbers]
    backwards = [Action(BACKWARD, chunk, one) for numbers in rounds for chunk in chunks[::-1] for one in numbers]
    return _alternate_passes(forwards, backwards, 2 * (stages - 1 - rank) + (virtual - 1) * stages + extra)


def _zero_bubble_actions(layout: PipelineLayout, rank: int, micro_batches: int, extra: int) -> list[Action]:
    """ZB-H1 (Qi et al. 2023, section 2.2): 1f1b, where the gradients of weights fill what would be waited for.

    Stage ``s`` leaves them ``s`` micro-batches behind, so that all stages keep as many activations as the first one
    of 1f1b.
    """
    found: list[Action] = []
    waiting: list[Action] = []
    stage = layout.stage_of(rank)
    for one in _one_f_one_b_actions(layout, rank, micro_batches, extra):
        if one.kind == FORWARD:
            found.append(one)
            continue
        found.append(Action(BACKWARD_INPUT, one.chunk, one.micro_batch))
        waiting.append(Action(BACKWARD_WEIGHT, one.chunk, one.micro_batch))
        if len(waiting) > stage:
            found.append(waiting.pop(0))
    return found + waiting


_RANK_SCHEDULES: dict[str, Callable[[PipelineLayout, int, int, int], list[Action]]] = {
    "model": _model_actions,
    "gpipe": _gpipe_actions,
    "1f1b": _one_f_one_b_actions,
    "interleaved_1f1b": _interleaved_actions,
    "zero_bubble": _zero_bubble_actions,
}


def _alternate_passes(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    found = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        found += [forward, backward]
    return found + backwards[len(forwards) - ahead :]


def action_dependencies(action: Action, layout: PipelineLayout) -> list[Action]:
    """What must have been done before, on this rank or on another; a whole backward also stands for its halves."""
    kind, chunk, one = action
    before: list[Action] = []
    if kind == FORWARD and chunk > 0:
        before.append(Action(FORWARD, chunk - 1, one))
    if kind in (BACKWARD, BACKWARD_INPUT):
        before.append(Action(FORWARD, chunk, one))
        if chunk < layout.chunks - 1:
            before.append(Action(kind, chunk + 1, one))
    if kind == BACKWARD_WEIGHT:
        before.append(Action(BACKWARD_INPUT, chunk, one))
    if kind == UPDATE:
        before.append(Action(BACKWARD, chunk, one))
    return before


def deadlocked_actions(ranks: list[list[Action]], layout: PipelineLayout) -> list[Action]:
    """The actions at which the ranks would wait for ever; empty where the lists can be executed to their ends."""
    done: set[Action] = set()
    places = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(ranks):
            while places[rank] < len(own) and all(
                one in done for one in action_dependencies(own[places[rank]], layout)
            ):
                done.add(own[places[rank]])
                places[rank] += 1
                moved = True
    return [own[place] for own, place in zip(ranks, places, strict=True) if place < len(own)]


class PipelineMessage(NamedTuple):
    """What a rank sends as soon as ``action`` is done: its output, or the gradient of its input."""

    source: int
    target: int
    action: Action

    @property
    def is_forward(self) -> bool:
        """Activations; otherwise gradients."""
        return self.action.kind == FORWARD


def message_after(action: Action, layout: PipelineLayout) -> PipelineMessage | None:
    """What is sent after ``action``; ``None`` where nobody else waits for it."""
    kind, chunk, one = action
    following = {FORWARD: chunk + 1, BACKWARD: chunk - 1, BACKWARD_INPUT: chunk - 1}.get(kind, -1)
    if not 0 <= following < layout.chunks:
        return None
    source, target = layout.rank(chunk, one), layout.rank(following, one)
    return None if source == target else PipelineMessage(source, target, action)


def received_messages(ranks: list[list[Action]], layout: PipelineLayout, rank: int) -> list[PipelineMessage]:
    """What the others send to ``rank``, each sender's in the order in which it sends."""
    sent = (message_after(action, layout) for own in ranks for action in own)
    return [one for one in sent if one is not None and one.target == rank]
