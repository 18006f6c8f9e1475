"""Pipelines whose messages are staged, as those of ranks that share a GPU are, compute what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hpcbench.worker.distributed.point_to_point import stage_messages
from tests.distributed.cases import EXACT, Case, OfRank, case_id, check, run_parallel, run_reference
from tests.distributed.pool import Pool
from tests.distributed.test_pipedream import run_stack, small_stack, stack_case
from tests.distributed.test_pipeline import TIED, pipeline_case

pytestmark = pytest.mark.slow

SYNCHRONOUS = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


def run_staged(run: Callable[[Case, dist.ProcessGroup], OfRank], case: Case, group: dist.ProcessGroup) -> OfRank:
    """Return ``run(case, group)`` with staged messages."""
    stage_messages(True)
    try:
        return run(case, group)
    finally:
        stage_messages(False)


GPT: dict[str, Any] = {"model": "gpt", "dataset": "tokens", "input_size": 4, "precision": "fp64", "steps": 2}
CASES = [
    *(pipeline_case(schedule, 4, precision="fp64", steps=1) for schedule in SYNCHRONOUS),
    # The sums over replicas and between both copies have communicators of their own.
    pipeline_case("interleaved_1f1b", 2, replicas=2, micro_batches=2, batch_size=4, model_options=TIED, **GPT),
    # Running statistics are those of a stage's first replica, without the zeros that its chunk ran on before.
    pipeline_case("gpipe", 3, precision="fp64", steps=1,
                  options={"stage_replicas": "2-1", "recompute": "except_last"}),
    # Ranks of a stage run their chunk together before the links are opened.
    pipeline_case("zero_bubble", 2, tp_degree=2, tasks_per_node=4, model_options={"tied": True}, **GPT),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_staged_pipelines_equal_the_reference(pool: Pool, case: Case) -> None:
    check(pool.call(case.spec.ranks, run_staged, run_parallel, case), run_reference(case), EXACT)


@pytest.mark.parametrize("stages", [2, 4])
def test_staged_pipedream_equals_its_simulation(pool: Pool, stages: int) -> None:
    case = stack_case(stages)
    with mock.patch("tests.distributed.cases.build_model", small_stack):
        expected = run_reference(case)
    check(pool.call(case.spec.ranks, run_staged, run_stack, case), expected, EXACT)
