"""Tensor parallelism computes what one process computes: layers, whole models, hybrids, evaluation.

Small networks in their place; the vocabulary is a prime and heads, tokens and ranks are uneven where they can be.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.tensor.train import TensorParallelStrategy
from hpcbench.strategies.tensor.train.layers import RowLinear, TensorParallelComm
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime
from hpcbench.worker.training_loop import held_out_accuracy
from tests.distributed.cases import (
    CPU,
    Case,
    OfRank,
    check_exactly,
    distance,
    make_case,
    run_parallel,
    run_reference,
)  # fmt: skip
from tests.distributed.pool import Pool
from tests.distributed.tensor_cases import (
    LayerCase,
    both,
    build_layer,
    check_small,
    layer_gradients,
    small_vocabulary,
    split_layer,
    tensor_case,
)

pytestmark = [pytest.mark.slow, pytest.mark.strategy("tensor")]

SEQUENCE = {"sequence_parallel": True}
WHOLE_WORDS = {"vocabulary_parallel": False}
TIED = {"tied": True, "context": 9}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("kind", ["attention", "causal", "mlp", "language"])
def test_a_shared_layer_is_the_layer(pool: Pool, kind: str, by_tokens: bool, ranks: int) -> None:
    """5 heads, 13 inner features, 61 words and 7 tokens: uneven on any of these ranks."""
    case = LayerCase(kind, by_tokens)
    expected = layer_gradients(case, build_layer(case), None)
    for found in pool.call(ranks, split_layer, case):
        assert found.keys() == expected.keys()
        worst = {name: distance(found[name], expected[name]) for name in expected}
        assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize(
    ("ranks", "model", "more"),
    [
        (2, "gpt", {}),
        (2, "gpt", {"options": SEQUENCE, "optimizer": "adam"}),
        (2, "gpt", {"options": WHOLE_WORDS}),
        (2, "gpt", {"options": {**SEQUENCE, **WHOLE_WORDS}}),
        (2, "gpt", {"model_options": TIED}),
        (2, "gpt", {"model_options": TIED, "options": {**SEQUENCE, **WHOLE_WORDS}}),
        (3, "gpt", {}),
        (3, "gpt", {"options": SEQUENCE, "model_options": TIED}),
        (4, "gpt", {}),
        (4, "gpt", {"options": SEQUENCE, "weight_decay": 0.1}),
        (2, "vit", {}),
        (3, "vit", {"options": SEQUENCE}),
        (4, "vit", {"micro_batches": 2}),
    ],
)
def test_tensor_parallel_models_equal_one_device(pool: Pool, ranks: int, model: str, more: dict[str, Any]) -> None:
    check_exactly(*both(pool, tensor_case(ranks, model, precision="fp64", **more)))


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("gpt", {}),
        ("gpt", {"options": SEQUENCE}),
        ("gpt", {"options": SEQUENCE, "model_options": TIED, "micro_batches": 2}),
        ("vit", {"options": SEQUENCE}),
    ],
)
def test_tensor_and_data_hybrids_equal_one_device(pool: Pool, model: str, more: dict[str, Any]) -> None:
    """Two replicas of two ranks; the last of the third step's batches lacks a sample."""
    found, expected = both(pool, tensor_case(4, model, precision="fp64", dp_degree=2, **more))
    assert [one.counts[2] for one in found] == [4, 4, 3, 3]
    check_exactly(found, expected)


@pytest.mark.parametrize("options", [{}, SEQUENCE])
@pytest.mark.parametrize("model", ["gpt", "vit"])
def test_tensor_parallel_recomputation_equals_one_device(pool: Pool, model: str, options: dict[str, Any]) -> None:
    case = tensor_case(2, model, precision="fp64", activation_checkpointing=True, options=options, steps=2)
    check_exactly(*both(pool, case))


@pytest.mark.parametrize("options", [{}, SEQUENCE])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("model", ["gpt", "vit"])
def test_tensor_parallel_training_in_fp32_stays_within_rounding(
    pool: Pool, model: str, ranks: int, replicas: int, options: dict[str, Any]
) -> None:
    check_small(pool, tensor_case(ranks, model, dp_degree=replicas, options=options, steps=5))


@pytest.mark.parametrize("options", [{}, SEQUENCE])
def test_a_tensor_parallel_step_in_bf16_stays_within_rounding(pool: Pool, options: dict[str, Any]) -> None:
    check_small(pool, tensor_case(2, precision="bf16", options=options, steps=1))


def bias_before_the_sum(layer: RowLinear, x: Tensor) -> Tensor:
    return layer.comm.leave(torch.nn.functional.linear(x, layer.weight, layer.bias))


WRONG: dict[str, tuple[Any, str, Any]] = {
    "sums no gradients of own tokens": (TensorParallelStrategy, "make_reducers", lambda *_: []),
    "adds a bias on every rank": (RowLinear, "forward", bias_before_the_sum),
    "sums no gradients of the input": (TensorParallelComm, "enter", lambda sharing, x: sharing.join(x)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_planted_error_is_detected(pool: Pool, wrong: str) -> None:
    case = tensor_case(2, "vit", precision="fp64", options=SEQUENCE, steps=1)
    found, expected = pool.call(2, run_wrong, case, wrong), run_reference(case)
    with pytest.raises(AssertionError):
        check_exactly(found, expected)


def run_wrong(case: Case, wrong: str, group: dist.ProcessGroup) -> OfRank:
    with mock.patch.object(*WRONG[wrong]):
        return run_parallel(case, group)


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
