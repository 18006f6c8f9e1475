"""Traffic with the options of every family equals the formulas, call by call: on real ranks, and on fake ones of large worlds.

``test_registry.py`` compares every strategy without options.
"""

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
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.layer_table import LayerTable, LayerTableRequest
from hpcbench.strategies.traffic import Traffic, merge_calls, total_payload_bytes
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.layers import make_layer_table
from hpcbench.worker.model_execution import wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import Strategy, import_fairscale, resolve_runtime
from hpcbench.workloads.datasets import DATASETS
from tests.conftest import absent, require_horovod
from tests.distributed.cases import CPU, make_case
from tests.distributed.fake import fake_calls
from tests.distributed.pool import Pool
from tests.distributed.recording import record_traffic
from tests.distributed.tensor_cases import VOCABULARY, small_vocabulary

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
def cached_table(model: str, dataset: str, input_size: int | None, options: str, _outputs: int) -> LayerTable:
    return make_layer_table(
        LayerTableRequest(model=model, dataset=dataset, input_size=input_size, model_options=json.loads(options))
    )


def table_of(spec: RunSpec) -> LayerTable:
    """The table of the run's layers, with as many words or classes as the data set has now."""
    outputs = DATASETS[spec.dataset].outputs
    return cached_table(spec.model, spec.dataset, spec.input_size, json.dumps(spec.model_options), outputs)


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


@small_vocabulary()
def small_steady(spec: RunSpec, group: dist.ProcessGroup | None) -> list[Traffic]:
    return steady(spec, group)


def split(key: str, ranks: int, parts: int, model: str = "resnet18", dataset: str = "digits", **more: Any) -> RunSpec:
    """A run that splits layers, images or blocks over ``parts`` ranks; replicas fill the rest."""
    own = STRATEGIES[key].own_degree
    degrees: dict[str, Any] = {str(own): parts, "dp_degree": ranks // parts // more.get("tp_degree", 1)}
    more = {"batch_size": 4, "nodes": max(1, ranks // 8), "tasks_per_node": min(ranks, 8), **degrees, **more}
    return RunSpec(model=model, dataset=dataset, strategy=key, **more)


AGAIN: dict[str, Any] = {"activation_checkpointing": True}
SEQUENCE, WHOLE_WORDS = {"sequence_parallel": True}, {"vocabulary_parallel": False}
TOKENS: dict[str, Any] = {"model": "gpt", "dataset": "tokens", "input_size": 4, "model_options": {"context": 4}}
DROPS = {"context": 4, "dropout": 0.1}
LLAMA: dict[str, Any] = {**TOKENS, "model": "llama", "model_options": {"vocabulary": VOCABULARY}}
LONG: dict[str, Any] = {"micro_batches": 4, "dataset": "cifar10", "batch_size": 8}
MNIST: dict[str, Any] = {"dataset": "mnist", "batch_size": 2}

SPECS = [
    spec_of("ddp", 2, "vgg11", options={"bucket_cap_mb": 1.0}, micro_batches=2),
    spec_of("ddp", 2, "vit", options={"bucket_cap_mb": 0.05}, precision="bf16"),
    spec_of("ddp", 2, "vit", options={"compression": "fp16", "bucket_cap_mb": 0.5}),
    spec_of("ddp", 2, "vit", options={"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.2}),
    spec_of("ddp", 2, "gpt", **TIED, options={"bucket_cap_mb": 0.5}),
    spec_of("zero1", 4, "vit", options={"bucket_cap_mb": 0.5}),
    spec_of("zero1", 4, "vit", options={"parameters_as_bucket_view": True}),
    spec_of("fairscale_oss", 2, "vit", options={"broadcast_fp16": True}),
    spec_of("fairscale_sddp", 4, "vit", options={"reduce_buffer_mb": 0.05}),
    spec_of("fairscale_sddp", 2, "vit", options={"reduce_buffer_mb": 0.0, "reduce_fp16": True}, micro_batches=2),
    spec_of("fsdp", 4, "vit", options={"shard_degree": 2}, micro_batches=2),
    spec_of("fsdp", 4, "vit", options={"shard_degree": 1}),
    spec_of("fsdp", 2, "vit", options={"reshard_after_forward": False}, micro_batches=2),
    spec_of("fsdp", 2, "vit", options={"mixed_precision": True}, **AGAIN),
    spec_of("fsdp", 2, "gpt", **TIED),
    spec_of("fairscale_fsdp", 4, "vit", options={"reshard_after_forward": False}, micro_batches=2),
    spec_of("fairscale_fsdp", 4, "vit", options={"flatten_parameters": False}),
    spec_of("fairscale_fsdp", 2, "gpt", **TIED, micro_batches=2),
    split("filter", 4, 4, "vgg11", options={"split_last": True}),
    split("filter", 4, 2, "vgg11", options={"form": "gathered"}, precision="bf16"),
    split("channel", 4, 4, "vgg11", micro_batches=2),
    split("channel", 4, 2, "vgg11", **AGAIN),
    split("tensor", 2, 2, **TOKENS, options=SEQUENCE, precision="bf16"),
    split("tensor", 3, 3, **TOKENS, options=SEQUENCE),
    split("tensor", 4, 4, **TOKENS, options=WHOLE_WORDS),
    split("tensor", 4, 2, **LLAMA, options=SEQUENCE, micro_batches=2),
    split("tensor", 2, 2, **LLAMA, options={**SEQUENCE, **WHOLE_WORDS}),
    split("tensor", 2, 2, "vit", options=SEQUENCE, **AGAIN),
    split("spatial", 4, 4, **MNIST, options={"grid": "2x2"}),
    split("spatial", 4, 2, precision="fp64", micro_batches=2),
    split("spatial", 4, 4, "mobilenetv2", options={"grid": "1x4", "bucket_cap_mb": 0.5}),
    split("spatial", 2, 2, "vgg11", **MNIST, options={"batch_norm": "local"}),
    split("spatial", 4, 4, **MNIST, options={"global_pool": "gather"}, **AGAIN),
    split("spatial", 4, 4, "cosmoflow", "cosmoflow", input_size=10, batch_size=2,
          options={"grid": "1x2x2", "overlap": False}),
    # Micro-batches of 8 samples are 3, 3 and 2; the sends differ accordingly.
    split("1f1b", 4, 4, "vgg11", batch_size=8, micro_batches=3),
    split("zero_bubble", 4, 2, "vgg11", batch_size=8, micro_batches=3),
    split("model", 2, 2, options={"cuts": "4"}),
    split("gpipe", 3, 3, "vgg11", batch_size=8, micro_batches=3, options={"stage_replicas": "2-1"}),
    split("1f1b", 4, 2, **{**TOKENS, "model_options": {"context": 4, "tied": True}}, micro_batches=2),
    split("zero_bubble", 4, 2, **TOKENS, tp_degree=2, batch_size=3, micro_batches=2),
    split("1f1b", 4, 2, **{**TOKENS, "model_options": DROPS}, tp_degree=2, micro_batches=2,
          options={"recompute": "always", "cuts": "3"}),
    split("pipedream", 4, 2, "vgg11", batch_size=8, precision="fp64"),
    split("pipedream", 4, 2, "vgg11", batch_size=8, micro_batches=3, options={"weight_versions": "2bw"}),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.strategy}-{spec.model}")
@small_vocabulary()
def test_every_call_of_a_steady_step_is_the_predicted_one(pool: Pool, spec: RunSpec) -> None:
    assert pool.call(spec.ranks, small_steady, spec) == [expected(spec, rank) for rank in range(spec.ranks)]


# More ranks than tensors: some own none, and shards are padding alone.
LARGE = [
    *(
        (spec_of(key, ranks, "vit", batch_size=2), rank)
        for key in ("ddp", "zero1", "fairscale_oss", "fairscale_sddp", "fsdp", "fairscale_fsdp")
        for ranks, rank in ((64, 31), (1024, 1023))
    ),
    (split("filter", 1024, 64, batch_size=2), 1000),
    (split("filter", 3, 3, "cosmoflow", "cosmoflow", input_size=8, options={"form": "gathered"}), 1),
    (split("channel", 1024, 4, options={"form": "gathered"}, precision="bf16"), 3),
    (split("channel", 2, 2, "mobilenetv2", options={"split_last": True}, micro_batches=2), 0),
    (split("tensor", 64, 4, **TOKENS, options=SEQUENCE, precision="bf16"), 63),
    (split("tensor", 1024, 4, "vit", batch_size=1), 1023),
    (split("tensor", 2, 2, **{**TOKENS, "model_options": DROPS}, options={**SEQUENCE, **WHOLE_WORDS}, **AGAIN), 1),
    # The first replica's rank inside of the grid, and the last one's at a corner, along an edge and inside.
    (split("spatial", 64, 64, dataset="cifar10", batch_size=2, options={"grid": "8x8"}), 36),
    *((split("spatial", 1024, 16, "cosmoflow", "cosmoflow", input_size=13, batch_size=2, options={"grid": "4x2x2"}), rank)
      for rank in (1008, 1009, 1019)),
    *(
        # Two chunks a stage: vgg11 has blocks for four stages.
        (split(key, 1024, 4 if key == "interleaved_1f1b" else 8, "vgg11", **LONG), rank)
        for key in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "pipedream")
        for rank in (0, 509, 1023)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "rank"), LARGE, ids=lambda one: getattr(one, "strategy", None))
@small_vocabulary()
def test_fake_ranks_of_large_worlds_pass_the_predicted_traffic(spec: RunSpec, rank: int) -> None:
    assert fake_calls(spec, rank, warmup_steps=2).merged() == expected(spec, rank)


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
