"""Point-to-point transport of activations and gradients between pipeline ranks, with receives posted ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.parallel.pipeline.schedules import PipelineLayout, PipelineMessage
from hpcbench.worker.distributed.process_groups import RankGroup, to_timedelta
from hpcbench.worker.strategies.pipeline.chunk import TensorMeta

PREFETCHED_RECEIVES = 2
"""Receives that stand ready on every link: what arrives while this rank computes needs nobody to take it in."""

_TAG_COUNT = 2**15
_TIMEOUT_FRACTION = 0.95
"""Of the limit: a wait that fails so late has run into it."""

MessageShapes = Callable[[PipelineMessage], Sequence[TensorMeta]]
"""The tensors that a message consists of."""


class P2PTimeout(RuntimeError):
    """Nobody sent, or nobody took, within the limit."""


class P2PGroups(NamedTuple):
    """A process group for each direction, so that on NCCL every communicator between two ranks carries one alone.

    NCCL executes the calls of a communicator in the order in which both sides make them: were activations and
    gradients to share one, two neighbours that both send first would wait for each other. With two stages of several
    chunks, the way back from the last rank to the first joins the same two ranks: it gets groups of its own.
    """

    down: RankGroup
    up: RankGroup
    around_down: RankGroup
    around_up: RankGroup

    def of(self, message: PipelineMessage) -> RankGroup:
        """The group that carries ``message``."""
        return self.between(message.source, message.target, message.is_forward)

    def between(self, source: int, target: int, is_forward: bool) -> RankGroup:
        """The group that carries activations, or gradients, from one place of the pipeline to another."""
        if is_forward:
            return self.down if source < target else self.around_down
        return self.up if source > target else self.around_up


def make_p2p_groups(group: RankGroup, layout: PipelineLayout, another: Callable[[str], RankGroup]) -> P2PGroups:
    """The channels of the pipeline whose ranks ``group`` holds; ``another`` makes a group of the same ranks.

    The pipeline's own group carries nothing else while a schedule is executed.
    """
    if group.size == 1:
        return P2PGroups(group, group, group, group)
    up = another("up")
    if layout.virtual_stages == 1 or group.size > 2:
        return P2PGroups(group, up, group, up)
    return P2PGroups(group, up, another("around_down"), another("around_up"))


class _PostedReceive(NamedTuple):
    tensors: tuple[Tensor, ...]
    works: list[dist.Work]


class _ReceiveQueue:
    """What one rank sends to this one in one direction: receives are posted in the sender's order."""

    def __init__(self, messages: Iterable[PipelineMessage]) -> None:
        self.awaited = deque(messages)
        self.posted: dict[PipelineMessage, _PostedReceive] = {}


def warm_up_links(channels: P2PGroups, links: Iterable[PipelineMessage], place: int, device: torch.device) -> None:
    """Let one number pass on every link of the schedule, called by all ranks with the same ``links``.

    NCCL makes the communicator of two ranks with their first message, and both sit in the call until the other one
    comes. Receives that are posted ahead would wait there in a ring; one link after another, in one order, cannot.
    """
    for one in dict.fromkeys((link.source, link.target, link.is_forward) for link in links):
        source, target, _ = one
        if place not in (source, target):
            continue
        group = channels.between(*one).members()
        number = torch.zeros(1, device=device)
        if place == source:
            dist.send(number, group=group, group_dst=target)
        else:
            dist.recv(number, group=group, group_src=source)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class P2PTransport:
    """Sends at once, receives ahead of need; a buffer lives until its transfer is done. Never blocks but in ``take``
    and ``finish``."""

    def __init__(self, channels: P2PGroups, device: torch.device, wait_s: float) -> None:
        self._wait_s = wait_s
        self._channels = channels
        self._device = device
        self._links: dict[tuple[int, bool], _ReceiveQueue] = {}
        self._numbers: dict[tuple[int, int, bool], int] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._shapes: MessageShapes = lambda _: ()

    def expect(self, messages: Iterable[PipelineMessage], shapes: MessageShapes) -> None:
        """What others will send from now on, each sender's in its order."""
        assert all(not link.awaited and not link.posted for link in self._links.values()), "mail that nobody took"
        by_link: dict[tuple[int, bool], list[PipelineMessage]] = {}
        for one in messages:
            by_link.setdefault((one.source, one.is_forward), []).append(one)
        self._shapes = shapes
        self._links = {key: _ReceiveQueue(found) for key, found in by_link.items()}
        for link in self._links.values():
            self._post(link, PREFETCHED_RECEIVES)

    def send(self, message: PipelineMessage, tensors: Sequence[Tensor]) -> None:
        """Hand over ``tensors``, which must not change any more."""
        group = self._channels.of(message)
        self._sent = [one for one in self._sent if not one[0].is_completed()]
        for shape, tensor in zip(self._shapes(message), tensors, strict=True):
            assert tuple(tensor.shape) == shape.sizes, f"{message}: {tuple(tensor.shape)}, not {shape.sizes}"
            flat = shape.flat(tensor)
            work = dist.isend(flat, group=group.members(), group_dst=message.target, tag=self._tag(message))
            assert work is not None, "a send of a rank outside its group"
            self._sent.append((work, flat))

    def take(self, message: PipelineMessage) -> tuple[Tensor, ...]:
        """The tensors of ``message``, once they are there; raises what the transport raises."""
        link = self._links[message.source, message.is_forward]
        while message not in link.posted:
            self._post(link, 1)
        tensors, works = link.posted.pop(message)
        self._post(link, 1)
        for work in works:
            self._wait(work)
        return tensors

    def finish(self) -> None:
        """Wait until everything that was sent has gone."""
        for work, _ in self._sent:
            self._wait(work)
        self._sent.clear()

    def _wait(self, work: dist.Work) -> None:
        """On cuda the stream waits, not the host; NCCL has the group's own limit."""
        if self._device.type == "cuda":
            work.wait()
            return
        begun_s = time.monotonic()
        try:
            work.wait(to_timedelta(self._wait_s))
        except RuntimeError as error:
            if time.monotonic() - begun_s < _TIMEOUT_FRACTION * self._wait_s:
                raise
            raise P2PTimeout(str(error)) from error

    def _post(self, link: _ReceiveQueue, count: int) -> None:
        for _ in range(min(count, len(link.awaited))):
            message = link.awaited.popleft()
            group = self._channels.of(message)
            found = _PostedReceive(tuple(one.empty(self._device) for one in self._shapes(message)), [])
            for shape, tensor in zip(self._shapes(message), found.tensors, strict=True):
                flat = shape.flat(tensor)
                work = dist.irecv(flat, group=group.members(), group_src=message.source, tag=self._tag(message))
                assert work is not None, "a receive of a rank outside its group"
                found.works.append(work)
            link.posted[message] = found

    def _tag(self, message: PipelineMessage) -> int:
        """Numbers the tensors of a link; gloo matches by it, NCCL by order."""
        key = (message.source, message.target, message.is_forward)
        number = self._numbers[key] = self._numbers.get(key, -1) + 1
        return number % _TAG_COUNT
