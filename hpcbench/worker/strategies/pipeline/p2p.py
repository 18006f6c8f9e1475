"""Point-to-point transports of activations and gradients between pipeline ranks.

One posts receives ahead, for a cpu. The other starts every exchange at a fixed place of both ranks, for cuda: a receive
that NCCL has posted occupies its stream until the message arrives, and the first launch of a kernel may wait for it.
``parallel.pipeline.exchange_order`` shows why ranks do not hang in this order."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hpcbench.parallel.pipeline.exchange_order import Exchange, RankProgram, exchange_order
from hpcbench.parallel.pipeline.schedules import Action, PipelineLayout, PipelineMessage
from hpcbench.worker.distributed import point_to_point
from hpcbench.worker.distributed.point_to_point import Transfer
from hpcbench.worker.distributed.process_groups import RankContext, RankGroup, make_group_of_ranks, to_timedelta
from hpcbench.worker.strategies.pipeline.chunk import TensorMeta

PREFETCHED_RECEIVES = 2
"""Receives that are posted ahead on every link: messages arrive while this rank computes."""

_TAG_COUNT = 2**15
_TIMEOUT_FRACTION = 0.95
"""A wait that fails after this part of the time limit has run into it."""

MessageShapes = Callable[[PipelineMessage], Sequence[TensorMeta]]
"""Returns the form of the tensors of a message."""


class P2PTimeout(RuntimeError):
    """A message was not sent, or not received, within the time limit."""


class P2PGroups(NamedTuple):
    """A process group for each direction, so that on NCCL every communicator between two ranks carries one direction.

    NCCL executes the calls of a communicator in the order in which both sides make them: if activations and gradients
    shared one, two neighbours that both send first would wait for each other. With two stages of several chunks, the
    connection from the last rank to the first joins the same two ranks and gets groups of its own::

        down         0 -> 1 -> 2 -> 3     activations        around_down   3 -> 0   next chunk
        up           0 <- 1 <- 2 <- 3     gradients          around_up     3 <- 0
    """

    down: RankGroup
    up: RankGroup
    around_down: RankGroup
    around_up: RankGroup

    def of(self, message: PipelineMessage) -> RankGroup:
        """Return the group that carries ``message``."""
        if message.is_forward:
            return self.down if message.source < message.target else self.around_down
        return self.up if message.source > message.target else self.around_up


def make_p2p_groups(group: RankGroup, layout: PipelineLayout, another: Callable[[str], RankGroup]) -> P2PGroups:
    """Create the groups of a pipeline; ``another(purpose)`` creates a further group of the same ranks.

    ``group`` itself carries nothing else while a schedule is executed.
    """
    if group.size == 1:
        return P2PGroups(group, group, group, group)
    up = another("up")
    if layout.virtual_stages == 1 or group.size > 2:
        return P2PGroups(group, up, group, up)
    return P2PGroups(group, up, another("around_down"), another("around_up"))


def warm_up_links(groups: P2PGroups, links: Iterable[PipelineMessage], rank: int, device: torch.device) -> None:
    """Send one number over every link of the schedule; called by all ranks with the same ``links``.

    NCCL creates the communicator of two ranks with their first message, and both block until the other one calls.
    Receives that are posted ahead would wait there in a ring; one link after another, in one order, cannot.
    """
    for link in {(link.source, link.target, link.is_forward): link for link in links}.values():
        number = torch.zeros(1, device=device)
        if rank == link.source:
            point_to_point.send(number, groups.of(link).members(), link.target)
        elif rank == link.target:
            point_to_point.receive(number, groups.of(link).members(), link.source)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MessageTransport(ABC):
    """Asynchronous sends and receives; a buffer lives until its transfer is complete.

    Only ``receive`` and ``wait_for_sends`` block, on cuda the stream and not the host.
    """

    def __init__(self, device: torch.device, wait_s: float) -> None:
        self._wait_s = wait_s
        self._device = device
        self._posted: dict[PipelineMessage, tuple[tuple[Tensor, ...], list[Transfer]]] = {}
        """Messages whose receives were started: their buffers and transfers."""
        self._numbers: dict[tuple[int, int, bool], int] = {}
        self._sent: list[tuple[Transfer, Sequence[Tensor]]] = []
        self._shapes: MessageShapes = lambda _: ()

    def order(
        self, ranks: Sequence[Sequence[Action]], layout: PipelineLayout, rank: int
    ) -> Sequence[Action | Exchange]:
        """Return the actions of ``rank`` in a step, with the exchanges that the runtime has to start between them.

        By default there are none: no transfer has a fixed place.

        Args:
            ranks: The actions of every rank of the pipeline.
            layout: The pipeline's stages and chunks.
            rank: This rank of the pipeline.
        """
        del layout
        return ranks[rank]

    @abstractmethod
    def post_receives(self, messages: Iterable[PipelineMessage], shapes: MessageShapes) -> None:
        """Announce the messages of a step, each sender's in its order.

        Args:
            messages: Messages to this rank.
            shapes: Function of a message that returns the forms of its tensors.
        """

    @abstractmethod
    def send(self, message: PipelineMessage, tensors: Sequence[Tensor]) -> None:
        """Send ``tensors`` without waiting; they must not change any more.

        Their shapes are those that the receiver expects of ``message`` (``post_receives``): [n, ...] each.
        """

    def exchange(self, exchange: Exchange) -> None:
        """Start the transfers of an exchange in ``order``."""
        raise AssertionError(f"{exchange}: no transfer has a fixed place")

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

    def _flat_tensors(self, message: PipelineMessage, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return ``tensors`` in the memory order of the message's shapes."""
        flats = []
        for shape, tensor in zip(self._shapes(message), tensors, strict=True):
            assert tuple(tensor.shape) == shape.sizes, f"{message}: {tuple(tensor.shape)}, not {shape.sizes}"
            flats.append(shape.flat(tensor))
        return flats

    def _make_buffers(self, message: PipelineMessage) -> list[Tensor]:
        """Return flat buffers for the tensors of ``message``, which is posted without works so far."""
        shapes = self._shapes(message)
        tensors = tuple(shape.empty(self._device) for shape in shapes)
        self._posted[message] = tensors, []
        return [shape.flat(tensor) for shape, tensor in zip(shapes, tensors, strict=True)]

    def _forget_finished_sends(self) -> None:
        self._sent = [(work, tensors) for work, tensors in self._sent if not work.is_completed()]

    def _tag(self, message: PipelineMessage) -> int:
        """Return the number of the next tensor on its link; gloo matches messages by it, NCCL by order."""
        key = (message.source, message.target, message.is_forward)
        number = self._numbers[key] = self._numbers.get(key, -1) + 1
        return number % _TAG_COUNT


class P2PTransport(MessageTransport):
    """Every message is sent at once, and ``PREFETCHED_RECEIVES`` of every link are posted before they are needed.

    For a cpu: there a posted receive blocks nothing.
    """

    def __init__(self, groups: P2PGroups, device: torch.device, wait_s: float) -> None:
        super().__init__(device, wait_s)
        self._groups = groups
        self._awaited: dict[tuple[int, bool], deque[PipelineMessage]] = {}
        """Messages whose receives are not posted, by link (sender and direction), in the sender's order."""

    def post_receives(self, messages: Iterable[PipelineMessage], shapes: MessageShapes) -> None:
        """Announce the messages of a step, each sender's in its order, and post the first receives of every link."""
        assert not any([self._posted, *self._awaited.values()]), "messages that were not received"
        self._shapes, self._awaited = shapes, {}
        for message in messages:
            self._awaited.setdefault((message.source, message.is_forward), deque()).append(message)
        for link in self._awaited.values():
            self._post(link, PREFETCHED_RECEIVES)

    def send(self, message: PipelineMessage, tensors: Sequence[Tensor]) -> None:
        group = self._groups.of(message)
        self._forget_finished_sends()
        for flat in self._flat_tensors(message, tensors):
            sent = point_to_point.Message(flat, message.target, self._tag(message))
            self._sent.append((point_to_point.isend(sent, group.members()), [flat]))

    def receive(self, message: PipelineMessage) -> tuple[Tensor, ...]:
        link = self._awaited[message.source, message.is_forward]
        while message not in self._posted:
            self._post(link, 1)
        self._post(link, 1)
        return super().receive(message)

    def _post(self, link: deque[PipelineMessage], count: int) -> None:
        for _ in range(min(count, len(link))):
            message = link.popleft()
            group = self._groups.of(message)
            for flat in self._make_buffers(message):
                awaited = point_to_point.Message(flat, message.source, self._tag(message))
                self._posted[message][1].append(point_to_point.ireceive(awaited, group.members()))


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
        link = self._links[exchange.link]

        def on_link(message: PipelineMessage, flats: Iterable[Tensor]) -> list[point_to_point.Message]:
            return [point_to_point.Message(flat, 1 - link.place, self._tag(message)) for flat in flats]

        sends = [each for message in outgoing for each in on_link(message, self._outgoing.pop(message))]
        receives: list[point_to_point.Message] = []
        for message in exchange.messages:
            if message not in outgoing:
                receives += on_link(message, self._make_buffers(message))
        send_works, receive_works = point_to_point.exchange(sends, receives, link.members())
        tensors_sent = [each.tensor for each in sends]
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
