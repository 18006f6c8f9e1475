"""Ranks one by one: their measured parts, and those that the oracle predicts."""

from __future__ import annotations

from typing import Any

from benchmarks.oracle.timelines import RankParts, measured_parts
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.results.schema import PipelineTimeline, RankTimeline, RunResult, TimelineSpan
from hpcbench.strategies.resolve import PartitionLimits, resolve_point


def spec_of(strategy: str, **more: Any) -> RunSpec:
    point = {"model": "vgg11", "dataset": "cifar10", "batch_size": 8, "strategy": strategy} | more
    spec = resolve_point(point, PartitionLimits("any"))
    assert isinstance(spec, RunSpec), spec
    return spec


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
