"""Defects that are planted in a strategy, each of which the checks must find."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.strategy import DataParallelStrategy
from tests.cuda.cases import gpu_run
from tests.cuda.checks import memory_problems, step_problems
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
