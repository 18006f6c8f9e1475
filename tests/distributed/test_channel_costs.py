"""Predicted traffic and memory equal those of real ranks, and of 64 and 1,024 fake ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.channel.cost import ChannelRank
from hpcbench.strategies.layer_table import LayerTable, LayerTableRequest
from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.layers import make_layer_table
from hpcbench.worker.model_execution import wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import DataParallelStrategy, resolve_runtime
from tests.distributed.cases import CPU
from tests.distributed.fake import fake_traffic, fake_world
from tests.distributed.memory import state_of, storages
from tests.distributed.pool import Pool
from tests.distributed.recording import record_traffic

pytestmark = [pytest.mark.slow, pytest.mark.strategy("filter", "channel")]

ALL = [(strategy, form) for strategy in ("filter", "channel") for form in ("sharded", "gathered")]


def spec_of(strategy: str, form: str, tp: int, dp: int = 1, **more: Any) -> RunSpec:
    given: dict[str, Any] = {"model": "resnet18", "dataset": "digits", "batch_size": 4, **more}
    options = {"form": form, **given.pop("options", {})}
    return RunSpec(strategy=strategy, tasks_per_node=tp * dp, tp_degree=tp, dp_degree=dp, options=options, **given)


def table_of(spec: RunSpec) -> LayerTable:
    return make_layer_table(
        LayerTableRequest(
            model=spec.model, dataset=spec.dataset, input_size=spec.input_size, model_options=spec.model_options
        )
    )


def sent(spec: RunSpec, group: dist.ProcessGroup) -> list[Traffic]:
    """Return the calls of the second step."""
    strategy = resolve_runtime(spec.strategy)()
    strategy.setup(
        wrap_blocks(build_model(spec), spec), spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group)
    )
    feed = make_feed(spec, CPU)
    strategy.step(feed, 0)
    return record_traffic(lambda: strategy.step(feed, 1))


@pytest.mark.parametrize(
    ("strategy", "form", "tp", "dp", "more"),
    [
        *((strategy, form, 2, 1, {}) for strategy, form in ALL),
        ("filter", "sharded", 4, 1, {"model": "vgg11", "options": {"split_last": True}}),
        ("channel", "sharded", 4, 1, {"model": "vgg11", "micro_batches": 2}),
        ("filter", "gathered", 2, 2, {"model": "vgg11", "precision": "bf16"}),
        ("channel", "sharded", 2, 2, {"model": "vgg11", "activation_checkpointing": True}),
    ],
)
def test_channel_ranks_pass_the_predicted_payloads(
    pool: Pool, strategy: str, form: str, tp: int, dp: int, more: dict[str, Any]
) -> None:
    spec = spec_of(strategy, form, tp, dp, **more)
    table, cost = table_of(spec), resolve_cost(strategy)
    for rank, found in enumerate(pool.call(spec.ranks, sent, spec)):
        assert found == cost.traffic(spec, table, rank)
        assert found


LARGE_VGG = {"model": "vgg11", "dataset": "imagenet", "input_size": 64}


@pytest.mark.parametrize(("strategy", "form"), ALL)
@pytest.mark.parametrize(
    ("tp", "dp", "rank", "more"),
    [
        (64, 1, 63, {}),
        (64, 16, 1000, {}),
        (4, 256, 3, {"precision": "bf16"}),
        (4, 1, 3, {"model": "mobilenetv2", "options": {"split_last": True}, "micro_batches": 2, "batch_size": 4}),
        (3, 1, 1, {"model": "cosmoflow", "dataset": "cosmoflow", "input_size": 8}),
        (2, 1, 0, {"model": "mobilenetv2", "activation_checkpointing": True}),
        pytest.param(2, 1, 0, {**LARGE_VGG, "activation_checkpointing": True}, marks=pytest.mark.soak),
    ],
)
def test_fake_channel_ranks_pass_the_predicted_payloads(
    strategy: str, form: str, tp: int, dp: int, rank: int, more: dict[str, Any]
) -> None:
    spec = spec_of(strategy, form, tp, dp, **{"batch_size": 2, **more})
    assert fake_traffic(spec, rank) == resolve_cost(strategy).traffic(spec, table_of(spec), rank)


class Held(NamedTuple):
    """Bytes of one rank around the second step; what autograd keeps for it."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int


def held(spec: RunSpec, place: RankContext) -> Held:
    strategy = resolve_runtime(spec.strategy)()
    assert isinstance(strategy, DataParallelStrategy)
    strategy.setup(wrap_blocks(build_model(spec), spec), spec, place)
    feed = make_feed(spec, CPU)
    strategy.step(feed, 0)
    own = {one.untyped_storage()._cdata for one in (*strategy.module.parameters(), *strategy.module.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        strategy.step(feed, 1)
    parameters = list(strategy.module.parameters())
    return Held(
        storages(parameters),
        storages(one.grad for one in parameters),
        storages(one for one in state_of(strategy.optimizer) if one.dim()),
        storages(strategy.module.buffers()),
        storages(saved.values()),
    )


@pytest.mark.parametrize(("strategy", "form"), ALL)
@pytest.mark.parametrize(
    ("tp", "more"),
    [
        (2, {"batch_size": 32, "optimizer": "adam"}),
        (3, {"batch_size": 4, "model": "mobilenetv2", "dataset": "cifar10", "input_size": 16}),
    ],
)
def test_channel_memory_equals_the_formula_part_by_part(
    strategy: str, form: str, tp: int, more: dict[str, Any]
) -> None:
    """Part by part: what is split falls as the shares do, to the byte, activations within a tenth."""
    spec, rank = spec_of(strategy, form, tp, **more), tp - 1
    table = table_of(spec)
    with fake_world(rank, tp) as place:
        found = held(spec, place)
    expected = resolve_cost(strategy).memory(spec, table, rank)
    size = expected.parameters_bytes
    assert found.buffers == expected.buffers_bytes
    assert (found.parameters, found.gradients) == (size, size)
    assert found.optimizer == size * (2 if spec.optimizer == "adam" else 1)
    kept = sum(row.saved_bytes for row in ChannelRank(spec, table, rank).describe_rows())
    assert found.activations == pytest.approx(kept, rel=0.1)
