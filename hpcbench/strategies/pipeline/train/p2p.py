"""Point-to-point transport of activations and gradients between pipeline ranks.

Every exchange starts at a fixed place of both ranks: a receive that NCCL has posted occupies its stream until the
message arrives, and the first launch of a kernel may wait for it. ``exchange_order`` shows why ranks do not hang in
this order. CPUs follow it too, so that gloo's ranks test what GPUs run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hpcbench.strategies.pipeline.exchange_order import Exchange, RankProgram, exchange_order
from hpcbench.strategies.pipeline.schedules import Action, PipelineLayout, PipelineMessage
from hpcbench.strategies.pipeline.train.chunk import TensorMeta
from hpcbench.worker.distributed import point_to_point
from hpcbench.worker.distributed.point_to_point import Transfer
from hpcbench.worker.distributed.process_groups import RankContext, RankGroup, make_group_of_ranks, to_timedelta

_TAG_COUNT = 2**15
_TIMEOUT_FRACTION = 0.95
"""A wait that fails after this part of the time limit has run into it."""

MessageShapes = Callable[[PipelineMessage], Sequence[TensorMeta]]
"""Returns the form of the tensors of a message."""


class P2PTimeout(RuntimeError):
    """A message was not sent, or not received, within the time limit."""


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
    own_links = [link for link in links if group.place in link]
    groups = {link: make_group_of_ranks((group.ranks[rank] for rank in link), context, "link") for link in own_links}
    for link_group in groups.values():
        sent, received = torch.zeros(1, device=context.device), torch.empty(1, device=context.device)
        peer = 1 - link_group.place
        message, answer = point_to_point.Message(sent, peer), point_to_point.Message(received, peer)
        for transfers in point_to_point.exchange([message], [answer], link_group.members()):
            for transfer in transfers:
                transfer.wait()
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    return groups


class MessageTransport:
    """Sends and receives that start where a step's program has their exchange; a buffer lives until its transfer ends.

    ``send`` only keeps the tensors for their exchange. Only ``receive`` and ``wait_for_sends`` block, on cuda the
    stream and not the host.
    """

    def __init__(self, links: LinkGroups, device: torch.device, wait_s: float) -> None:
        self._links = links
        self._device = device
        self._wait_s = wait_s
        self._outgoing: dict[PipelineMessage, list[Tensor]] = {}
        """Flat tensors of the messages whose exchanges were not started."""
        self._posted: dict[PipelineMessage, tuple[tuple[Tensor, ...], Sequence[Transfer]]] = {}
        """Messages whose receives were started: their buffers and transfers."""
        self._numbers: dict[tuple[int, int, bool], int] = {}
        self._sent: list[tuple[Transfer, Sequence[Tensor]]] = []
        self._shapes: MessageShapes = lambda _: ()

    def begin_step(
        self, ranks: Sequence[Sequence[Action]], layout: PipelineLayout, rank: int, shapes: MessageShapes
    ) -> RankProgram:
        """Return the actions of ``rank`` in a step, with the exchanges that the runtime has to start between them.

        Args:
            ranks: The actions of every rank of the pipeline.
            layout: The pipeline's stages and chunks.
            rank: This rank of the pipeline.
            shapes: Function of a message that returns the forms of its tensors.
        """
        assert not self._posted, "messages that were not received"
        assert not self._outgoing, "messages that were not sent"
        self._shapes = shapes
        # Steps of an asynchronous pipeline differ in their first number only: one order is computed for all of them.
        first = min(action.micro_batch for actions in ranks for action in actions)
        from_zero = tuple(tuple(_shifted(action, -first) for action in actions) for actions in ranks)
        program = _cached_order(from_zero, layout)[rank]
        return [_shifted_entry(entry, first) for entry in program] if first else program

    def send(self, message: PipelineMessage, tensors: Sequence[Tensor]) -> None:
        """Keep ``tensors`` for the exchange of ``message``; they must not change any more.

        Their shapes are those that the receiver expects: [n, ...] each.
        """
        shapes = self._shapes(message)
        for shape, tensor in zip(shapes, tensors, strict=True):
            assert tuple(tensor.shape) == shape.sizes, f"{message}: {tuple(tensor.shape)}, not {shape.sizes}"
        self._outgoing[message] = [shape.flat(tensor) for shape, tensor in zip(shapes, tensors, strict=True)]

    def exchange(self, exchange: Exchange) -> None:
        """Start to send and receive the messages of ``exchange`` together, without waiting."""
        self._forget_finished_sends()
        link = self._links[exchange.link]
        sends: list[point_to_point.Message] = []
        receives: list[point_to_point.Message] = []
        buffers: dict[PipelineMessage, tuple[Tensor, ...]] = {}
        for message in exchange.messages:
            if message in self._outgoing:
                calls, flats = sends, self._outgoing.pop(message)
            else:
                shapes = self._shapes(message)
                buffers[message] = tuple(shape.empty(self._device) for shape in shapes)
                calls, flats = receives, [shape.flat(one) for shape, one in zip(shapes, buffers[message], strict=True)]
            calls += [point_to_point.Message(flat, 1 - link.place, self._tag(message)) for flat in flats]
        send_works, receive_works = point_to_point.exchange(sends, receives, link.members())
        self._sent += [(work, [each.tensor for each in sends]) for work in send_works]
        self._posted |= {message: (tensors, receive_works) for message, tensors in buffers.items()}

    def receive(self, message: PipelineMessage) -> tuple[Tensor, ...]:
        """Return the tensors of ``message`` when they have arrived, in the announced shapes.

        Raises:
            P2PTimeout: The message did not arrive within the time limit.
            RuntimeError: The sender has ended.
        """
        tensors, works = self._posted.pop(message)
        for work in works:
            self._wait(work)
        return tensors

    def wait_for_sends(self) -> None:
        """Wait until all sends are complete; raises as ``receive`` does."""
        for work, _ in self._sent:
            self._wait(work)
        self._sent.clear()

    def _wait(self, work: Transfer) -> None:
        if self._device.type == "cuda":
            # The stream waits, not the host; NCCL applies the group's own limit.
            work.wait()
            return
        begun_s = time.monotonic()
        try:
            work.wait(to_timedelta(self._wait_s))
        except RuntimeError as error:
            if time.monotonic() - begun_s < _TIMEOUT_FRACTION * self._wait_s:
                raise
            raise P2PTimeout(str(error)) from error

    def _forget_finished_sends(self) -> None:
        self._sent = [(work, tensors) for work, tensors in self._sent if not work.is_completed()]

    def _tag(self, message: PipelineMessage) -> int:
        """Return the number of the next tensor on its link; gloo matches messages by it, NCCL by order."""
        key = (message.source, message.target, message.is_forward)
        number = self._numbers[key] = self._numbers.get(key, -1) + 1
        return number % _TAG_COUNT


def _shifted(action: Action, micro_batches: int) -> Action:
    return Action(action.kind, action.chunk, action.micro_batch + micro_batches)


def _shifted_entry(entry: Action | Exchange, micro_batches: int) -> Action | Exchange:
    if isinstance(entry, Action):
        return _shifted(entry, micro_batches)
    messages = (message._replace(action=_shifted(message.action, micro_batches)) for message in entry.messages)
    return Exchange(entry.link, tuple(messages))
