"""Traffic of the data-parallel strategies equals their formulas, call by call."""

from __future__ import annotations

import json
import threading
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.data.train import DdpStrategy
from hpcbench.strategies.layer_table import LayerTable, LayerTableRequest
from hpcbench.strategies.traffic import Traffic, merge_calls, total_payload_bytes
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.layers import make_layer_table
from hpcbench.worker.model_execution import wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import Strategy, import_fairscale, resolve_runtime
from tests.conftest import absent, require_horovod
from tests.distributed.cases import CPU, make_case
from tests.distributed.fake import fake_world
from tests.distributed.pool import Pool
from tests.distributed.recording import record_traffic

pytestmark = pytest.mark.slow

TIED = {"model_options": {"tied": True, "context": 8}, "input_size": 8}


@pytest.fixture(autouse=True, scope="module")
def _fairscale() -> None:
    try:
        import_fairscale("nn.data_parallel")
    except WorkerError as error:
        absent("fairscale", str(error))


def spec_of(key: str, ranks: int, model: str, **more: Any) -> RunSpec:
    dataset = "tokens" if model == "gpt" else "digits"
    return make_case(ranks, model, dataset, strategy=key, **{"batch_size": 4, **more}).spec


@cache
def cached_table(model: str, dataset: str, input_size: int | None, options: str) -> LayerTable:
    return make_layer_table(
        LayerTableRequest(model=model, dataset=dataset, input_size=input_size, model_options=json.loads(options))
    )


def table_of(spec: RunSpec) -> LayerTable:
    return cached_table(spec.model, spec.dataset, spec.input_size, json.dumps(spec.model_options))


def expected(spec: RunSpec, rank: int = 0) -> list[Traffic]:
    found: list[Traffic] = resolve_cost(spec.strategy).traffic(spec, table_of(spec), rank)
    return found


def started(spec: RunSpec, group: dist.ProcessGroup | None, steps: int = 3) -> tuple[Strategy, DataFeed]:
    """Steps enough for DDP to have made its buckets for good."""
    strategy, feed = resolve_runtime(spec.strategy)(), make_feed(spec, CPU)
    strategy.setup(
        wrap_blocks(build_model(spec), spec),
        spec,
        RankContext(0 if group is None else dist.get_rank(group), spec.ranks, CPU, group),
    )
    for step in range(steps):
        strategy.step(feed, step)
    return strategy, feed


def steady(spec: RunSpec, group: dist.ProcessGroup | None) -> list[Traffic]:
    strategy, feed = started(spec, group)
    return record_traffic(lambda: strategy.step(feed, 3))


CASES: list[tuple[str, int, str, dict[str, Any]]] = [
    ("ddp", 2, "resnet18", {}),
    ("ddp", 4, "vit", {}),
    ("ddp", 2, "vgg11", {"options": {"bucket_cap_mb": 1.0}, "micro_batches": 2}),
    ("ddp", 2, "vit", {"options": {"bucket_cap_mb": 0.05}, "precision": "bf16"}),
    ("ddp", 2, "vit", {"options": {"bucket_cap_mb": 0.3}, "precision": "fp64"}),
    ("ddp", 2, "vit", {"options": {"compression": "fp16", "bucket_cap_mb": 0.5}}),
    ("ddp", 2, "vit", {"options": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.2}}),
    ("ddp", 2, "gpt", {**TIED, "options": {"bucket_cap_mb": 0.5}}),
    ("zero1", 2, "vgg11", {}),
    ("zero1", 4, "vit", {"options": {"bucket_cap_mb": 0.5}}),
    ("zero1", 4, "vit", {"options": {"parameters_as_bucket_view": True}}),
    ("fairscale_oss", 4, "vgg11", {"options": {"bucket_cap_mb": 2.0}}),
    ("fairscale_oss", 2, "vit", {"options": {"broadcast_fp16": True}}),
    ("fairscale_sddp", 4, "vgg11", {}),
    ("fairscale_sddp", 4, "vit", {"options": {"reduce_buffer_mb": 0.05}}),
    ("fairscale_sddp", 2, "vit", {"options": {"reduce_buffer_mb": 0.0, "reduce_fp16": True}, "micro_batches": 2}),
    ("fsdp", 2, "vgg11", {}),
    ("fsdp", 4, "vit", {}),
    ("fsdp", 4, "vit", {"micro_batches": 2, "options": {"shard_degree": 2}}),
    ("fsdp", 4, "vit", {"options": {"shard_degree": 1}}),
    ("fsdp", 2, "vit", {"micro_batches": 2, "options": {"reshard_after_forward": False}}),
    ("fsdp", 2, "vit", {"options": {"mixed_precision": True}, "activation_checkpointing": True}),
    ("fsdp", 2, "gpt", TIED),
    ("fairscale_fsdp", 4, "vgg11", {}),
    ("fairscale_fsdp", 2, "vit", {"micro_batches": 2}),
    ("fairscale_fsdp", 4, "vit", {"micro_batches": 2, "options": {"reshard_after_forward": False}}),
    ("fairscale_fsdp", 4, "vit", {"options": {"flatten_parameters": False}}),
    ("fairscale_fsdp", 2, "gpt", {**TIED, "micro_batches": 2}),
]


@pytest.mark.parametrize(("key", "ranks", "model", "more"), CASES)
def test_every_call_of_a_steady_step_is_the_predicted_one(
    pool: Pool, key: str, ranks: int, model: str, more: dict[str, Any]
) -> None:
    spec = spec_of(key, ranks, model, **more)
    for rank, found in enumerate(pool.call(ranks, steady, spec)):
        assert found == expected(spec, rank)


def at_once(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    """Reduce a bucket as DDP does, by a call that the fake world supports."""
    dist.all_reduce(bucket.buffer(), group=state)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def fake_steady(spec: RunSpec, rank: int) -> list[Traffic]:
    with fake_world(rank, spec.ranks) as place:
        strategy, feed = resolve_runtime(spec.strategy)(), make_feed(spec, CPU)
        strategy.setup(build_model(spec), spec, place)
        if isinstance(strategy, DdpStrategy):
            strategy.runner.register_comm_hook(dist.group.WORLD, at_once)
        for step in range(2):
            strategy.step(feed, step)
        return record_traffic(lambda: strategy.step(feed, 2))


@pytest.mark.parametrize(("ranks", "rank"), [(64, 0), (64, 31), (200, 199), (1024, 0), (1024, 511), (1024, 1023)])
@pytest.mark.parametrize("key", ["ddp", "zero1", "fairscale_oss", "fairscale_sddp", "fsdp", "fairscale_fsdp"])
def test_fake_data_parallel_ranks_pass_the_predicted_traffic(key: str, ranks: int, rank: int) -> None:
    """More ranks than tensors: some own none, and shards are padding alone."""
    spec = spec_of(key, ranks, "vit", batch_size=2)
    assert fake_steady(spec, rank) == expected(spec, rank)


def all_threads(spec: RunSpec, group: dist.ProcessGroup) -> list[Traffic]:
    """Calls of ``all_reduce``, also by threads of gloo's that a communication hook goes on in."""
    strategy, feed = started(spec, group)
    calls, lock, real = list[Traffic](), threading.Lock(), dist.all_reduce

    def all_reduce(tensor: Any, **more: Any) -> Any:
        with lock:
            size = tensor.numel() * tensor.element_size()
            calls.append(Traffic(operation="all_reduce", group_size=more["group"].size(), payload_bytes=size))
        return real(tensor, **more)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        strategy.step(feed, 3)
    return merge_calls(calls)


@pytest.mark.parametrize(("rank", "bucket_cap_mb"), [(2, 0.5), (4, 25.0)])
def test_powersgd_ranks_pass_the_predicted_factors(pool: Pool, rank: int, bucket_cap_mb: float) -> None:
    """Its factors are sent by other threads than the recorder sees."""
    options = {"compression": "powersgd", "powersgd_rank": rank, "bucket_cap_mb": bucket_cap_mb}
    spec = spec_of("ddp", 2, "vit", options=options)
    assert pool.call(2, all_threads, spec) == [expected(spec)] * 2


def handed_over(spec: RunSpec, group: dist.ProcessGroup) -> int:
    """Bytes that Horovod is asked to reduce in one step."""
    import horovod.torch.optimizer as horovod

    strategy, feed = started(spec, group)
    found, real = list[int](), horovod.allreduce_async_

    def allreduce_async_(tensor: torch.Tensor, *given: Any, **more: Any) -> Any:
        found.append(tensor.numel() * tensor.element_size())
        return real(tensor, *given, **more)

    with mock.patch.object(horovod, "allreduce_async_", allreduce_async_):
        strategy.step(feed, 3)
    return sum(found)


def test_horovod_passes_the_predicted_sum_of_bytes() -> None:
    """Timing decides about the grouping of messages."""
    require_horovod()
    pool = Pool(2)
    try:
        for compression in ("none", "fp16"):
            spec = spec_of("horovod", 2, "vit", options={"compression": compression}, micro_batches=2)
            assert pool.call(2, handed_over, spec) == [total_payload_bytes(expected(spec))] * 2
    finally:
        pool.close()
