"""Trainings with ``compile = true``, on ranks of a pool."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from hpcbench.worker import strategy as base
from hpcbench.worker.model_execution import compile_in_place
from tests.distributed.cases import Case, OfRank, run_parallel


class CompiledRun(NamedTuple):
    """What a rank trained, and how the compiler cut its model."""

    trained: OfRank
    graphs: int
    breaks: dict[str, int]
    """Reasons why a graph ended, with their number."""


def run_traced(case: Case, group: dist.ProcessGroup | None) -> CompiledRun:
    """Train through all of torch.compile but the C++ compiler."""
    torch._dynamo.reset()
    counters.clear()
    compiling = partial(compile_in_place, backend="aot_eager")
    with mock.patch.object(base, "compile_in_place", compiling):
        trained = run_parallel(case, group)
    return CompiledRun(trained, int(counters["stats"]["unique_graphs"]), dict(counters["graph_break"]))
