"""Dry runs: every strategy on fake tensors, against real ranks' traffic and real tensors' bytes."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.results.probe_records import DryRunAnswer, DryRunTask
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.layer_table import read_shipped_table
from hpcbench.strategies.traffic import Traffic, merge_calls
from hpcbench.worker.dry_run.__main__ import answer_task
from hpcbench.worker.dry_run.fake_rank import record_step
from hpcbench.worker.measure.traffic_recorder import TrafficRecorder
from tests.distributed.pool import Pool
from tests.distributed.test_live_memory import LARGE, peak_bytes, shared
from tests.distributed.test_traffic import CASES, TIED, expected, spec_of, started, table_of
from tests.library_stand_ins import library_stand_ins
from tests.parity_cases import parity_cases

pytestmark = pytest.mark.slow

ROOT = str(Path(__file__).resolve().parents[2])
CPU, FAKE_GPU = torch.device("cpu"), torch.device("cpu", 0)


def dry_run(spec: RunSpec, device: str = "cpu") -> DryRunAnswer:
    return answer_task(DryRunTask(index=0, spec=spec, device=device, model_folder=ROOT))


REFUSALS = {
    ("tensor", 8): "a transformer block of vit has 4 heads, tp_degree is 8",
    ("interleaved_1f1b", 8): "interleaved_1f1b on 8 stages x 2 chunks, but vgg11 on digits has 12 blocks",
}
MODELLED = {"ddp": ["reducer"], "zero1": ["reducer"]}
FAKEABLE = [key for key, entry in STRATEGIES.items() if entry.library_name in (None, "torch")]


@pytest.mark.parametrize(("ranks", "device"), [(2, "cpu"), (8, "cuda")])
@pytest.mark.parametrize("key", FAKEABLE)
def test_every_strategy_is_stepped_or_refused_with_its_own_message(key: str, ranks: int, device: str) -> None:
    entry, case = STRATEGIES[key], parity_cases(key)[0]
    ranks = ranks if case.ranks > 1 else 1
    degrees: dict[str, Any] = {entry.own_degree: ranks * case.devices_per_task} if entry.own_degree else {}
    spec = RunSpec(
        model=case.model, dataset=case.dataset, strategy=key, batch_size=16, tasks_per_node=ranks,
        micro_batches=case.micro_batches, devices_per_task=case.devices_per_task, options=dict(case.options),
        model_options=dict(case.model_options), **degrees,
    )  # fmt: skip
    answer = dry_run(spec, device)
    if (key, ranks) in REFUSALS:
        assert answer.outcome == "unsupported"
        assert REFUSALS[key, ranks] in str(answer.reason)
        return
    assert (answer.outcome, answer.reason) == ("ok", None)
    assert answer.figures is not None
    assert answer.figures.modelled == MODELLED.get(key, [])
    assert (answer.figures.host_syncs, answer.figures.host_sync_sites) == (0, [])
    assert answer.figures.operators > 50
    assert (answer.figures.collectives > 0) == (ranks > 1)
    assert answer.figures.peak_memory_bytes > 0


@pytest.mark.parametrize(("key", "ranks", "model", "more"), CASES)
def test_every_call_is_the_predicted_one(key: str, ranks: int, model: str, more: dict[str, Any]) -> None:
    """``test_traffic.py`` compares the same prediction with the calls of real ranks."""
    spec = spec_of(key, ranks, model, **more)
    with library_stand_ins(spec, CPU):
        recorder = record_step(DryRunTask(index=0, spec=spec, device="cpu"), ranks - 1)
    assert merge_calls(recorder.calls) == expected(spec, ranks - 1)


def calls_in_order(spec: RunSpec, group: dist.ProcessGroup | None) -> list[Traffic]:
    strategy, feed = started(spec, group)
    with TrafficRecorder() as recorder:
        strategy.step(feed, 3)
    calls: list[Traffic] = recorder.calls
    return calls


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("resnet18", {"micro_batches": 2}),
        ("vgg11", {"options": {"bucket_cap_mb": 1.0}}),
        ("vit", {"options": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.25}}),
        ("gpt", {**TIED, "options": {"bucket_cap_mb": 0.5}}),
    ],
)
def test_the_model_of_the_reducer_calls_what_the_reducer_does(pool: Pool, model: str, more: dict[str, Any]) -> None:
    spec = spec_of("ddp", 2, model, **more)
    fake = record_step(DryRunTask(index=0, spec=spec, device="cpu"), 1)
    assert [fake.calls] * 2 == pool.call(2, calls_in_order, spec)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("single", 1, "vgg11", batch_size=64, optimizer="adam"),
        spec_of("ddp", 2, "vit", **LARGE, optimizer="adam"),
        spec_of("ddp", 2, "vgg11", **LARGE, options={"gradient_as_bucket_view": True}),
        spec_of("zero1", 2, "vit", **LARGE, optimizer="adam"),
        spec_of("fairscale_sddp", 2, "vit", **LARGE, optimizer="adam"),
        spec_of("fsdp", 4, "vit", **LARGE, optimizer="adam"),
        spec_of("fsdp", 4, "vgg11", **LARGE, micro_batches=4, optimizer="adam"),
        spec_of("fairscale_fsdp", 4, "vit", **LARGE, optimizer="adam"),
        RunSpec(model="resnet18", dataset="cifar10", strategy="single", batch_size=64),
        shared("filter", 2, "vgg11", batch_size=64, optimizer="adam"),
        shared("channel", 2, "vgg11", dp=2, batch_size=64, options={"form": "gathered"}),
        shared("tensor", 2, "vit", batch_size=64, optimizer="adam"),
    ],
    ids=lambda spec: f"{spec.strategy}-{spec.model}",
)
def test_the_peak_is_that_of_real_tensors(spec: RunSpec) -> None:
    rank = spec.ranks - 1
    with library_stand_ins(spec, CPU):
        fake = record_step(DryRunTask(index=0, spec=spec, device="cpu"), rank)
    measured = peak_bytes(spec, rank)
    predicted = resolve_cost(spec.strategy).memory(spec, table_of(spec), rank).total_bytes
    print(f"{spec.strategy} {spec.model} {fake.peak_bytes} {measured} {predicted} {fake.peak_bytes / measured:.3f}")
    assert fake.peak_bytes == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("key", ["fsdp", "fairscale_fsdp"])
@pytest.mark.parametrize(("model", "batch_size"), [("vgg11", 8), ("gpt", 8), ("gpt_17b", 1)])
def test_the_setup_of_shards_holds_no_more_than_a_step(key: str, model: str, batch_size: int) -> None:
    """At most 1.1 times the peak of a step: the bytes at set-up are lower than those of a step, in most cases by far."""
    dataset = "cifar10" if model == "vgg11" else "tokens"
    spec = RunSpec(
        model=model, dataset=dataset, strategy=key, batch_size=batch_size, optimizer="adam", tasks_per_node=8, nodes=4,
        dp_degree=32,
    )  # fmt: skip
    with library_stand_ins(spec, FAKE_GPU):
        recorder = record_step(DryRunTask(index=0, spec=spec, device="cuda"), 0)
    whole = sum(prod(tensor.shape) * tensor.bytes_per_element for tensor in table_of(spec).parameter_tensors)
    print(
        f"{key} {model}: {recorder.setup_peak_bytes / 1e9:.3f} GB at set-up, {recorder.peak_bytes / 1e9:.3f} GB in a step"
    )
    assert recorder.setup_peak_bytes <= 1.1 * recorder.peak_bytes
    assert recorder.setup_peak_bytes < whole


def test_bf16_keeps_no_copies_of_sharded_weights() -> None:
    """autocast would keep the cast of every block's gathered weights until the forward pass ends: 1.56 times as much."""
    spec = RunSpec(
        model="gpt_350m", dataset="tokens", strategy="fsdp", batch_size=1, precision="bf16", tasks_per_node=8, nodes=4,
        dp_degree=32, activation_checkpointing=True,
    )  # fmt: skip
    recorder = record_step(DryRunTask(index=0, spec=spec, device="cuda"), 0)
    table = read_shipped_table(spec.model, spec.dataset)
    assert table is not None
    predicted_bytes = resolve_cost("fsdp").memory(spec, table, 0).total_bytes
    assert recorder.peak_bytes <= 1.1 * predicted_bytes


def test_powersgd_is_stepped_with_its_own_hook() -> None:
    plain, compressed = (
        dry_run(spec_of("ddp", 2, "vit", options={"compression": kind})).figures for kind in ("none", "powersgd")
    )
    assert plain is not None
    assert compressed is not None
    assert compressed.collectives > plain.collectives
