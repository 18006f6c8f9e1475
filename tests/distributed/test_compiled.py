"""``compile = true`` where ranks share layers, parameters or passes, and the training is equal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import EXACT, check, make_case, run_reference
from tests.distributed.compiled import run_traced
from tests.distributed.pool import Pool

pytestmark = pytest.mark.slow

STAGES: dict[str, Any] = {"pp_degree": 2, "micro_batches": 2, "model_options": {"batch_norm": False}}


@pytest.mark.parametrize(
    ("key", "model", "more"),
    [
        ("fsdp", "vit", {"dp_degree": 2}),
        ("tensor", "gpt", {"tp_degree": 2, "options": {"sequence_parallel": True}}),
        ("filter", "resnet18", {"tp_degree": 2}),
        ("zero_bubble", "vgg11", STAGES),
    ],
)
def test_ranks_compile_one_graph(pool: Pool, key: str, model: str, more: dict[str, Any]) -> None:
    """The compiler traces collectives between layers, and takes the weights as inputs."""
    case = make_case(
        2, model, "tokens" if model == "gpt" else "digits", steps=2, strategy=key, precision="fp64",
        compile=True, replicated=False, narrow=model not in ("vit", "gpt"), **{"dp_degree": 1, **more},
    )  # fmt: skip
    ranks = pool.call(2, run_traced, case)
    assert all(rank.graphs for rank in ranks)
    assert [rank.breaks for rank in ranks] == [{}, {}]
    check([rank.trained for rank in ranks], run_reference(case), EXACT)
