"""A step as a CUDA graph on the stub: torch's own capture runs, and the host waits for nothing within it."""

from __future__ import annotations

import pytest
import torch

from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.worker.model_execution import GraphedStep
from hpcbench.worker.strategy import DataParallelStrategy
from tests.cuda.cases import gpu_run
from tests.cuda.fake_gpu import rank_on_gpu
from tests.cuda.stub import count_calls

CALLS = ("cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphLaunch")
WITH_GRAPH = [key for key, entry in STRATEGIES.items() if entry.eager_steps_before_graph is not None]
EAGER_STEPS = 3


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
@pytest.mark.parametrize("key", WITH_GRAPH)
def test_a_step_is_captured_once_and_replayed(key: str, kind: str) -> None:
    with rank_on_gpu(gpu_run(key, kind, 8, cuda_graph=True), 0) as (strategy, feed, recorder):
        assert isinstance(strategy, DataParallelStrategy)
        # Dry runs have no graphs: what the run itself has is set here.
        for group in strategy.optimizer.param_groups:
            group["capturable"] = True
        strategy._graphed = GraphedStep(strategy._train_static, EAGER_STEPS)
        before = count_calls(CALLS)
        operators = []
        for step in range(EAGER_STEPS + 2):
            recorder.begin_step()
            loss = strategy.step(feed, step)
            assert list(recorder.host_sync_sites) == []
            operators.append(recorder.operators)
        after = count_calls(CALLS)
        assert loss.device == recorder.device
    assert {name: after[name] - before[name] for name in CALLS} == dict(zip(CALLS, (1, 1, 2), strict=True))
    # A replay copies its samples and returns a copy of the loss: the host launches no other operator.
    assert operators[-1] == 3
    assert min(operators[:-1]) > 3


def test_the_stub_captures_one_stream() -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    assert not torch.cuda.is_current_stream_capturing()
    with torch.cuda.graph(graph, stream=stream):
        assert torch.cuda.is_current_stream_capturing()
    assert not torch.cuda.is_current_stream_capturing()
    graph.replay()
