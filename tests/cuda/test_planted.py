"""Defects that are planted in a strategy, each of which the checks must find."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.gradient_buckets import fill_buckets
from hpcbench.strategies.pipeline.exchange_order import Exchange
from hpcbench.strategies.pipeline.train.p2p import MessageTransport
from hpcbench.worker.distributed import gradient_reducer
from hpcbench.worker.strategy import DataParallelStrategy
from tests.cuda.cases import gpu_run, ranks_to_step
from tests.cuda.checks import memory_problems, order_problems, step_problems
from tests.cuda.fake_gpu import step_on_gpu

Defect = Callable[[DataParallelStrategy, Tensor], object]


def plant_in_update(monkeypatch: pytest.MonkeyPatch, defect: Defect) -> None:
    """Let ``defect`` be called with the strategy and a parameter before every update."""
    update = DataParallelStrategy.update

    def defective(self: DataParallelStrategy) -> None:
        defect(self, next(self.module.parameters()))
        update(self)

    monkeypatch.setattr(DataParallelStrategy, "update", defective)


def problems_of(spec: RunSpec, rank: int = 0) -> list[str]:
    steps = step_on_gpu(spec, rank)
    return step_problems(spec, rank, steps) + memory_problems(spec, rank, steps)


def other_gpu(self: DataParallelStrategy, parameter: Tensor) -> Tensor:
    return torch.ones(4, device=torch.device("cuda", 7))


DEFECTS: dict[str, tuple[Defect, str]] = {
    "item": (lambda _, parameter: parameter.detach().sum().item(), "reads a value"),
    "copy to the host": (lambda _, parameter: parameter.detach().cpu(), "copied to the host"),
    "values of the host": (lambda _, parameter: parameter.new_tensor([1.0]), "copies values from the host"),
    "other device": (other_gpu, "on cuda:7, not on cuda:0"),
    "synchronize": (lambda *_: torch.cuda.synchronize(), "cudaDeviceSynchronize"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_wait_or_stray_tensor_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    defect, message = DEFECTS[name]
    plant_in_update(monkeypatch, defect)
    problems = [problem for problem in problems_of(gpu_run("single", "transformer", 1)) if message in problem]
    assert len(problems) == 1
    if name != "synchronize":
        # Operators are named with their line.
        assert "tests/cuda/test_planted.py:" in problems[0]


def test_a_planted_second_copy_of_the_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = DataParallelStrategy.setup

    def with_copy(self: Any, model: nn.Sequential, spec: RunSpec, context: Any) -> None:
        setup(self, model, spec, context)
        self.spare = copy.deepcopy([parameter.detach() for parameter in self.module.parameters()])

    spec = gpu_run("ddp", "transformer", 8)
    assert problems_of(spec) == []
    monkeypatch.setattr(DataParallelStrategy, "setup", with_copy)
    problems = problems_of(spec)
    assert len(problems) == 1
    assert "of the oracle's" in problems[0]


def order_found(spec: RunSpec, ranks: Sequence[int]) -> list[str]:
    return order_problems(spec, {rank: step_on_gpu(spec, rank) for rank in ranks})


@pytest.mark.parametrize("swapping", [{1}, {1, 5}], ids=["one rank", "all ranks"])
def test_swapped_gradient_buckets_are_found_on_one_or_all_ranks(
    monkeypatch: pytest.MonkeyPatch, swapping: set[int]
) -> None:
    """One replica differs from the other one, or both from what the oracle prices."""
    spec = gpu_run("filter", "cnn", 8)

    def swapped(sizes: list[int], cap_bytes: int) -> list[list[int]]:
        buckets: list[list[int]] = fill_buckets(sizes, cap_bytes)
        swaps = dist.get_rank() in swapping and len(buckets) > 1
        return [*buckets[:-2], buckets[-1], buckets[-2]] if swaps else buckets

    assert order_found(spec, (1, 5)) == []
    monkeypatch.setattr(gradient_reducer, "fill_buckets", swapped)
    problems = order_found(spec, (1, 5))
    assert any("on rank 1" in problem for problem in problems) == (swapping == {1})
    assert any("the oracle prices" in problem for problem in problems)


def test_swapped_pipeline_exchanges_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exchanges of one link or of two, without an action between: no action is disturbed, but the other rank waits elsewhere."""
    spec, order = gpu_run("1f1b", "transformer", 8), MessageTransport.begin_step

    def swapped(self: MessageTransport, ranks: Any, layout: Any, rank: int, shapes: Any) -> Any:
        program = list(order(self, ranks, layout, rank, shapes))
        pairs = [
            number
            for number in range(len(program) - 1)
            if isinstance(program[number], Exchange) and isinstance(program[number + 1], Exchange)
        ]
        if rank == 1:
            first = pairs[0]
            program[first : first + 2] = program[first : first + 2][::-1]
        return program

    assert order_found(spec, ranks_to_step(spec)) == []
    monkeypatch.setattr(MessageTransport, "begin_step", swapped)
    problems = order_found(spec, ranks_to_step(spec))
    assert len(problems) == 1
    assert "rank 1 exchanges" in problems[0]
