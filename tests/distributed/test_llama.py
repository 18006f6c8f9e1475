"""Llama's blocks (RMSNorm, rotary positions, SwiGLU, grouped-query attention) train in parallel as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from tests.distributed.cases import EXACT, Case, check, make_case
from tests.distributed.pool import Pool
from tests.distributed.tensor_cases import VOCABULARY, both, check_small

pytestmark = [pytest.mark.slow, pytest.mark.strategy("tensor")]

SEQUENCE = {"options": {"sequence_parallel": True}}


def llama_case(ranks: int, strategy: str, *, tied: bool = False, **more: Any) -> Case:
    """Seven tokens of a small vocabulary; what is not given is a replica."""
    model_options: dict[str, Any] = {"vocabulary": VOCABULARY} | ({"tied": True} if tied else {})
    shared = more.get("tp_degree", 1) * more.get("pp_degree", 1)
    given = {"strategy": strategy, "dp_degree": ranks // shared, "batch_size": 4, "steps": 3, "input_size": 7}
    replicated = strategy == "ddp"
    return make_case(ranks, "llama", "tokens", model_options, **{**given, "replicated": replicated, **more})


CASES = [
    (2, "ddp", {"tied": True, "activation_checkpointing": True}),
    (2, "fsdp", {"tied": True}),
    (2, "zero1", {"optimizer": "adam"}),
    (2, "tensor", {"tp_degree": 2, **SEQUENCE}),
    (2, "tensor", {"tp_degree": 2, "tied": True, **SEQUENCE}),
    (4, "tensor", {"tp_degree": 2, **SEQUENCE}),
    (2, "1f1b", {"pp_degree": 2, "micro_batches": 2, "tied": True}),
    (2, "zero_bubble", {"pp_degree": 2, "micro_batches": 2}),
    (4, "1f1b", {"pp_degree": 2, "tp_degree": 2, "micro_batches": 2}),
]


@pytest.mark.parametrize(("ranks", "strategy", "more"), CASES)
def test_ranks_train_as_one_process(pool: Pool, ranks: int, strategy: str, more: dict[str, Any]) -> None:
    found, expected = both(pool, llama_case(ranks, strategy, precision="fp64", **more))
    if strategy == "tensor":
        found = found[:1]
    check(found, expected, EXACT)


@pytest.mark.parametrize(("strategy", "more"), [("fsdp", {}), ("tensor", {"tp_degree": 2}), ("1f1b", {"pp_degree": 2})])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lower_precision_is_bounded_by_rounding(
    pool: Pool, strategy: str, more: dict[str, Any], precision: str
) -> None:
    check_small(pool, llama_case(2, strategy, precision=precision, **{"steps": 1, **more}))


def test_more_ranks_than_key_value_heads_are_infeasible() -> None:
    point = {"model": "llama", "dataset": "tokens", "strategy": "tensor", "nodes": 4, "batch_size": 4}
    found = resolve_point(point, PartitionLimits("here"))
    assert isinstance(found, InfeasiblePoint)
    assert found.reason == "tensor splits llama by its 2 key-value heads: tp_degree 4, at most 2 is right"


@pytest.mark.parametrize("strategy", ["pipedream", "fairscale_pipe"])
def test_weights_that_are_tied_by_default_are_a_limit(strategy: str) -> None:
    point = {"model": "llama_1b", "dataset": "tokens", "strategy": strategy, "batch_size": 4, "micro_batches": 2}
    world = {"devices_per_task": 2} if strategy == "fairscale_pipe" else {"nodes": 2}
    found = resolve_point(point | world, PartitionLimits("here"))
    assert isinstance(found, InfeasiblePoint)
    assert "tied weights" in found.reason


def test_a_run_takes_the_models_own_length() -> None:
    point = {"model": "llama_8b", "dataset": "tokens", "strategy": "ddp", "batch_size": 1}
    assert resolve_point(point, PartitionLimits("here")).input_size == 8192  # type: ignore[union-attr]
    assert resolve_point(point | {"input_size": 512}, PartitionLimits("here")).input_size == 512  # type: ignore[union-attr]
