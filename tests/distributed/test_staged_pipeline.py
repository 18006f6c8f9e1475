"""Pipelines whose messages are staged, as those of ranks that share a GPU are, compute what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hpcbench.worker.distributed.point_to_point import stage_messages
from tests.distributed.cases import EXACT, Case, OfRank, check, run_parallel, run_reference
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


def check_staged(pool: Pool, case: Case) -> None:
    check(pool.call(case.spec.ranks, run_staged, run_parallel, case), run_reference(case), EXACT)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_staged_pipelines_of_two_stages_equal_the_reference(pool: Pool, schedule: str) -> None:
    check_staged(pool, pipeline_case(schedule, 2, precision="fp64", steps=2, narrow=True))


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_staged_pipelines_of_four_stages_equal_the_reference(pool: Pool, schedule: str) -> None:
    check_staged(pool, pipeline_case(schedule, 4, precision="fp64", steps=1, narrow=True))


@pytest.mark.parametrize("stages", [2, 4])
def test_staged_pipedream_equals_its_simulation(pool: Pool, stages: int) -> None:
    case = stack_case(stages)
    with mock.patch("tests.distributed.cases.build_model", small_stack):
        expected = run_reference(case)
    check(pool.call(case.spec.ranks, run_staged, run_stack, case), expected, EXACT)


def test_staged_pipelines_with_tied_weights_equal_the_reference(pool: Pool) -> None:
    """The sums over replicas and between both copies have communicators of their own."""
    more: dict[str, Any] = {"input_size": 4, "model_options": TIED, "precision": "fp64", "batch_size": 4}
    check_staged(pool, pipeline_case("interleaved_1f1b", 2, "gpt", "tokens", 2, micro_batches=2, steps=2, **more))


def test_staged_uneven_replicas_with_recomputation_equal_the_reference(pool: Pool) -> None:
    """Running statistics are those of a stage's first replica, without the zeros that its chunk ran on before."""
    options = {"stage_replicas": "2-1", "recompute": "except_last"}
    check_staged(pool, pipeline_case("gpipe", 3, precision="fp64", options=options, steps=1, narrow=True))


def test_staged_tensor_parallel_stages_equal_the_reference(pool: Pool) -> None:
    """Ranks of a stage run their chunk together before the links are opened."""
    more: dict[str, Any] = {"tp_degree": 2, "tasks_per_node": 4, "model_options": {"tied": True}, "precision": "fp64"}
    check_staged(pool, pipeline_case("zero_bubble", 2, "gpt", "tokens", input_size=4, steps=2, **more))
