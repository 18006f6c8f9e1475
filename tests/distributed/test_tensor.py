"""Tensor parallelism computes what one process computes: whole models, hybrids, evaluation.

Small networks in their place; the vocabulary is a prime and heads, tokens and ranks are uneven where they can be.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime
from hpcbench.worker.training_loop import held_out_accuracy
from tests.distributed.cases import (
    CPU,
    Case,
    case_id,
    check_exactly,
    distance,
    make_case,
)  # fmt: skip
from tests.distributed.pool import Pool
from tests.distributed.tensor_cases import (
    both,
    check_small,
    small_vocabulary,
    tensor_case,
)

pytestmark = [pytest.mark.slow, pytest.mark.strategy("tensor")]

SEQUENCE = {"sequence_parallel": True}
WHOLE_WORDS = {"vocabulary_parallel": False}
TIED = {"tied": True, "context": 9}


WIDE: dict[str, Any] = {"precision": "fp64"}
AGAIN: dict[str, Any] = {**WIDE, "activation_checkpointing": True, "steps": 2}
CASES = [
    tensor_case(2, options=SEQUENCE, optimizer="adam", **WIDE),
    tensor_case(2, options=WHOLE_WORDS, **WIDE),
    tensor_case(2, model_options=TIED, **WIDE),
    tensor_case(2, model_options=TIED, options={**SEQUENCE, **WHOLE_WORDS}, **WIDE),
    tensor_case(3, model_options=TIED, options=SEQUENCE, **WIDE),
    tensor_case(4, options=SEQUENCE, weight_decay=0.1, **WIDE),
    tensor_case(3, "vit", options=SEQUENCE, **WIDE),
    tensor_case(4, "vit", micro_batches=2, **WIDE),
    tensor_case(4, dp_degree=2, **WIDE),
    tensor_case(4, dp_degree=2, options=SEQUENCE, model_options=TIED, micro_batches=2, **WIDE),
    tensor_case(4, "vit", dp_degree=2, options=SEQUENCE, **WIDE),
    tensor_case(2, **AGAIN),
    tensor_case(2, "vit", options=SEQUENCE, **AGAIN),
    *(tensor_case(4, model, dp_degree=2, options=SEQUENCE, steps=5) for model in ("gpt", "vit")),
    *(tensor_case(2, precision="bf16", options=options, steps=1) for options in ({}, SEQUENCE)),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_tensor_parallel_models_equal_one_device(pool: Pool, case: Case) -> None:
    if case.spec.precision == "fp64":
        check_exactly(*both(pool, case))
    else:
        check_small(pool, case)


def evaluate(spec: RunSpec, group: dist.ProcessGroup | None) -> tuple[float | None, bool]:
    place = RankContext(dist.get_rank(group), spec.ranks, CPU, group) if group else RankContext(0, 1, CPU)
    with small_vocabulary():
        strategy = resolve_runtime(spec.strategy)()
        strategy.setup(build_model(spec), spec, place)
        feed = make_feed(spec, CPU)
        found = held_out_accuracy(strategy.module, feed)
        strategy.step(feed, 0)
        return found, strategy.module.training


def test_evaluation_sees_whole_scores(pool: Pool) -> None:
    """Untrained, so that right answers are few and rounding moves none."""
    spec = tensor_case(2, "vit", precision="fp64", options=SEQUENCE).spec
    alone = make_case(1, "vit", "digits", strategy="single", batch_size=4, precision="fp64").spec
    expected = evaluate(alone, None)
    assert expected[0] is not None
    assert expected[1], "back in training"
    assert pool.call(2, evaluate, spec) == [expected, expected]


def whole_scores(spec: RunSpec, group: dist.ProcessGroup) -> Tensor:
    with small_vocabulary():
        model = build_model(spec)
        strategy = resolve_runtime(spec.strategy)()
        strategy.setup(model, spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group))
        inputs, _ = make_feed(spec, CPU).batch(0, 0)
        with torch.no_grad():
            found: Tensor = strategy.module.eval()(inputs)
        return found


@pytest.mark.parametrize("options", [{}, SEQUENCE])
def test_in_eval_mode_every_rank_has_the_logits_of_the_whole_vocabulary(pool: Pool, options: dict[str, Any]) -> None:
    spec = tensor_case(3, "gpt", precision="fp64", options=options).spec
    with small_vocabulary(), torch.no_grad():
        inputs, _ = make_feed(spec, CPU).batch(0, 0)
        expected = build_model(spec)(inputs)
    for found in pool.call(3, whole_scores, spec):
        assert distance(found, expected) <= 1e-12
