"""Dry runs of pipelines: passes that are repeated in the record add what they would add if they were stepped."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.probe_records import DryRunTask
from hpcbench.worker.dry_run import repeated_passes
from hpcbench.worker.dry_run.fake_rank import record_step
from hpcbench.worker.strategies.pipeline import strategy as pipeline_strategy
from hpcbench.worker.strategies.pipeline.chunk import ModelChunk

pytestmark = pytest.mark.slow

PLAIN = {"model": "vgg11", "dataset": "digits", "model_options": {"batch_norm": False}}
TRANSFORMER = {"model": "vit", "dataset": "digits"}
CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    # Schedule, stages, micro-batches of which most are repeated.
    ("model", 2, 6, PLAIN),
    ("gpipe", 2, 8, PLAIN),
    ("gpipe", 2, 6, {**PLAIN, "options": {"recompute": "except_last"}}),
    ("gpipe", 3, 7, {**PLAIN, "batch_size": 17, "optimizer": "adam"}),
    ("gpipe", 2, 6, {"model": "resnet18", "dataset": "digits", "batch_size": 24}),
    ("1f1b", 2, 8, {**PLAIN, "options": {"recompute": "always"}, "precision": "bf16"}),
    ("1f1b", 4, 8, PLAIN),
    ("1f1b", 3, 4, {**PLAIN, "data": "host"}),
    ("1f1b", 2, 6, {**TRANSFORMER, "tp_degree": 2, "tasks_per_node": 4}),
    ("1f1b", 2, 6, {**PLAIN, "dp_degree": 2, "tasks_per_node": 4, "optimizer": "adam"}),
    ("1f1b", 4, 8, {**PLAIN, "options": {"stage_replicas": "2-1-1"}}),
    ("interleaved_1f1b", 2, 6, {**PLAIN, "optimizer": "adam"}),
    ("zero_bubble", 2, 6, PLAIN),
    ("pipedream", 2, 6, {**PLAIN, "dataset": "cifar10"}),
    ("pipedream", 4, 9, {**PLAIN, "dataset": "cifar10", "batch_size": 18}),
    ("pipedream", 3, 6, {**PLAIN, "dataset": "cifar10", "options": {"vertical_sync": True}, "optimizer": "adam"}),
    ("pipedream", 3, 6, {**PLAIN, "dataset": "cifar10", "options": {"weight_versions": "2bw"}}),
    ("pipedream", 3, 6, {**PLAIN, "dataset": "cifar10", "data": "host"}),
    ("pipedream", 2, 6, {**PLAIN, "dataset": "cifar10", "dp_degree": 2, "tasks_per_node": 4}),
]


def figures(spec: RunSpec, rank: int, *, repeats: bool) -> Any:
    recorder = record_step(DryRunTask(index=0, spec=spec, device="cuda"), rank, repeats=repeats)
    counts = recorder.operators, recorder.host_syncs, sorted(recorder.host_sync_sites)
    return recorder.peak_bytes, recorder.peak_layer, counts, Counter(recorder.calls)


@pytest.mark.parametrize(("strategy", "stages", "micro_batches", "more"), CASES)
def test_repeated_passes_are_exact(
    monkeypatch: pytest.MonkeyPatch, strategy: str, stages: int, micro_batches: int, more: dict[str, Any]
) -> None:
    values = {"batch_size": 2 * micro_batches, "tasks_per_node": stages, **more}
    spec = RunSpec(strategy=strategy, pp_degree=stages, micro_batches=micro_batches, **values)
    stepped: list[int] = []
    forward = ModelChunk.forward

    def counted(chunk: ModelChunk, *arguments: Any) -> Any:
        stepped.append(1)
        return forward(chunk, *arguments)

    monkeypatch.setattr(ModelChunk, "forward", counted)
    for rank in range(spec.ranks):
        stepped.clear()
        repeated = figures(spec, rank, repeats=True)
        few = len(stepped)
        stepped.clear()
        assert repeated == figures(spec, rank, repeats=False)
        assert strategy == "zero_bubble" or few < len(stepped)


@pytest.mark.parametrize("more", [{}, {"optimizer": "adam", "precision": "bf16"}])
def test_schedules_with_equal_stages_share_their_recorded_passes(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(repeated_passes, "_shared_records", {})
    values: dict[str, Any] = {
        "batch_size": 16,
        "micro_batches": 8,
        "tasks_per_node": 2,
        "pp_degree": 2,
        **PLAIN,
        **more,
    }
    for rank in range(2):
        figures(RunSpec(strategy="gpipe", **values), rank, repeats=True)
    # Setup runs each chunk once.
    monkeypatch.setattr(pipeline_strategy, "run_chunks_once", lambda *_: None)
    monkeypatch.setattr(ModelChunk, "forward", lambda *_: pytest.fail("gpipe has stepped this pass"))
    shared = [figures(RunSpec(strategy="1f1b", **values), rank, repeats=True) for rank in range(2)]
    monkeypatch.undo()
    assert shared == [figures(RunSpec(strategy="1f1b", **values), rank, repeats=False) for rank in range(2)]


@pytest.mark.parametrize(
    "change", [{"batch_size": 24}, {"precision": "bf16"}, {"options": {"cuts": "3"}}, {"data": "host"}]
)
def test_other_passes_are_not_shared(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    monkeypatch.setattr(repeated_passes, "_shared_records", {})
    values: dict[str, Any] = {
        "model": "vgg11", "dataset": "cifar10", "batch_size": 16, "micro_batches": 8, "tasks_per_node": 2, "pp_degree": 2,
    }  # fmt: skip
    figures(RunSpec(strategy="gpipe", **values), 0, repeats=True)
    other = RunSpec(strategy="1f1b", **{**values, **change})
    assert figures(other, 0, repeats=True) == figures(other, 0, repeats=False)


def test_statistics_of_the_whole_batch_are_stepped() -> None:
    spec = RunSpec(
        model="resnet18", dataset="digits", strategy="gpipe", batch_size=16, tasks_per_node=2, pp_degree=2,
        micro_batches=4, options={"batch_norm": "deferred"},
    )  # fmt: skip
    assert figures(spec, 1, repeats=True) == figures(spec, 1, repeats=False)
