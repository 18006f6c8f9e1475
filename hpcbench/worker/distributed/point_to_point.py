"""Point-to-point messages between the ranks of a group, staged through the host where ranks share a GPU.

NCCL refuses two ranks on one GPU. gloo takes a GPU's tensors in collectives, but sends and receives only those of the
host. So a staged message has a copy at each end::

    sender      tensor on the device --copy--> pinned memory --gloo-->
    receiver    --gloo--> pinned memory --copy, when ``wait`` is called--> tensor on the device

The host waits for the device before a staged message leaves: staged messages are right, and their times mean nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_are_staged = False


class Transfer(Protocol):
    """A message that was started; the methods are those of ``dist.Work``."""

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return at once."""

    def wait(self, timeout: datetime.timedelta = ...) -> bool:
        """Wait until the buffer may be used; raises ``RuntimeError`` if the other rank has ended or time is up."""


class Message(NamedTuple):
    """A tensor and the place of the other rank in the group; gloo matches messages by ``tag``, NCCL by their order."""

    tensor: Tensor
    peer: int
    tag: int = 0


def stage_messages(are_staged: bool) -> None:
    """Choose whether this process stages its messages from now on; all ranks of a run choose the same."""
    global _are_staged  # noqa: PLW0603 - a property of the process, like its default process group
    _are_staged = are_staged


def send(tensor: Tensor, group: dist.ProcessGroup, peer: int) -> None:
    """Send a contiguous tensor to the rank at place ``peer`` of ``group``, and wait until it may change."""
    isend(Message(tensor, peer), group).wait()


def receive(tensor: Tensor, group: dist.ProcessGroup, peer: int) -> None:
    """Receive a contiguous tensor from the rank at place ``peer`` of ``group``, and wait for it."""
    ireceive(Message(tensor, peer), group).wait()


def isend(message: Message, group: dist.ProcessGroup) -> Transfer:
    """Start to send ``message``; its tensor must not change until the transfer is complete."""
    tensor = message.tensor
    if _are_staged:
        tensor = _host_buffer(tensor)
        # Returns once the device has computed and copied the tensor.
        tensor.copy_(message.tensor)
    work = dist.isend(tensor, group=group, group_dst=message.peer, tag=message.tag)
    assert work is not None, "a send of a rank outside its group"
    return work


def ireceive(message: Message, group: dist.ProcessGroup) -> Transfer:
    """Start to receive ``message`` into its tensor."""
    tensor = _host_buffer(message.tensor) if _are_staged else message.tensor
    work = dist.irecv(tensor, group=group, group_src=message.peer, tag=message.tag)
    assert work is not None, "a receive of a rank outside its group"
    return _StagedReceive(work, tensor, message.tensor) if _are_staged else work


def exchange(
    sends: Sequence[Message], receives: Sequence[Message], group: dist.ProcessGroup
) -> tuple[list[Transfer], list[Transfer]]:
    """Start to send and receive several messages together; returns the transfers of both.

    On NCCL one call launches all of them, and one transfer stands for all.
    """
    if _are_staged:
        return [isend(message, group) for message in sends], [ireceive(message, group) for message in receives]
    calls = [
        dist.P2POp(function, message.tensor, group=group, tag=message.tag, group_peer=message.peer)
        for function, messages in ((dist.isend, sends), (dist.irecv, receives))
        for message in messages
    ]
    works: list[Transfer] = [*dist.batch_isend_irecv(calls)] if calls else []
    if len(works) == len(calls):
        return works[: len(sends)], works[len(sends) :]
    return works if sends else [], works if receives else []


class _StagedReceive:
    """A receive into host memory that ``wait`` copies to the device, once."""

    def __init__(self, work: dist.Work, buffer: Tensor, target: Tensor) -> None:
        self._work, self._buffer, self._target = work, buffer, target
        self._is_copied = False

    def is_completed(self) -> bool:
        return self._is_copied or self._work.is_completed()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self._is_copied:
            self._work.wait(*([] if timeout is None else [timeout]))
            self._target.copy_(self._buffer, non_blocking=True)
            self._is_copied = True
        return True


def _host_buffer(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
