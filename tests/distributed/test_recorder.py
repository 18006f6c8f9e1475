"""The recorder sees every way of talking that strategies use, and what it has seen becomes a run's traffic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce as all_reduce_with_gradient

from hpcbench.strategies.traffic import Traffic, merge_calls
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.measure.traffic_recorder import TrafficRecorder, run_recorded_step
from hpcbench.worker.shutdown import StopController, Stopped
from tests.distributed.cases import CPU
from tests.distributed.pool import Pool
from tests.worker.helpers import make_spec

pytestmark = pytest.mark.slow


def passed(operation: str, payload_bytes: int, group_size: int = 4, count: int = 1) -> Traffic:
    return Traffic(operation=operation, group_size=group_size, payload_bytes=payload_bytes, count=count)


def talk(group: dist.ProcessGroup) -> list[Traffic]:
    """Each operation once, with buffers of as many numbers as the comments say."""
    rank, recorder = dist.get_rank(group), TrafficRecorder()
    halves = torch.zeros(6, dtype=torch.bfloat16)
    with recorder:
        dist.all_reduce(torch.zeros(3), group=group)
        dist.broadcast(halves, 0, group=group)
        dist.reduce(torch.zeros(5, dtype=torch.float64), 1, group=group)
        dist.all_gather([torch.zeros(2) for _ in range(4)], torch.zeros(2), group=group)
        dist.all_gather_into_tensor(torch.zeros(28), torch.zeros(7), group=group)
        dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(8), group=group)
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4), group=group)
        dist.send(torch.zeros(9), (rank + 1) % 4) if rank % 2 else dist.recv(torch.zeros(9), (rank - 1) % 4)
        dist.barrier(group=group)
    return recorder.calls


def test_the_recorder_counts_every_collective_with_its_group(pool: Pool) -> None:
    alike = [
        passed("all_reduce", 12),
        passed("broadcast", 12),
        passed("reduce", 40),
        passed("all_gather", 8),
        passed("all_gather", 28),
        passed("reduce_scatter", 32),
        passed("all_to_all", 16),
    ]
    for rank, calls in enumerate(pool.call(4, talk)):
        # What is received from a single other is the sender's.
        assert calls == [*alike, *([passed("send", 36, 2)] if rank % 2 else [])]


def talk_functionally(group: dist.ProcessGroup) -> list[Traffic]:
    """Communicate as DTensor and autograd do; the backward pass communicates too."""
    recorder, leaf = TrafficRecorder(), torch.ones(3, requires_grad=True)
    with recorder:
        functional.all_reduce(torch.zeros(2), "sum", group).sum()
        functional.all_gather_tensor(torch.zeros(3), 0, group).sum()
        functional.reduce_scatter_tensor(torch.zeros(4), "sum", 0, group).sum()
        all_reduce_with_gradient(leaf, group=group).sum().backward()  # type: ignore[no-untyped-call]
    return recorder.merged()


def test_functional_operators_and_those_of_a_backward_pass(pool: Pool) -> None:
    for calls in pool.call(2, talk_functionally):
        assert calls == merge_calls(
            [
                passed("all_reduce", 8, 2),
                passed("all_gather", 12, 2),
                passed("reduce_scatter", 16, 2),
                passed("all_reduce", 12, 2),
                passed("all_reduce", 12, 2),
            ]
        )


class Counted:
    """A strategy that says which steps it was asked for, and passes nothing."""

    replica = 0
    module: nn.Module = nn.Identity()
    forward_is_collective = False
    traffic_is_recorded = True

    def __init__(self) -> None:
        self.steps: list[int] = []

    def step(self, feed: Any, step: int) -> Tensor:
        self.steps.append(step)
        return torch.zeros(())


@pytest.mark.parametrize(
    ("more", "seen", "told", "steps"),
    [
        ({}, True, False, [6]),
        ({"profile_steps": 0}, True, False, []),
        ({"compile": True}, True, False, []),
        ({"tasks_per_node": 1, "dp_degree": 1}, True, False, []),
        ({}, False, False, []),
        ({}, True, True, []),
    ],
)
def test_the_recorded_step_is_the_warm_up_step_or_an_extra_one(
    more: dict[str, Any], seen: bool, told: bool, steps: list[int]
) -> None:
    spec = make_spec(**{"strategy": "ddp", "tasks_per_node": 2, "dp_degree": 2, "profile_steps": 3, **more})
    strategy: Any = Counted()
    strategy.traffic_is_recorded = seen
    stop = StopController()
    stop.reason = Stopped("timeout", "told") if told else None
    warnings: list[str] = []
    assert run_recorded_step(strategy, make_feed(spec, CPU), spec, CPU, stop, bool, 6, warnings) == []
    assert warnings == []
    assert strategy.steps == steps
