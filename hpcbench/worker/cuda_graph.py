"""A training step as one CUDA graph: captured once, then replayed by a single launch.

The first steps run eagerly on a side stream, where libraries choose algorithms, memory pools fill and DDP makes its
buckets; the next one is captured, which computes nothing, and replayed from then on with the step's samples copied into
the tensors that were captured::

    side stream     step 0 | step 1 | step 2 |
    current stream                           | capture | copy, replay | copy, replay | ...

Sources: torch's notes on CUDA semantics, sections "Whole-network capture" and "Usage with DistributedDataParallel".
It was never executed on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.parallel.catalog import get_strategy

StepFunction = Callable[[Tensor, Tensor], Tensor]
"""Forward, backward and update on inputs and targets, returns the loss."""


@cache
def _graph_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def graph_stream_context(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a wrapper is made whose backward pass will be captured: on the capturing stream.

    Raises ``WorkerError`` (``unsupported``) on a device without graphs.
    """
    if device.type != "cuda":
        raise unsupported(f"cuda_graph needs a cuda device; this run's is {device.type}", "set cuda_graph = false")
    return torch.cuda.stream(_graph_stream())


def graphed_step(compute: StepFunction, spec: RunSpec) -> StepFunction:
    """Return ``compute`` as a graph."""
    eager_steps = get_strategy(spec.strategy).eager_steps_before_graph
    assert eager_steps is not None, "planning excludes strategies without graphs"
    return GraphedStep(compute, eager_steps)


class GraphedStep:
    """Calls ``compute`` for ``eager_steps`` steps, then replays what it did for tensors of the same shapes."""

    def __init__(self, compute: StepFunction, eager_steps: int) -> None:
        self._compute = compute
        self._eager_steps = eager_steps
        self._side_stream = _graph_stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on ``inputs`` [n, *sample shape] and ``targets``; returns the loss."""
        if self._eager_steps > 0:
            self._eager_steps -= 1
            return self._run_aside(inputs, targets)
        if self._graph is None:
            self._capture(inputs, targets)
        self._inputs.copy_(inputs, non_blocking=True)
        self._targets.copy_(targets, non_blocking=True)
        assert self._graph is not None, "captured above"
        self._graph.replay()
        # The next replay writes into the same memory.
        return self._loss.clone()

    def _run_aside(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            loss = self._compute(inputs, targets)
        torch.cuda.current_stream().wait_stream(self._side_stream)
        return loss

    def _capture(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs.clone(), targets.clone()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
        with torch.cuda.graph(graph, stream=self._side_stream, capture_error_mode="thread_local"):
            self._loss = self._compute(self._inputs, self._targets)
        self._graph = graph
