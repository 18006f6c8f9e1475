"""A step as a CUDA graph, with a stand-in for ``torch.cuda`` that records a capture's operators and repeats them.

Like CUDA it refuses an operator that reads from the device within a capture, and a capture changes no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcbench.config.run_spec import RunSpec, run_id
from hpcbench.errors import WorkerError
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.data.train import SingleStrategy
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.worker import model_execution
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_execution import GraphedStep
from hpcbench.worker.models.build import build_model
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")
EAGER_STEPS = 3


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators, and restores what they wrote into tensors that were there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = kwargs or {}
        assert "local_scalar" not in func.__name__, "operation not permitted when stream is capturing"
        for position, argument in enumerate(func._schema.arguments):
            # The schema of BatchNorm's kernel does not say that it writes.
            is_statistic = "batch_norm" in func.__name__ and argument.name.startswith("running_")
            if is_statistic or (argument.alias_info is not None and argument.alias_info.is_write):
                written = args[position] if position < len(args) else more.get(argument.name)
                self._before += [(one, one.clone()) for one in tree_leaves(written) if isinstance(one, Tensor)]
        out = func(*args, **more)
        self.calls.append((func, args, more, out))
        return out

    def undo(self) -> None:
        for tensor, value in reversed(self._before):
            tensor.copy_(value)


class FakeGraph:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    @torch.no_grad()
    def replay(self) -> None:
        self.log.append("replay")
        for func, args, kwargs, kept in self.calls:
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(kept), strict=True):
                if isinstance(old, Tensor) and new is not old:
                    old.copy_(new)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The order of calls of ``torch.cuda``."""
    calls = list[str]()
    current = FakeStream("current", calls)

    @contextmanager
    def stream(chosen: FakeStream) -> Iterator[None]:
        calls.append(f"enter {chosen.name}")
        yield
        calls.append(f"leave {chosen.name}")

    @contextmanager
    def graph(captured: FakeGraph, *, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        calls.append(f"capture on {stream.name}, {capture_error_mode}")
        with Capture() as recorded:
            yield
        with torch.no_grad():
            recorded.undo()
        captured.calls = recorded.calls

    monkeypatch.setattr(torch.cuda, "Stream", lambda: FakeStream("side", calls))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(calls))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    model_execution._graph_stream.cache_clear()
    yield calls
    model_execution._graph_stream.cache_clear()


def trained(spec: RunSpec, steps: int, *, graphed: bool) -> tuple[list[float], dict[str, Tensor]]:
    strategy, feed = SingleStrategy(), make_feed(spec, CPU)
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    if graphed:
        strategy._graphed = GraphedStep(strategy._train_static, EAGER_STEPS)
    losses = [strategy.step(feed, step) for step in range(steps)]
    state = {**strategy.weights(), **{f"gradient of {name}": value for name, value in strategy.gradients().items()}}
    return [loss.item() for loss in losses], {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize(
    "values",
    [
        {"model": "resnet18", "micro_batches": 2},
        {"model": "vit", "optimizer": "adamw"},
        {"model": "vit", "precision": "bf16_params"},
        {"model": "vit", "precision": "bf16", "micro_batches": 2},
    ],
)
def test_replays_train_as_eager_steps_do(
    log: list[str], values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replay reads its own samples, and nothing of a step happens on the host alone."""
    # On cuda Adam is fused; as torch writes it for a cpu it reads the number of the step.
    monkeypatch.setattr("hpcbench.worker.strategy.is_host", lambda _device: False)
    steps = EAGER_STEPS + 3
    spec = make_spec(**values, drop_last=True)
    eager_losses, eager = trained(spec, steps, graphed=False)
    assert not log
    losses, state = trained(spec, steps, graphed=True)
    assert losses == eager_losses
    assert len(set(losses)) == steps
    assert state.keys() == eager.keys()
    assert all(torch.equal(state[name], eager[name]) for name in eager)
    eager_step = ["side waits for current", "enter side", "leave side", "current waits for side"]
    assert log == [*(eager_step * EAGER_STEPS), "capture on side, thread_local", "replay", "replay", "replay"]


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
