"""The order of messages on a device that may execute everything one after another, as CUDA with NCCL may.

There a receive occupies its stream until its message arrives, and whatever waits for the whole device (the first launch
of a kernel may) waits for every receive that was posted. So each rank gets one list of actions and exchanges that is
its part of a single sequence of all ranks. An exchange is a message, or two in opposite directions, between two ranks
that both start it there. The first entry of that sequence that is not done can always be done: even ranks that finish
every entry before they start the next one cannot wait for each other in a circle.

``1f1b`` with two stages and three micro-batches (``>`` sends, ``<`` receives)::

    rank 0  F0  >F0      F1  >F1      <B0  B0  F2  >F2<B1  B1          <B2  B2
    rank 1      <F0  F0      <F1  B0  >B0  F1  B1  <F2>B1  F2  B2      >B2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcbench.strategies.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Action,
    PipelineLayout,
    PipelineMessage,
    message_after,
)

_DURATIONS = {BACKWARD: 2, UPDATE: 0}
"""Units of time of the actions that do not take one: the sequence is that of equal stages."""


class Exchange(NamedTuple):
    """Messages between two ranks that both ranks start together, at most one in each direction."""

    link: tuple[int, int]
    """The two ranks, the lower one first."""
    messages: tuple[PipelineMessage, ...]

    def __str__(self) -> str:
        parts = (f"{message.action} from rank {message.source} to rank {message.target}" for message in self.messages)
        return " with ".join(parts)


RankProgram = list[Action | Exchange]
"""The actions of a rank with the exchanges between them, in the order in which the rank starts them."""


def pipeline_links(ranks: Sequence[Sequence[Action]], layout: PipelineLayout) -> list[tuple[int, int]]:
    """Return the pairs of ranks that exchange messages, sorted: the order in which all ranks open them."""
    messages = (message_after(action, layout) for actions in ranks for action in actions)
    return sorted({_link_of(message) for message in messages if message is not None})


def exchange_order(ranks: Sequence[Sequence[Action]], layout: PipelineLayout) -> list[RankProgram]:
    """Return the program of every rank for one step.

    A message is exchanged when its sender has computed it in a simulation of equal stages, so that it arrives while its
    receiver computes. Messages in both directions of a link between which neither rank computes are one exchange.

    Args:
        ranks: The actions of every rank. Results of other ranks that no action of these computes were received before.
        layout: The pipeline's stages and chunks.

    Raises:
        AssertionError: The lists of actions cannot be executed.
    """
    programs: list[RankProgram] = [[] for _ in ranks]
    for _, _, _, _, entry in sorted(_timed_entries(ranks, layout), key=lambda timed: timed[:4]):
        if isinstance(entry, PipelineMessage):
            _add_message(programs, entry)
        else:
            rank, action = entry
            programs[rank].append(action)
    return programs


_TimedEntry = tuple[int, int, int, int, tuple[int, Action] | PipelineMessage]
"""Time; 0 for messages, 1 for actions that begin then; two numbers that order entries of one time; the entry."""


def _timed_entries(ranks: Sequence[Sequence[Action]], layout: PipelineLayout) -> list[_TimedEntry]:
    """Simulate the step: the actions at their begin and the messages at the end of the actions that compute them."""
    computed = {action for actions in ranks for action in actions}
    entries: list[_TimedEntry] = []
    ends: dict[Action, int] = {}
    positions, rank_ends = [0] * len(ranks), [0] * len(ranks)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(ranks):
            while positions[rank] < len(actions):
                position, action = positions[rank], actions[positions[rank]]
                begin = _begin(action, layout, rank_ends[rank], computed, ends)
                if begin is None:
                    break
                ends[action] = rank_ends[rank] = begin + _DURATIONS.get(action.kind, 1)
                positions[rank] += 1
                progress = True
                entries.append((begin, 1, rank, position, (rank, action)))
                message = message_after(action, layout)
                if message is not None:
                    entries.append((ends[action], 0, *_link_of(message), message))
    assert positions == [len(actions) for actions in ranks], "a schedule that gets stuck"
    return entries


def _begin(
    action: Action, layout: PipelineLayout, rank_end: int, computed: set[Action], ends: Mapping[Action, int]
) -> int | None:
    """Return when ``action`` begins, or ``None`` while the end of the action that it needs is not known."""
    needed = action._replace(chunk=action.chunk - 1 if action.kind == FORWARD else action.chunk + 1)
    if message_after(needed, layout) is None or needed not in computed:
        return rank_end
    return max(rank_end, ends[needed]) if needed in ends else None


def _add_message(programs: list[RankProgram], message: PipelineMessage) -> None:
    """Append ``message`` to the programs of both ranks, or to the exchange of their link that both of them end with."""
    link = _link_of(message)
    last_entries = [programs[rank][-1] if programs[rank] else None for rank in link]
    exchange = Exchange(link, (message,))
    last = last_entries[0]
    if isinstance(last, Exchange) and last.link == link and last == last_entries[1]:
        exchange = Exchange(link, (*last.messages, message))
        for rank in link:
            programs[rank].pop()
    for rank in link:
        programs[rank].append(exchange)


def _link_of(message: PipelineMessage) -> tuple[int, int]:
    return min(message.source, message.target), max(message.source, message.target)
