"""Messages that pass through host memory, as those of ranks that share a GPU do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.worker.distributed.point_to_point import Message, exchange, isend, receive, send, stage_messages
from tests.distributed.cases import EXACT, Case, OfRank, check, run_parallel, run_reference
from tests.distributed.pool import Pool
from tests.distributed.test_registry import training
from tests.parity_cases import ParityCase, parity_cases

SENDING = [
    pytest.param(key, case, id=f"{key}-{case.model}-{number}")
    for key, entry in STRATEGIES.items()
    if (entry.own_degree in ("pp_degree", "sp_degree")) and not entry.drives_several_devices
    for number, case in enumerate(parity_cases(key))
]


def run_staged(case: Case, group: dist.ProcessGroup) -> OfRank:
    """Train with staged messages."""
    stage_messages(True)
    try:
        return run_parallel(case, group)
    finally:
        stage_messages(False)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "parity"), SENDING)
def test_a_strategy_with_staged_messages_trains_what_its_reference_does(
    pool: Pool, key: str, parity: ParityCase
) -> None:
    case = training(key, parity, precision="fp64", steps=2, narrow=parity.model in ("vgg11", "resnet18"))
    check(pool.call(parity.ranks, run_staged, case), run_reference(case), EXACT)


def received_when_waited_for(group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange a tensor; return the received one before its wait, after it, and after a write and a second wait."""
    place = dist.get_rank(group)
    buffer, sent = torch.zeros(2), torch.full((2,), 1.0 + place)
    stage_messages(True)
    try:
        (sending,), (receiving,) = exchange([Message(sent, 1 - place)], [Message(buffer, 1 - place)], group)
        # The message has left: what is staged may change.
        sent.fill_(-1.0)
        dist.barrier(group=group)
        before = buffer.clone()
        for transfer in (sending, receiving):
            transfer.wait()
        after = buffer.clone()
        buffer.fill_(7.0)
        receiving.wait()
        return [before, after, buffer]
    finally:
        stage_messages(False)


def test_a_staged_message_arrives_with_the_first_wait_alone(pool: Pool) -> None:
    for place, (before, after, buffer) in enumerate(pool.call(2, received_when_waited_for)):
        assert before.tolist() == [0.0, 0.0]
        assert after.tolist() == [2.0 - place] * 2
        assert buffer.tolist() == [7.0, 7.0]


def received_by_tag(group: dist.ProcessGroup) -> list[float]:
    """Send two messages, and receive the second one first."""
    numbers = [torch.zeros(1), torch.zeros(1)]
    stage_messages(True)
    try:
        if dist.get_rank(group) == 0:
            works = [isend(Message(torch.tensor([float(tag)]), 1, tag), group) for tag in (1, 2)]
            for work in works:
                work.wait()
            send(torch.tensor([3.0]), group, 1)
            return []
        _, received = exchange(
            [], [Message(number, 0, tag) for number, tag in zip(numbers, (2, 1), strict=True)], group
        )
        for work in received:
            work.wait()
        last = torch.zeros(1)
        receive(last, group, 0)
        return [number.item() for number in (*numbers, last)]
    finally:
        stage_messages(False)


def test_staged_messages_are_matched_by_tag(pool: Pool) -> None:
    assert pool.call(2, received_by_tag)[1] == [2.0, 1.0, 3.0]
