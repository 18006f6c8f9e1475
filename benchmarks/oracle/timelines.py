"""The ranks of a step, one by one: how long each computes and where it waits, measured and predicted.

Of a pipeline's rank the waits are those before its first action, between two of them and after its last one::

    rank 0   F0 F1 .... B0 B1 ..     .: between, after
    rank 1   .. F0 B0 F1 B1 ....     .: before, after

Of any other rank they are the time in which it waits for its collectives, and through them for other ranks.
"""

from __future__ import annotations

import gzip
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

import msgspec

from benchmarks.oracle import cases
from benchmarks.oracle.registered import Score
from benchmarks.oracle.scoring import ORACLE_NAME
from hpcbench.config.run_spec import RunSpec, strategy_label
from hpcbench.fileio import write_atomic
from hpcbench.predict.cost_model import CostModel
from hpcbench.predict.machine import Machine
from hpcbench.predict.prediction import NotPredicted
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import RunResult
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.pipeline.rank_cost import PipelineRank
from hpcbench.strategies.pipeline.schedule_simulator import simulate_schedule
from hpcbench.strategies.pipeline.schedules import schedule_actions
from hpcbench.strategies.pipeline.step_cost import PipelineStep
from hpcbench.units import format_percent


class RankParts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The parts of one rank's step, in seconds."""

    rank: int
    compute_s: float
    before_s: float = 0.0
    """From the first action of any rank to its own first one."""
    wait_s: float = 0.0
    """Between two actions of a pipeline's rank; of another rank for collectives."""
    after_s: float = 0.0
    """From its last action to the last one of any rank."""


class MeasuredTimeline(msgspec.Struct, kw_only=True):
    """The ranks of a configuration: medians over launches."""

    config_id: str
    spec: RunSpec
    ranks: list[RankParts]


def path_of(score: Score) -> Path:
    """The file of the measured ranks of a score."""
    return score.folder / f"{score.name}_timelines.json.gz"


def read(score: Score) -> list[MeasuredTimeline]:
    """The measured ranks of a score."""
    return msgspec.json.decode(gzip.decompress(path_of(score).read_bytes()), type=list[MeasuredTimeline])


def write(score: Score, tree: ClusterTree) -> None:
    """Write the ranks of all cases of ``score`` that have several and were profiled, from the results in ``tree``.

    Configurations without results there stay as an earlier slice of the score wrote them. A step of an asynchronous
    pipeline begins while the one before is under way: it is no timeline of its own.
    """
    timelines = {timeline.config_id: timeline for timeline in read(score)} if path_of(score).exists() else {}
    for case in cases.read(score.cases).cases:
        results = [result for run_id in case.run_ids if (result := tree.read_result(run_id)) is not None]
        launches = [parts for result in results if (parts := measured_parts(result))]
        if launches and case.spec.ranks > 1 and get_strategy(case.spec.strategy).pipeline.staleness is None:
            ranks = [_median_parts(own) for own in zip(*launches, strict=True)]
            timelines[case.config_id] = MeasuredTimeline(config_id=case.config_id, spec=case.spec, ranks=ranks)
    text = msgspec.json.format(msgspec.json.encode([*timelines.values()]), indent=1) + b"\n"
    write_atomic(path_of(score), cases.compressed(text))


def measured_parts(result: RunResult) -> list[RankParts]:
    """Return the parts of every rank; none where the run was not profiled, or its library's calls cannot be seen."""
    if result.timeline is not None and result.timeline.measured_s is not None:
        return [
            _pipeline_parts(own.rank, [(span.begin_s, span.end_s) for span in own.measured], result.timeline.measured_s)
            for own in result.timeline.ranks
        ]
    phases = [(entry["rank"], entry.get("phases") or {}) for entry in result.ranks]
    if any(parts.get("compute_s") is None or not parts.get("exposed_comm_s") for _, parts in phases):
        return []
    return [
        RankParts(rank=rank, compute_s=parts["compute_s"], wait_s=parts["exposed_comm_s"]) for rank, parts in phases
    ]


def _pipeline_parts(rank: int, spans_s: Sequence[tuple[float, float]], step_s: float) -> RankParts:
    """Return the parts of a rank from the begin and end of its actions, in a step of ``step_s``."""
    begin_s, end_s = spans_s[0][0], spans_s[-1][1]
    compute_s = sum(end - begin for begin, end in spans_s)
    return RankParts(
        rank=rank,
        compute_s=compute_s,
        before_s=begin_s,
        wait_s=max(end_s - begin_s - compute_s, 0.0),
        after_s=max(step_s - end_s, 0.0),
    )


_PARTS = ("compute_s", "before_s", "wait_s", "after_s")


def _median_parts(launches: Sequence[RankParts]) -> RankParts:
    medians = {name: median(getattr(parts, name) for parts in launches) for name in _PARTS}
    return RankParts(rank=launches[0].rank, **medians)


def predicted_parts(spec: RunSpec, table: LayerTable, machine: Machine, ranks: Iterable[int]) -> list[RankParts]:
    """Return the parts of ``ranks`` as the oracle predicts them."""
    cost_model = CostModel(machine, spec)
    if get_strategy(spec.strategy).pipeline.records_timeline:
        step = PipelineStep(PipelineRank(spec, table, 0), cost_model)
        actions = schedule_actions(spec.strategy, step.layout, spec.micro_batches)
        timeline = simulate_schedule(actions, step.layout, *step.schedule_costs(spec.micro_batches))
        return [
            _pipeline_parts(rank, [(span.begin, span.end) for span in spans], timeline.end)
            for rank, spans in zip(ranks, timeline.ranks, strict=True)
        ]
    whole = resolve_cost(spec.strategy).step(spec, table, cost_model)
    wait_s = whole.exposed_comm_s + whole.straggler_s
    return [RankParts(rank=rank, compute_s=whole.compute_s, wait_s=wait_s) for rank in ranks]


def predicted_timelines(score: Score, measured: Sequence[MeasuredTimeline]) -> Iterator[list[RankParts]]:
    """Predict the ranks of every configuration from the score's calibrations."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        bed = score.bed(Path(folder))
        bed.describe(score.scored_mbit)
        os.chdir(folder)
        try:
            forecast = cases.forecasts_by_kind(score, Path(folder))[ORACLE_NAME].forecast(bed.cluster)
            assert not isinstance(forecast, NotPredicted), forecast
            for timeline in measured:
                table = forecast.table(timeline.spec)
                assert not isinstance(table, NotPredicted), table
                ranks = [parts.rank for parts in timeline.ranks]
                yield predicted_parts(timeline.spec, table, forecast.machine(timeline.spec), ranks)
        finally:
            os.chdir(before)


COLUMNS = ("configurations", "computation", "before its first action", "between or for collectives", "after its last")


def rows(score: Score) -> dict[str, list[str]]:
    """Return by strategy the mean over ranks of the differences, in percent of the measured step of the rank."""
    measured = read(score)
    counts: dict[str, int] = defaultdict(int)
    errors: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for timeline, predicted in zip(measured, predicted_timelines(score, measured), strict=True):
        label = strategy_label(timeline.spec)
        counts[label] += 1
        for there, said in zip(timeline.ranks, predicted, strict=True):
            step_s = there.compute_s + there.before_s + there.wait_s + there.after_s
            pairs = [(getattr(said, name), getattr(there, name)) for name in _PARTS]
            errors[label].append(tuple((told - was) / step_s for told, was in pairs))
    return {
        f"`{label}`": [str(counts[label]), *(_error_text(part_errors) for part_errors in zip(*own, strict=True))]
        for label, own in errors.items()
    }


def _error_text(errors: Sequence[float]) -> str:
    """``4% (-2%)``: mean absolute and mean signed difference."""
    return (
        f"{format_percent(fmean(map(abs, errors)))} ({format_percent(fmean(errors), sign='+')})" if any(errors) else ""
    )
