"""Point-to-point transport of a pipeline in which both ranks of a link start each exchange at a fixed place.

For cuda: a receive that NCCL has posted occupies its stream until the message arrives, and the first launch of a kernel
may wait for it. ``parallel.pipeline.exchange_order`` shows why ranks do not hang in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.parallel.pipeline.exchange_order import Exchange, RankProgram, exchange_order
from hpcbench.parallel.pipeline.schedules import Action, PipelineLayout, PipelineMessage
from hpcbench.worker.distributed.process_groups import RankContext, RankGroup, make_group_of_ranks
from hpcbench.worker.strategies.pipeline.p2p import MessageShapes, MessageTransport

LinkGroups = Mapping[tuple[int, int], RankGroup]
"""This rank's process groups of two ranks, by link: both directions share a communicator."""

_cached_order = lru_cache(maxsize=16)(exchange_order)


def open_links(group: RankGroup, links: Iterable[tuple[int, int]], context: RankContext) -> LinkGroups:
    """Create the groups of this rank's links and exchange a number over each.

    NCCL creates a communicator with its first call, in which each member waits for the others: all ranks open their
    links in the order of ``links``.

    Args:
        group: The pipeline's ranks.
        links: All links of the pipeline, sorted.
        context: This rank of the run.
    """
    own = [link for link in links if group.place in link]
    groups = {link: make_group_of_ranks((group.ranks[rank] for rank in link), context, "link") for link in own}
    for link_group in groups.values():
        sent, received = torch.zeros(1, device=context.device), torch.empty(1, device=context.device)
        for works in _start_together([(sent, 0)], [(received, 0)], link_group):
            for work in works:
                work.wait()
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    return groups


class PairedTransport(MessageTransport):
    """Sends and receives that start where the program of ``order`` has their exchange.

    ``send`` only keeps the tensors for their exchange, and ``receive`` waits for an exchange that was started.
    """

    def __init__(self, links: LinkGroups, device: torch.device, wait_s: float) -> None:
        super().__init__(device, wait_s)
        self._links = links
        self._outgoing: dict[PipelineMessage, list[Tensor]] = {}
        """Flat tensors of the messages whose exchanges were not started."""

    def order(self, ranks: Sequence[Sequence[Action]], layout: PipelineLayout, rank: int) -> RankProgram:
        # Steps of an asynchronous pipeline differ in their first number only: one order is computed for all of them.
        first = min(action.micro_batch for actions in ranks for action in actions)
        from_zero = tuple(tuple(_shifted(action, -first) for action in actions) for actions in ranks)
        program = _cached_order(from_zero, layout)[rank]
        return [_shifted_entry(entry, first) for entry in program] if first else program

    def post_receives(self, messages: Iterable[PipelineMessage], shapes: MessageShapes) -> None:
        """Keep the ``shapes`` of a step's messages; nothing is posted ahead of its exchange."""
        del messages
        assert not self._posted, "messages that were not received"
        assert not self._outgoing, "messages that were not sent"
        self._shapes = shapes

    def send(self, message: PipelineMessage, tensors: Sequence[Tensor]) -> None:
        self._outgoing[message] = self._flat_tensors(message, tensors)

    def exchange(self, exchange: Exchange) -> None:
        """Start to send and receive the messages of ``exchange`` together, without waiting."""
        self._forget_finished_sends()
        outgoing = [message for message in exchange.messages if message in self._outgoing]
        sends = [(flat, self._tag(message)) for message in outgoing for flat in self._outgoing.pop(message)]
        receives: list[tuple[Tensor, int]] = []
        for message in exchange.messages:
            if message not in outgoing:
                shapes = self._shapes(message)
                tensors, works = tuple(shape.empty(self._device) for shape in shapes), list[dist.Work]()
                self._posted[message] = tensors, works
                receives += [
                    (shape.flat(tensor), self._tag(message)) for shape, tensor in zip(shapes, tensors, strict=True)
                ]
        send_works, receive_works = _start_together(sends, receives, self._links[exchange.link])
        tensors_sent = [flat for flat, _ in sends]
        self._sent += [(work, tensors_sent) for work in send_works]
        for message in exchange.messages:
            if message not in outgoing:
                self._posted[message][1].extend(receive_works)


def _shifted(action: Action, micro_batches: int) -> Action:
    return Action(action.kind, action.chunk, action.micro_batch + micro_batches)


def _shifted_entry(entry: Action | Exchange, micro_batches: int) -> Action | Exchange:
    if isinstance(entry, Action):
        return _shifted(entry, micro_batches)
    messages = (message._replace(action=_shifted(message.action, micro_batches)) for message in entry.messages)
    return Exchange(entry.link, tuple(messages))


def _start_together(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], link: RankGroup
) -> tuple[list[dist.Work], list[dist.Work]]:
    """Start to send and receive flat tensors with their tags over ``link``; return the works of both."""
    group, peer = link.members(), 1 - link.place
    calls = [dist.P2POp(dist.isend, flat, group=group, tag=tag, group_peer=peer) for flat, tag in sends]
    calls += [dist.P2POp(dist.irecv, flat, group=group, tag=tag, group_peer=peer) for flat, tag in receives]
    works = dist.batch_isend_irecv(calls) if calls else []
    if len(works) == len(calls):
        return works[: len(sends)], works[len(sends) :]
    # NCCL answers with one work for all calls.
    return works if sends else [], works if receives else []
