"""Traffic and saved activations of spatial ranks equal the oracle's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.layer_table import LayerTable, LayerTableRequest, read_shipped_table
from hpcbench.strategies.spatial.cost import SpatialCost, whole_row
from hpcbench.strategies.spatial.train import SpatialStrategy as Runtime
from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.layers import make_layer_table
from hpcbench.worker.model_execution import summed_loss, wrap_blocks
from hpcbench.worker.models.build import build_model
from tests.distributed.cases import CPU
from tests.distributed.fake import fake_traffic
from tests.distributed.pool import Pool
from tests.distributed.recording import record_traffic
from tests.distributed.test_live_memory import bytes_beside_samples, peak_bytes

pytestmark = [pytest.mark.slow, pytest.mark.strategy("spatial")]


def spatial_spec(ranks: int, model: str, dataset: str = "digits", dp: int = 1, **more: Any) -> RunSpec:
    given: dict[str, Any] = {"batch_size": 2, "momentum": 0.0}
    return RunSpec(
        model=model, dataset=dataset, strategy="spatial", tasks_per_node=ranks * dp, sp_degree=ranks, dp_degree=dp,
        **{**given, **more},
    )  # fmt: skip


def table_of(spec: RunSpec) -> LayerTable:
    shipped = read_shipped_table(spec.model, spec.dataset, spec.input_size, spec.model_options)
    request = LayerTableRequest(
        model=spec.model, dataset=spec.dataset, input_size=spec.input_size, model_options=spec.model_options
    )
    return shipped or make_layer_table(request)


def set_up(spec: RunSpec, group: dist.ProcessGroup) -> Runtime:
    strategy = Runtime()
    place = RankContext(dist.get_rank(group), spec.ranks, CPU, group)
    strategy.setup(wrap_blocks(build_model(spec), spec), spec, place)
    return strategy


def second_step(spec: RunSpec, group: dist.ProcessGroup) -> list[Traffic]:
    """Return the calls of collectives by a rank of the pool."""
    strategy, feed = set_up(spec, group), make_feed(spec, CPU)
    strategy.step(feed, 0)
    return record_traffic(lambda: strategy.step(feed, 1))


VOLUME: dict[str, Any] = {"dataset": "cosmoflow", "input_size": 10}


@pytest.mark.parametrize(
    ("ranks", "dp", "model", "more"),
    [
        (4, 1, "resnet18", {"dataset": "mnist", "options": {"grid": "2x2"}}),
        (2, 2, "resnet18", {"precision": "fp64", "micro_batches": 2, "batch_size": 4}),
        (4, 1, "mobilenetv2", {"options": {"grid": "1x4", "bucket_cap_mb": 0.5}}),
        (2, 1, "vgg11", {"dataset": "mnist", "options": {"batch_norm": "local"}}),
        (2, 2, "vgg11", {"activation_checkpointing": True}),
        (
            4,
            1,
            "resnet18",
            {"dataset": "mnist", "activation_checkpointing": True, "options": {"global_pool": "gather"}},
        ),
        (4, 1, "cosmoflow", {**VOLUME, "options": {"grid": "1x2x2", "overlap": False}}),
        (4, 1, "cosmoflow", {**VOLUME, "precision": "bf16"}),
    ],
)
def test_spatial_ranks_pass_the_predicted_traffic(
    pool: Pool, ranks: int, dp: int, model: str, more: dict[str, Any]
) -> None:
    spec = spatial_spec(ranks, dp=dp, **{"model": model, **more})
    table = table_of(spec)
    for rank, found in enumerate(pool.call(ranks * dp, second_step, spec)):
        assert found == SpatialCost().traffic(spec, table, rank)


CORNER, EDGE, INTERIOR = "corner", "edge", "interior"


@pytest.mark.parametrize("where", [CORNER, EDGE, INTERIOR])
@pytest.mark.parametrize(
    ("dp", "grid", "more"),
    [
        (1, (8, 8), {"model": "resnet18", "dataset": "cifar10"}),
        (4, (4, 4), {"model": "resnet18", "dataset": "mnist"}),
        (1, (32, 32), {"model": "resnet18", "dataset": "imagenet", "input_size": 72}),
        (64, (4, 2, 2), {"model": "cosmoflow", "dataset": "cosmoflow", "input_size": 13}),
    ],
)
def test_fake_spatial_ranks_of_large_worlds_pass_the_predicted_traffic(
    dp: int, grid: tuple[int, ...], more: dict[str, Any], where: str
) -> None:
    """The last replica's rank at a corner of the grid, along an edge, inside of it."""
    sp = torch.Size(grid).numel()
    at = {CORNER: 0, EDGE: grid[-1] // 2, INTERIOR: (grid[0] // 2) * (sp // grid[0]) + sp // grid[0] // 2}[where]
    spec = spatial_spec(sp, dp=dp, **more, options={"grid": "x".join(map(str, grid))})
    rank = (dp - 1) * sp + at
    assert fake_traffic(spec, rank, warmup_steps=0) == SpatialCost().traffic(spec, table_of(spec), rank)


def kept(spec: RunSpec, group: dist.ProcessGroup) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward pass; weights, buffers and strangers aside."""
    strategy = set_up(spec, group)
    inputs, labels = strategy.batch(make_feed(spec, CPU), 0)
    own = {one.untyped_storage()._cdata for one in (*strategy.module.parameters(), *strategy.module.buffers())}
    storages: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = summed_loss(strategy.module(inputs), labels)
    found = sum(one.untyped_storage().nbytes() for one in storages.values())
    del loss
    return found


@pytest.mark.parametrize(
    ("ranks", "model", "more"),
    [
        (4, "resnet18", {"dataset": "mnist", "options": {"grid": "2x2"}}),
        (2, "vgg11", {"dataset": "cifar10"}),
        (2, "mobilenetv2", {"dataset": "imagenet", "input_size": 40}),
        (4, "cosmoflow", {**VOLUME, "input_size": 32, "options": {"grid": "1x2x2"}}),
    ],
)
def test_saved_activations_shrink_as_predicted(pool: Pool, ranks: int, model: str, more: dict[str, Any]) -> None:
    """Within a hundredth of what autograd really keeps, on every rank."""
    spec = spatial_spec(ranks, **{"model": model, **more})
    table = table_of(spec)
    alone = sum(whole_row(spec, row).saved_bytes for row in table.layers)
    for rank, measured in enumerate(pool.call(ranks, kept, spec)):
        rows = SpatialCost().describe(spec, table, rank).rows
        said = sum(row.saved_bytes + row.received_bytes for row in rows)
        print(f"{model} {spec.options} rank {rank} of {ranks}: {measured} kept, {said} said, {alone} alone")
        assert measured == pytest.approx(said, rel=0.01)
        assert said < alone * 1.3 / ranks + 2**20


@pytest.mark.parametrize(
    ("ranks", "dp", "model", "more"),
    [
        (4, 2, "resnet18", {"batch_size": 128, "micro_batches": 2, "momentum": 0.9, "options": {"grid": "2x2"}}),
        (2, 1, "vgg11", {"batch_size": 256, "activation_checkpointing": True}),
        (4, 1, "cosmoflow", {**VOLUME, "input_size": 32, "precision": "fp64"}),
    ],
)
def test_the_predicted_spatial_peak_is_that_of_the_allocator(
    ranks: int, dp: int, model: str, more: dict[str, Any]
) -> None:
    """Every byte that torch's allocator gave out when a step held most."""
    spec = spatial_spec(ranks, dp=dp, **{"model": model, **more})
    rank = ranks * dp - 1
    said, measured = SpatialCost().memory(spec, table_of(spec), rank), peak_bytes(spec, rank)
    predicted = bytes_beside_samples(said)
    print(f"{predicted / measured:.3f} of {measured}: {model} {more} {said}")
    assert predicted == pytest.approx(measured, rel=0.1)
