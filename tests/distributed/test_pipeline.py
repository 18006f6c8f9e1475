"""Every synchronous pipeline computes what one process computes per micro-batch, on two and four ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import EXACT, TOLERANCE, Case, check, make_case, run_reference
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

SCHEDULES = ["model", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
TIED = {"tied": True, "context": 8}


def pipeline_case(
    schedule: str, stages: int, model: str = "resnet18", dataset: str = "digits", replicas: int = 1, **more: Any
) -> Case:
    """Four micro-batches of two samples; the last batch of every third step has one sample fewer, so three."""
    given = {
        "strategy": schedule, "pp_degree": stages, "dp_degree": replicas, "micro_batches": 4, "batch_size": 8,
        "replicated": False, "steps": 3,
    }  # fmt: skip
    return make_case(stages * replicas, model, dataset, **{**given, **more})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_with_batch_norm(pool: Pool, schedule: str) -> None:
    case = pipeline_case(schedule, 2, precision="fp64")
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_stages_with_batch_norm(pool: Pool, schedule: str) -> None:
    """One step: of two samples whose extents are 1 x 1 in the end BatchNorm makes chaos, and gpipe's backward passes
    add gradients up in another order."""
    case = pipeline_case(schedule, 4, "mobilenetv2", precision="fp64", steps=1)
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_transformer(pool: Pool, schedule: str, stages: int) -> None:
    chunks = {"virtual_stages": 1} if (schedule, stages) == ("interleaved_1f1b", 4) else {}
    case = pipeline_case(
        schedule, stages, "gpt", "tokens", input_size=8, steps=2, model_options={"context": 8}, options=chunks
    )
    check(pool.run(case), run_reference(case), TOLERANCE)
