"""Runs that a step as a CUDA graph excludes; ``tests/cuda/test_cuda_graph.py`` captures and replays one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcbench.config.run_spec import RunSpec, run_id
from hpcbench.errors import WorkerError
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.data.train import SingleStrategy
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")


def test_a_cpu_has_no_graphs() -> None:
    spec = make_spec(cuda_graph=True)
    with pytest.raises(WorkerError, match="cuda_graph needs a cuda device; this run's is cpu"):
        SingleStrategy().setup(build_model(spec), spec, RankContext(0, 1, CPU))


STATIC = {
    "model": "resnet18", "dataset": "digits", "strategy": "ddp", "batch_size": 8, "drop_last": True, "cuda_graph": True,
    "profile_steps": 0, "warmup_steps": 12, "tasks_per_node": 2,
}  # fmt: skip


def test_a_static_run_with_a_cuda_graph_is_feasible() -> None:
    spec = resolve_point(STATIC, PartitionLimits("gpus"))
    assert isinstance(spec, RunSpec)
    assert spec.cuda_graph


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"drop_last": False}, "drop_last = false"),
        ({"precision": "fp16"}, "its loss scaling reads from the device"),
        ({"compile": True}, "graphs of its own"),
        ({"activation_checkpointing": True}, "the state of random numbers"),
        ({"options": {"compression": "powersgd"}}, "its hooks are not captured"),
        ({"profile_steps": 3}, "profile_steps 3: a graph has no phases, 0 is right"),
        ({"warmup_steps": 11}, "warmup_steps 11: 11 run before the capture, 12 or more is right"),
    ],
)
def test_an_infeasible_graph_names_its_reason(values: dict[str, Any], text: str) -> None:
    point = resolve_point(STATIC | values, PartitionLimits("gpus"))
    assert isinstance(point, InfeasiblePoint)
    assert text in point.reason


def test_a_cpu_profile_has_no_graphs() -> None:
    point = resolve_point(STATIC, PartitionLimits("cpus", is_cpu=True))
    assert isinstance(point, InfeasiblePoint)
    assert point.reason == "cuda_graph needs a cuda device, and the profile's is cpu"


@pytest.mark.parametrize("key", [key for key in STRATEGIES if key not in ("single", "ddp")])
def test_other_strategies_have_no_static_step(key: str) -> None:
    model = "vit" if key == "tensor" else "resnet18"
    point = resolve_point({**STATIC, "strategy": key, "model": model}, PartitionLimits("gpus"))
    assert isinstance(point, InfeasiblePoint)
    assert f"the step of {key} is not static" in point.reason


def test_the_default_changes_no_run_id() -> None:
    assert run_id(make_spec(cuda_graph=False)) == run_id(make_spec())
    assert run_id(make_spec(cuda_graph=True)) != run_id(make_spec())
