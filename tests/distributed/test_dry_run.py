"""Dry runs: every strategy on fake tensors, DDP's reducer against the real one, and peaks against the oracle's."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch.distributed as dist

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.strategy_cost import count_operators, resolve_cost
from hpcbench.results.probe_records import DryRunAnswer, DryRunTask
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.layer_table import read_shipped_table
from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.dry_run.__main__ import answer_task
from hpcbench.worker.dry_run.fake_rank import record_step
from hpcbench.worker.measure.traffic_recorder import TrafficRecorder
from tests.distributed.pool import Pool
from tests.distributed.test_traffic import TIED, spec_of, started, table_of
from tests.parity_cases import parity_cases

pytestmark = pytest.mark.slow

MODELLED = {"ddp": ["reducer"], "zero1": ["reducer"]}
FAKEABLE = [key for key, entry in STRATEGIES.items() if entry.library_name in (None, "torch")]


def dry_run(spec: RunSpec, device: str = "cuda") -> DryRunAnswer:
    return answer_task(DryRunTask(index=0, spec=spec, device=device))


@pytest.mark.parametrize("key", FAKEABLE)
def test_every_strategy_is_stepped(key: str) -> None:
    entry, case = STRATEGIES[key], parity_cases(key)[0]
    degrees: dict[str, Any] = {entry.own_degree: case.ranks * case.devices_per_task} if entry.own_degree else {}
    spec = RunSpec(
        model=case.model, dataset=case.dataset, strategy=key, batch_size=16, tasks_per_node=case.ranks,
        micro_batches=case.micro_batches, devices_per_task=case.devices_per_task, options=dict(case.options),
        model_options=dict(case.model_options), **degrees,
    )  # fmt: skip
    answer = dry_run(spec)
    assert (answer.outcome, answer.reason) == ("ok", None)
    assert answer.figures is not None
    assert answer.figures.modelled == MODELLED.get(key, [])
    assert (answer.figures.host_syncs, answer.figures.host_sync_sites) == (0, [])
    assert (answer.figures.collectives > 0) == (case.ranks > 1)
    assert answer.figures.peak_memory_bytes > 0
    # `plan` warns by the estimate, from below: a warning that is wrong costs more than one that is missing.
    assert 0.6 <= count_operators(spec, table_of(spec)) / answer.figures.operators <= 1.1


def test_a_run_that_cannot_be_built_is_refused_with_its_own_message() -> None:
    answer = dry_run(spec_of("tensor", 8, "vit", tp_degree=8, dp_degree=1))
    assert answer.outcome == "unsupported"
    assert "a transformer block of vit has 4 heads, tp_degree is 8" in str(answer.reason)


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


def case(strategy: str, model: str, rank: int, ranks: int = 1, **more: Any) -> tuple[RunSpec, int]:
    """Rank ``rank`` of a run on GPUs with Adam; replicas fill what the other degrees leave of ``ranks``."""
    dataset = {"cosmoflow": "cosmoflow", "resnet18": "cifar10", "vit": "cifar10"}.get(model, "tokens")
    others = more.get("tp_degree", 1) * more.get("pp_degree", 1) * more.get("sp_degree", 1)
    spec = RunSpec(
        strategy=strategy, model=model, dataset=dataset, nodes=max(1, ranks // 8), tasks_per_node=min(8, ranks),
        dp_degree=ranks // others, **{"optimizer": "adam", "batch_size": 8, **more},
    )  # fmt: skip
    return spec, rank


FOUR: dict[str, Any] = {"pp_degree": 4, "micro_batches": 4}
RECOMPUTED = {"activation_checkpointing": True}
PEAKS = [
    case("single", "cosmoflow", 0, batch_size=4),
    case("single", "vit", 0, batch_size=64, precision="fp16"),
    case("single", "llama_1b", 0, batch_size=1, input_size=8192, precision="bf16", **RECOMPUTED),
    case("ddp", "resnet18", 1023, 1024, batch_size=64),
    case("zero1", "vit", 5, 256, batch_size=64),
    case("fsdp", "vit", 511, 512, batch_size=64),
    case("fsdp", "gpt_1_3b", 0, 32, batch_size=1, precision="bf16_params", **RECOMPUTED),
    pytest.param(
        *case("fsdp", "gpt_17b", 0, 32, batch_size=1, precision="bf16_params", **RECOMPUTED), marks=pytest.mark.soak
    ),
    # autocast would keep the cast of every block's gathered weights until the forward pass ends: 1.56 times as much.
    case("fsdp", "gpt_350m", 3, 4, precision="bf16"),
    case("filter", "cosmoflow", 3, 64, tp_degree=4),
    case("channel", "resnet18", 100, 128, batch_size=64, tp_degree=2, options={"form": "gathered"}),
    case("spatial", "resnet18", 0, 4, sp_degree=4, batch_size=64, precision="bf16"),
    case("tensor", "gpt_1_3b", 1, 256, tp_degree=8, batch_size=2),
    case("model", "cosmoflow", 3, 4, pp_degree=4),
    case("gpipe", "resnet18", 0, 128, **FOUR),
    case("1f1b", "gpt_13b", 21, 64, tp_degree=4, pp_degree=4, batch_size=8, micro_batches=8, precision="bf16_params"),
    case("1f1b", "gpt_350m", 0, 4, precision="bf16", **FOUR),
    case("interleaved_1f1b", "cosmoflow", 7, 8, pp_degree=2, micro_batches=4),
    case("zero_bubble", "vit", 63, 64, **FOUR),
    case("pipedream", "cosmoflow", 0, 8, **FOUR),
]


@pytest.mark.parametrize(
    ("spec", "rank"), PEAKS, ids=lambda one: f"{one.strategy}-{one.model}" if isinstance(one, RunSpec) else None
)
def test_the_predicted_peak_on_a_gpu_is_that_of_a_dry_run(spec: RunSpec, rank: int) -> None:
    """``test_live_memory.py`` compares predictions with torch's allocator, on CPUs."""
    table = read_shipped_table(spec.model, spec.dataset)
    assert table is not None
    recorder = record_step(DryRunTask(index=0, spec=spec, device="cuda"), rank)
    predicted_bytes = resolve_cost(spec.strategy).memory(spec, table, rank).on("cuda").total_bytes
    assert recorder.peak_bytes == pytest.approx(predicted_bytes, rel=0.1)
    if spec.strategy == "fsdp":
        # A rank that held the whole model while it is set up would end out of memory before the first step.
        whole = sum(prod(tensor.shape) * tensor.bytes_per_element for tensor in table.parameter_tensors)
        assert recorder.setup_peak_bytes <= 1.1 * recorder.peak_bytes
        assert recorder.setup_peak_bytes < whole


def test_powersgd_is_stepped_with_its_own_hook() -> None:
    plain, compressed = (
        dry_run(spec_of("ddp", 2, "vit", options={"compression": kind}), "cpu").figures for kind in ("none", "powersgd")
    )
    assert plain is not None
    assert compressed is not None
    assert compressed.collectives > plain.collectives
