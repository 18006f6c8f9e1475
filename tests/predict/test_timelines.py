"""Ranks one by one: their measured parts, and those that the oracle predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.oracle import cases, timelines
from benchmarks.oracle.cases import ScoreCase, ScoreCases
from benchmarks.oracle.registered import BOX
from benchmarks.oracle.scoring import ORACLE_NAME, PredictorResult
from benchmarks.oracle.timelines import RankParts, measured_parts, predicted_parts
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.predict.machine import nominal_machine
from hpcbench.predict.prediction import predict
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import PipelineTimeline, RankTimeline, RunResult, TimelineSpan
from hpcbench.strategies.layer_table import LayerTable, read_shipped_table
from hpcbench.strategies.resolve import PartitionLimits, resolve_point

PROFILE, _ = load_cluster("slurmbox")
MACHINE = nominal_machine(PROFILE)


def spec_of(strategy: str, **more: Any) -> RunSpec:
    point = {"model": "vgg11", "dataset": "cifar10", "batch_size": 8, "strategy": strategy} | more
    spec = resolve_point(point, PartitionLimits("any"))
    assert isinstance(spec, RunSpec), spec
    return spec


def table() -> LayerTable:
    shipped = read_shipped_table("vgg11", "cifar10")
    assert shipped is not None
    return shipped


def result_of(spec: RunSpec, **more: Any) -> RunResult:
    return RunResult(
        run_id=run_id(spec), config_id=config_id(spec), attempt=1, sweep="s", cluster="oraclebox", status="ok",
        spec=spec, **more,
    )  # fmt: skip


def timeline(spans: dict[int, list[tuple[float, float]]]) -> PipelineTimeline:
    """Of every rank the begins and ends of its actions."""
    ranks = [
        RankTimeline(rank=rank, measured=[TimelineSpan("F", 0, 0, begin, end) for begin, end in own])
        for rank, own in spans.items()
    ]
    return PipelineTimeline(measured_s=max(own[-1][1] for own in spans.values()), ranks=ranks)


def test_a_rank_of_a_pipeline_waits_before_between_and_after_its_actions() -> None:
    # rank 0   FF....BB
    # rank 1   ..FF.B..
    spans = {0: [(0.0, 2.0), (6.0, 8.0)], 1: [(2.0, 4.0), (5.0, 6.0)]}
    result = result_of(spec_of("gpipe", nodes=2, micro_batches=2), timeline=timeline(spans))
    assert measured_parts(result) == [
        RankParts(rank=0, compute_s=4.0, before_s=0.0, wait_s=4.0, after_s=0.0),
        RankParts(rank=1, compute_s=3.0, before_s=2.0, wait_s=1.0, after_s=2.0),
    ]


def test_other_ranks_wait_for_collectives() -> None:
    ranks: list[dict[str, Any]] = [
        {"rank": rank, "phases": {"compute_s": 1.0 + rank, "exposed_comm_s": 2.0 - rank}} for rank in range(2)
    ]
    spec = spec_of("ddp", nodes=2)
    assert measured_parts(result_of(spec, ranks=ranks)) == [
        RankParts(rank=0, compute_s=1.0, wait_s=2.0),
        RankParts(rank=1, compute_s=2.0, wait_s=1.0),
    ]
    ranks[1]["phases"] = None
    assert measured_parts(result_of(spec, ranks=ranks)) == []


@pytest.mark.parametrize("strategy", ["gpipe", "1f1b", "ddp", "filter"])
def test_the_predicted_parts_of_a_rank_make_up_its_step(strategy: str) -> None:
    more = {"gpipe": {"micro_batches": 4}, "1f1b": {"micro_batches": 4}, "filter": {"tp_degree": 4}}.get(strategy, {})
    spec = spec_of(strategy, nodes=4, **more)
    parts = predicted_parts(spec, table(), MACHINE, range(4))
    assert [own.rank for own in parts] == [0, 1, 2, 3]
    steps_s = [own.compute_s + own.before_s + own.wait_s + own.after_s for own in parts]
    whole_s = predict(spec, table(), MACHINE).step_time_s
    # The update and what no rank does in turns come on top in a pipeline.
    assert all(0.7 * whole_s < step_s <= whole_s * (1 + 1e-9) for step_s in steps_s)
    begins = [own.before_s for own in parts]
    # A stage begins when the one before has sent.
    assert begins == sorted(begins)
    assert (begins[-1] > 0) == (strategy in ("gpipe", "1f1b"))


def test_ranks_are_scored_from_the_files_of_a_score(tmp_path: Path) -> None:
    score, tree = BOX._replace(folder=tmp_path), ClusterTree(tmp_path / "oraclebox")
    spec = spec_of("ddp", nodes=2)
    (parts, _) = predicted_parts(spec, table(), nominal_machine(PROFILE), range(2))
    ranks = [
        {"rank": rank, "phases": {"compute_s": parts.compute_s, "exposed_comm_s": parts.wait_s}} for rank in range(2)
    ]
    result = result_of(spec, ranks=ranks)
    tree.write_result(result)
    case = ScoreCase(
        config_id=config_id(spec), spec=spec, predicted_step_time_s=1.0, measured_step_times_s=[1.0],
        run_ids=[result.run_id], said={ORACLE_NAME: PredictorResult(step_time_s=1.0)},
    )  # fmt: skip
    cases.write(score.cases, ScoreCases(sweep="s", sources=[], cases=[case]))
    timelines.write(score, tree)
    (stored,) = timelines.read(score)
    assert [own.rank for own in stored.ranks] == [0, 1]
    # The box's profile has other links than the one of the planted times.
    ((name, cells),) = timelines.rows(score).items()
    assert name == "`ddp`"
    assert cells[0] == "1"
    # Equal computation, and no waits before or after: nothing is written.
    assert cells[1:3] == ["", ""]
    assert cells[3].endswith("%)")
