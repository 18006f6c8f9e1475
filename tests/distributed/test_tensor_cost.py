"""Traffic and memory of tensor-parallel ranks equal the formulas'."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.layer_table import LayerTable, LayerTableRequest
from hpcbench.strategies.tensor.cost import TensorCost
from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.layers import make_layer_table
from hpcbench.worker.model_execution import wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime
from tests.distributed.cases import CPU
from tests.distributed.fake import fake_traffic, fake_world
from tests.distributed.pool import Pool
from tests.distributed.recording import record_traffic
from tests.distributed.tensor_cases import measure_held, small_vocabulary, tensor_case

pytestmark = [pytest.mark.slow, pytest.mark.strategy("tensor")]


def kept_activation_bytes(spec: RunSpec, table: LayerTable, rank: int) -> int:
    """Return what is kept from the forward pass of a micro-batch when its backward pass begins."""
    return sum(row.saved_bytes for row in TensorCost().describe(spec, table, rank).rows)


SEQUENCE = {"sequence_parallel": True}
WHOLE_WORDS = {"vocabulary_parallel": False}
BOTH = {**SEQUENCE, **WHOLE_WORDS}
DROPS = {"context": 9, "dropout": 0.1}


def table_of(spec: RunSpec) -> LayerTable:
    request = LayerTableRequest(
        model=spec.model, dataset=spec.dataset, input_size=spec.input_size, model_options=spec.model_options
    )
    return make_layer_table(request)


def real_traffic(spec: RunSpec, group: dist.ProcessGroup) -> list[Traffic]:
    with small_vocabulary():
        strategy = resolve_runtime(spec.strategy)()
        strategy.setup(
            wrap_blocks(build_model(spec), spec), spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group)
        )
        feed = make_feed(spec, CPU)
        strategy.step(feed, 0)
        return record_traffic(lambda: strategy.step(feed, 1))


@pytest.mark.parametrize(
    ("ranks", "model", "more"),
    [
        (2, "gpt", {}),
        (2, "gpt", {"options": SEQUENCE, "precision": "bf16"}),
        (3, "gpt", {"options": SEQUENCE}),
        (4, "gpt", {"options": WHOLE_WORDS}),
        (4, "gpt", {"dp_degree": 2, "options": SEQUENCE, "micro_batches": 2}),
        (2, "llama", {}),
        (2, "llama", {"options": SEQUENCE}),
        (2, "llama", {"options": BOTH}),
        (4, "llama", {"dp_degree": 2, "options": SEQUENCE}),
        (2, "vit", {"activation_checkpointing": True, "options": SEQUENCE}),
        (4, "vit", {"dp_degree": 2, "precision": "fp64"}),
    ],
)
def test_tensor_ranks_pass_the_predicted_traffic(pool: Pool, ranks: int, model: str, more: dict[str, Any]) -> None:
    spec = tensor_case(ranks, model, **more).spec
    found = pool.call(ranks, real_traffic, spec)
    with small_vocabulary():
        table = table_of(spec)
    assert found == [TensorCost().traffic(spec, table, rank) for rank in range(ranks)]
    assert found[0]


@pytest.mark.parametrize(
    ("ranks", "model", "more"),
    [
        (2, "gpt", {"options": BOTH}),
        (2, "gpt", {"model_options": {"context": 9, "tied": True}}),
        (2, "gpt", {"precision": "bf16"}),
        (4, "vit", {"precision": "bf16", "options": SEQUENCE, "micro_batches": 2}),
        (2, "gpt", {"activation_checkpointing": True}),
        (2, "gpt", {"activation_checkpointing": True, "options": SEQUENCE}),
        (2, "gpt", {"activation_checkpointing": True, "options": BOTH, "model_options": DROPS}),
        (2, "gpt", {"activation_checkpointing": True, "options": SEQUENCE, "model_options": DROPS}),
        (64, "gpt", {"dp_degree": 16}),
        (64, "gpt", {"dp_degree": 16, "options": SEQUENCE, "precision": "bf16"}),
        (64, "vit", {"dp_degree": 32, "options": SEQUENCE}),
        (1024, "gpt", {"dp_degree": 256, "options": SEQUENCE, "micro_batches": 2}),
        (1024, "gpt", {"dp_degree": 512, "batch_size": 2, "options": BOTH}),
        (1024, "vit", {"dp_degree": 256, "batch_size": 1}),
    ],
)
def test_fake_tensor_ranks_pass_the_predicted_traffic(ranks: int, model: str, more: dict[str, Any]) -> None:
    with small_vocabulary():
        spec = tensor_case(ranks, model, **more).spec
        table = table_of(spec)
        for rank in (0, ranks - 1):
            assert fake_traffic(spec, rank) == TensorCost().traffic(spec, table, rank)


def test_replicas_on_one_rank_send_only_gradients() -> None:
    with small_vocabulary():
        spec = tensor_case(2, "vit", dp_degree=2, options=SEQUENCE).spec
        expected = TensorCost().traffic(spec, table_of(spec), 1)
        assert fake_traffic(spec, 1) == expected
        assert {(call.operation, call.group_size) for call in expected} == {("all_reduce", 2)}


BIG: dict[str, Any] = {"input_size": 64, "model_options": {"context": 64}, "optimizer": "adam"}


@pytest.mark.parametrize(
    ("ranks", "model", "more"),
    [
        (2, "gpt", BIG),
        (4, "gpt", BIG),
        (3, "gpt", {**BIG, "options": SEQUENCE}),
        (4, "gpt", {**BIG, "options": SEQUENCE}),
        (2, "gpt", {**BIG, "options": BOTH}),
        (2, "gpt", {**BIG, "precision": "fp64"}),
        (2, "gpt", {**BIG, "precision": "bf16"}),
        (2, "gpt", {**BIG, "model_options": {"context": 64, "dropout": 0.1}, "options": SEQUENCE}),
        (4, "vit", {"options": SEQUENCE}),
        (4, "vit", {"dp_degree": 2, "precision": "bf16"}),
    ],
)
def test_a_rank_holds_the_predicted_memory(ranks: int, model: str, more: dict[str, Any]) -> None:
    """Every part of it, within one per cent; all tensors are counted, whoever holds them."""
    with small_vocabulary():
        spec = tensor_case(ranks, model, **more).spec
        table = table_of(spec)
        for rank in (0, ranks - 1):
            with fake_world(rank, ranks):
                held = measure_held(spec, None)
            parameters = TensorCost().memory(spec, table, rank).parameters_bytes
            assert held.parameters == parameters
            assert held.optimizer == pytest.approx(parameters * (2 if spec.optimizer == "adam" else 1), rel=0.01)
            assert held.gradients == pytest.approx(parameters, rel=0.01)
            assert held.activations == pytest.approx(kept_activation_bytes(spec, table, rank), rel=0.01)


def test_more_ranks_hold_less() -> None:
    """Parameters nearly by their number; activations down to what every rank has whole, unless tokens are split."""
    with small_vocabulary():
        specs = [tensor_case(ranks, **BIG).spec for ranks in (1, 2, 4)]
        tables = [table_of(spec) for spec in specs]
        one, two, four = [TensorCost().memory(*pair, 0).parameters_bytes for pair in zip(specs, tables, strict=True)]
        whole, _, split = [kept_activation_bytes(*pair, 0) for pair in zip(specs, tables, strict=True)]
        parted = tensor_case(4, **BIG, options=SEQUENCE).spec
        by_tokens = kept_activation_bytes(parted, table_of(parted), 0)
    assert two < 0.52 * one
    assert four < 0.27 * one
    assert 0.4 < split / whole < 0.5
    assert 0.3 < by_tokens / whole < 0.4
