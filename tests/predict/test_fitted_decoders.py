"""``predict``, ``plan`` and ``recommend`` have one answer for a decoder's run on GPUs of published runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.decoder.layout_search import NEEDS_MORE_MEMORY
from hpcbench.predict.fitted_decoders import layout_of_run, machine_of_profile, run_point
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.oracle_requests import LayoutRecommendation, RecommendRequest, recommend_layouts
from hpcbench.predict.prediction import Prediction
from hpcbench.strategies.resolve import PartitionLimits, resolve_point

CLUSTERS = ("h100-80gb-ib", "h200-141gb-ib", "a100-80gb-ib")


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("model", "batch"), [("llama_1b", 1), ("llama_8b", 2), ("mpt_1b", 4), ("playbook_3b", 2)])
@pytest.mark.parametrize("gpus", [1, 8])
def test_a_recommended_run_is_predicted_alike(cluster: str, model: str, batch: int, gpus: int) -> None:
    wish = RecommendRequest(model, "tokens", tasks_per_node=gpus, batch_size=batch)
    found = recommend_layouts(wish, load_cluster(cluster)[0], Path())
    assert isinstance(found, LayoutRecommendation)
    forecast, strategies = Forecast(load_cluster(cluster)[0]), set()
    for row in found.rankings[1].layouts:
        if row.priced_only is not None:
            continue
        spec = run_of(model, gpus, row.layout.sequence, run_point(row.layout))
        predicted = forecast.predict(spec)
        assert isinstance(predicted, Prediction)
        strategies.add(spec.strategy)
        assert layout_of_run(spec) == row.layout
        assert (predicted.step_time_s, predicted.interval.low, predicted.interval.high) == pytest.approx(
            (row.step_time_s, row.step_time_low_s, row.step_time_high_s)
        )
        assert predicted.peak_memory_bytes == pytest.approx(row.peak_memory_gib * 2**30)
        assert predicted.fits is True
        assert predicted.rests_on.kind == "published runs"
    assert strategies or model == "llama_8b"
    assert gpus == 1 or {"fsdp", "zero1"} & strategies


def test_shards_that_only_other_programs_hold_are_priced_only() -> None:
    """70B over 512 GPUs: hpcbench's loop accumulates unsharded gradients, torchtitan's does not."""
    wish = RecommendRequest("llama_70b", "tokens", nodes=(64,))
    found = recommend_layouts(wish, load_cluster("h100-80gb-ib")[0], Path())
    assert isinstance(found, LayoutRecommendation)
    layouts = found.rankings[64].layouts
    rows = [row for row in layouts if row.priced_only == NEEDS_MORE_MEMORY and row.layout.shards > 1]
    assert any(row.layout.accumulation > 1 for row in rows)
    assert all((row.layout.software, row.layout.context) == ("torchtitan", 1) for row in rows)
    point = {**run_point(rows[0].layout), "nodes": 64, "tasks_per_node": 8}
    predicted = Forecast(load_cluster("h100-80gb-ib")[0]).predict(run_of("llama_70b", 8, 8192, point))
    assert isinstance(predicted, Prediction)
    assert predicted.fits is False


def run_of(model: str, gpus: int, sequence: int, point: dict[str, Any]) -> RunSpec:
    shared = {"model": model, "dataset": "tokens", "precision": "bf16", "optimizer": "adamw", "input_size": sequence}
    spec = resolve_point({**shared, "nodes": 1, "tasks_per_node": gpus, **point}, PartitionLimits("any"))
    assert isinstance(spec, RunSpec)
    return spec


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "fp32"}, {"optimizer": "sgd"}, {"compile": True}, {"model": "gpt_1_3b"}, {"strategy": "horovod"},
        {"model_options": {"dropout": 0.1}},
    ],
)  # fmt: skip
def test_other_runs_are_priced_by_the_profile(change: dict[str, Any]) -> None:
    spec = run_of("llama_1b", 8, 8192, {"strategy": "ddp", "batch_size": 1, "dp_degree": 8})
    assert layout_of_run(spec) is not None
    changed = msgspec.structs.replace(spec, **change)
    assert layout_of_run(changed) is None
    predicted = Forecast(load_cluster("h100-80gb-ib")[0]).predict(changed)
    assert not isinstance(predicted, Prediction) or predicted.rests_on.kind == "profile"


def test_the_interval_contains_every_software_that_was_learned() -> None:
    """hpcbench's loop is in no published run: nanotron, fsdp and torchtitan lie within 2 % here, Megatron 21 % below."""
    spec = run_of("llama_1b", 1, 8192, {"strategy": "single", "batch_size": 1})
    predicted = Forecast(load_cluster("h100-80gb-ib")[0]).predict(spec)
    assert isinstance(predicted, Prediction)
    assert predicted.interval.low < 0.27 < predicted.step_time_s < 0.34 < predicted.interval.high


@pytest.mark.parametrize(("cluster", "factor"), [("h100-80gb-ib", 2.0), ("h100-96gb-roce", 2.0), ("a100-80gb-ib", 0.0)])
def test_the_peak_in_8_bit_is_that_of_the_profile(cluster: str, factor: float) -> None:
    """The H100 of 500 W is held below its peaks in both precisions."""
    node = machine_of_profile(load_cluster(cluster)[0], None, 8).device
    assert node.fp8_flops == pytest.approx(factor * node.peak_flops, rel=1e-3)
    assert node.fp4_flops == 0.0
