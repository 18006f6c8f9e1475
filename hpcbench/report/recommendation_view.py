"""Recommended strategies, or layouts of a decoder, per number of nodes: tables, JSON, and a sweep of the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import expm1
from operator import attrgetter
from statistics import median
from typing import Any

import msgspec

from hpcbench.config.run_spec import spec_document, strategy_label
from hpcbench.config.sweep_file import sweep_toml
from hpcbench.predict.command_layouts import anyones_layout
from hpcbench.predict.decoder.allocated import GIB, SAFE_SHARE
from hpcbench.predict.decoder.layout import Layout
from hpcbench.predict.decoder.layout_search import MAX_COMPARED, LayoutRanking, RankedLayout
from hpcbench.predict.fitted_decoders import run_point
from hpcbench.predict.oracle_requests import LayoutRecommendation
from hpcbench.predict.prediction import NORMAL_90
from hpcbench.predict.recommend import OBJECTIVES, Candidate, Recommendation, candidate_sweep_points
from hpcbench.report.prediction_view import basis_columns, basis_notes, interval_text, memory_text, time_split_text
from hpcbench.report.table_model import Column, View, text_column
from hpcbench.report.table_output import PrintedView
from hpcbench.units import format_bytes, format_percent, format_rate, format_seconds, or_empty, pluralize

MEASURED_PER_SCALE = 3
"""The sweep contains so many of the best candidates per number of nodes."""
SWEEP_REPEATS = 3
_REFUSAL_KINDS = {"limit": "excluded", "memory": "too large", "formulas": "not priced"}


def ranking_view(recommendation: Recommendation, title: str, most: int) -> View:
    """The best candidates for one number of nodes, at most ``most``."""
    columns = [
        Column("place", "", lambda row: row[0], is_key=True),
        text_column("strategy", lambda row: candidate_name(row[1]), is_key=True),
        Column("ratio", "to best [90 %]", lambda row: row[1].ratio, lambda row: _ratio_text(*row)),
        Column("step_time_s", "step [90 %]", lambda row: row[1].predicted.step_time_s,
               lambda row: interval_text(row[1].predicted)),
        text_column("split", lambda row: time_split_text(row[1].predicted), is_number=True),
        Column("samples_per_s", "samples/s", lambda row: row[1].predicted.samples_per_s),
        Column("memory", "memory", lambda row: row[1].predicted.peak_memory_bytes,
               lambda row: memory_text(row[1].predicted, limit=False)),
        text_column("bound_by", lambda row: row[1].predicted.bound_by, heading="bound by"),
        Column("largest_batch_size", "batch to", lambda row: row[1].largest_batch_size,
               lambda row: or_empty(row[1].largest_batch_size)),
    ]  # fmt: skip
    shown = recommendation.candidates[:most]
    predictions = [candidate.predicted for candidate in shown]
    columns[4:4] = basis_columns(predictions, lambda row: row[1].predicted)
    notes = [*_ranking_notes(recommendation, most), *basis_notes(predictions)]
    return View.from_rows(title, columns, enumerate(shown, 1), notes)


def candidate_name(candidate: Candidate) -> str:
    """The strategy with its degrees and options: ``fsdp shard_degree=8 recomputing``."""
    spec = candidate.spec
    words = [strategy_label(spec), *(f"{key}={value}" for key, value in sorted(spec.options.items()))]
    words += [f"in {spec.micro_batches}"] if spec.micro_batches > 1 else []
    words += ["recomputing"] if spec.activation_checkpointing else []
    return " ".join(words)


def _ratio_text(rank: int, candidate: Candidate | RankedLayout) -> str:
    if rank == 1:
        return "1"
    mark = "" if candidate.is_told_apart else " ~"
    return f"{candidate.ratio:.2f} [{candidate.ratio_low:.2f} {candidate.ratio_high:.2f}]{mark}"


def _count_equivalent(candidates: Sequence[Candidate | RankedLayout]) -> int:
    """The number of candidates behind the first that are not significantly slower."""
    return sum(not candidate.is_told_apart for candidate in candidates[1:])


def _ranking_notes(recommendation: Recommendation, most: int) -> Iterable[str]:
    candidates = recommendation.candidates
    if equivalent := _count_equivalent(candidates):
        yield f"~: not significantly slower than the first ({pluralize(equivalent, 'candidate')}); measure them"
    yield "to best: ratio to the fastest with its 90 % interval; errors common to both are cancelled"
    if len(candidates) > most:
        yield f"{pluralize(len(candidates) - most, 'more candidate')} not shown; --top N shows N, --json all"
    limits = {candidate.predicted.memory_limit_bytes for candidate in candidates}
    capacity = next(iter(limits), None)
    if capacity is not None:
        yield (
            f"memory: peak of the rank that uses most; capacity {format_bytes(capacity)}; batch to: the largest batch "
            "per replica that fits, where it was searched"
        )
    elif candidates:
        yield "the profile defines no memory: whether these fit is unknown"
    if any(candidate.spec.micro_batches > 1 for candidate in candidates[:most]):
        yield "in n: the batch of a replica is divided into n micro-batches"


def refused_table(recommendations: Sequence[Recommendation]) -> PrintedView:
    """The reasons that exclude strategies: by strategy and limit, the points of all numbers of nodes together."""
    points: dict[tuple[str, str], int] = {}
    reasons: dict[tuple[str, str], str] = {}
    for refused in (refused for recommendation in recommendations for refused in recommendation.refused):
        key = (refused.strategy, refused.kind)
        points[key] = points.get(key, 0) + refused.points
        reasons.setdefault(key, refused.reason)
    columns = [
        text_column("cannot run", lambda key: key[0]),
        Column("points", "points", points.get),
        text_column("reason", lambda key: f"{_REFUSAL_KINDS[key[1]]}: {reasons[key]}", heading="reason, for instance",
                    wraps=True),
    ]  # fmt: skip
    return PrintedView(View.from_rows("", columns, points))


def scales_view(recommendations: Sequence[Recommendation]) -> View:
    """The best candidate for every number of nodes, its throughput and the cost of an epoch."""
    columns = [
        Column("nodes", "nodes", attrgetter("nodes"), is_key=True),
        Column("strategy", "best", _of_best(lambda _, best: candidate_name(best)),
               lambda row: candidate_name(row.candidates[0]) if row.candidates else "none can run",
               is_key=True, is_number=False),
        Column("samples_per_s", "samples/s", _of_best(lambda _, best: best.predicted.samples_per_s)),
        Column("per_node", "per node", _of_best(lambda row, best: best.predicted.samples_per_s / row.nodes),
               _of_best(lambda row, best: format_rate(best.predicted.samples_per_s / row.nodes), "")),
        Column("node_hours", "node-h/epoch", _of_best(_node_hours),
               _of_best(lambda row, best: f"{_node_hours(row, best):.3g}", "")),
        Column("equivalent", "equivalent", _of_best(lambda row, _: _count_equivalent(row.candidates))),
    ]  # fmt: skip
    notes = ["equivalent: other candidates that are not significantly slower"]
    return View.from_rows("the best at every scale", columns, recommendations, notes)


def _of_best(read: Callable[[Recommendation, Candidate], Any], missing: Any = None) -> Callable[[Recommendation], Any]:
    """A reader of the best candidate; ``missing`` where there is none."""
    return lambda row: read(row, row.candidates[0]) if row.candidates else missing


def _node_hours(_: Recommendation, best: Candidate) -> float:
    return OBJECTIVES["node_hours"](best.spec, best.predicted)


def recommendation_json(recommendations: Sequence[Recommendation], objective: str) -> dict[str, Any]:
    """Return ``{"objective", "recommendations": [{nodes, tasks_per_node, candidates, refused, priced}]}``."""
    entries = [
        {
            "nodes": recommendation.nodes, "tasks_per_node": recommendation.tasks_per_node,
            "candidates": [_candidate_json(candidate) for candidate in recommendation.candidates],
            "refused": [refused._asdict() for refused in recommendation.refused], "priced": recommendation.priced,
        }
        for recommendation in recommendations
    ]  # fmt: skip
    return {"objective": objective, "recommendations": entries}


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {
        "spec": spec_document(candidate.spec), "predicted": msgspec.to_builtins(candidate.predicted),
        "ratio": {"value": candidate.ratio, "low": candidate.ratio_low, "high": candidate.ratio_high},
        "significant": candidate.is_told_apart, "largest_batch_size": candidate.largest_batch_size,
    }  # fmt: skip


def recommended_sweep_toml(
    recommendations: Sequence[Recommendation], name: str, model_folder: str | None = None
) -> str:
    """Return a sweep that measures the best few candidates of every number of nodes with repeats.

    ``model_folder`` is the folder of a custom model.
    """
    best = [candidate for entry in recommendations for candidate in entry.candidates[:MEASURED_PER_SCALE]]
    assert best, "a sweep without candidates"
    spec = best[0].spec
    fixed = {"model": spec.model, "dataset": spec.dataset, "precision": spec.precision}
    fixed |= {key: value for key in ("input_size", "partition") if (value := getattr(spec, key)) is not None}
    fixed |= {"optimizer": spec.optimizer} if spec.optimizer != "sgd" else {}
    settings: dict[str, Any] = {"name": name, "repeats": SWEEP_REPEATS}
    settings |= {"model_folder": model_folder} if model_folder else {}
    return sweep_toml(settings, fixed, candidate_sweep_points(best))


def layout_name(layout: Layout) -> str:
    """The degrees above 1 and the rest of a layout: ``dp=8 tp=4 pp=8x5 cp=2 in 128``.

    ``pp=8x5`` are 8 stages of 5 chunks, ``in 128`` the micro-batches of a replica.
    """
    stages = f"{layout.pipeline}x{layout.chunks}" if layout.chunks > 1 else str(layout.pipeline)
    degrees = (
        ("fsdp", layout.shards, str(layout.shards)), ("dp", layout.replicas, str(layout.replicas)),
        ("tp", layout.tensor, str(layout.tensor)), ("pp", layout.pipeline, stages),
        ("cp", layout.context, str(layout.context)), ("ep", layout.expert, str(layout.expert)),
    )  # fmt: skip
    words = [f"{name}={text}" for name, degree, text in degrees if degree > 1] or ["one GPU"]
    words += ["zero1"] if layout.zero else []
    words += [f"mb={layout.micro_batch}"] if layout.micro_batch > 1 else []
    words += [f"in {layout.accumulation}"] if layout.accumulation > 1 else []
    return " ".join([*words, *(["recomputing"] if layout.recompute == "full" else [])])


def layouts_view(recommendation: LayoutRecommendation, nodes: int, most: int) -> View:
    """The best layouts on so many nodes, at most ``most``."""
    ranking = recommendation.rankings[nodes]
    title = (
        f"{pluralize(nodes, 'node')} x {recommendation.tasks_per_node} = {pluralize(ranking.gpus, 'GPU')}: "
        f"{pluralize(len(ranking.layouts), 'layout')} fit"
    )
    columns = [
        Column("place", "", lambda row: row[0], is_key=True),
        text_column("layout", lambda row: layout_name(row[1].layout), is_key=True),
        Column("ratio", "to best [90 %]", lambda row: row[1].ratio, lambda row: _ratio_text(*row)),
        Column("step_time_s", "step [90 %]", lambda row: row[1].step_time_s, lambda row: _step_text(row[1])),
        Column("tokens_per_s_per_device", "tokens/s /device", lambda row: row[1].tokens_per_s_per_gpu,
               lambda row: format_rate(row[1].tokens_per_s_per_gpu)),
        Column("mfu", "MFU", lambda row: model_flops_utilisation(recommendation, row[1]),
               lambda row: format_percent(model_flops_utilisation(recommendation, row[1]), 1)),
        Column("memory", "memory", lambda row: row[1].peak_memory_gib,
               lambda row: format_bytes(int(row[1].peak_memory_gib * GIB))),
        text_column("runs", lambda row: "" if row[1].priced_only else "yes"),
    ]  # fmt: skip
    if recommendation.measured:
        columns[4:4] = [
            Column("measured_step_time_s", "measured", lambda row: _measured_s(recommendation, row[1]),
                   lambda row: format_seconds(step_s) if (step_s := _measured_s(recommendation, row[1])) else "")
        ]  # fmt: skip
    notes = [*_measured_notes(recommendation, ranking), *_view_notes(recommendation, ranking, most)]
    return View.from_rows(title, columns, enumerate(ranking.layouts[:most], 1), notes)


def _measured_s(recommendation: LayoutRecommendation, row: RankedLayout) -> float | None:
    times_s = recommendation.measured.get(anyones_layout(row.layout))
    return median(times_s) if times_s else None


def _measured_notes(recommendation: LayoutRecommendation, ranking: LayoutRanking) -> Iterable[str]:
    """State the measured winner among the ranked layouts."""
    measured = [(step_s, row) for row in ranking.layouts if (step_s := _measured_s(recommendation, row))]
    if measured:
        step_s, best = min(measured, key=lambda entry: entry[0] / entry[1].layout.global_batch)
        yield (
            f"measured the fastest of {pluralize(len(measured), 'layout')}: {layout_name(best.layout)}, "
            f"{format_seconds(step_s)} a step, predicted {_step_text(best)}"
        )


def _step_text(row: RankedLayout) -> str:
    low, high = (format_seconds(value) for value in (row.step_time_low_s, row.step_time_high_s))
    return f"{format_seconds(row.step_time_s)} [{low} {high}]"


def model_flops_utilisation(recommendation: LayoutRecommendation, row: RankedLayout) -> float:
    """Return the predicted MFU at the bf16 peak of the profile."""
    flops = recommendation.shape.flops_per_token(row.layout.sequence) * row.tokens_per_s_per_gpu
    return flops / recommendation.peak_flops_per_s


def _view_notes(recommendation: LayoutRecommendation, ranking: LayoutRanking, most: int) -> Iterable[str]:
    yield (
        f"{ranking.examined:,} layouts examined, {ranking.priced:,} priced; memory: that of a process, up to "
        f"{format_percent(SAFE_SHARE)} of {recommendation.machine.device.memory_gib:.0f} GiB"
    )
    yield (
        "to best: ratio to the fastest with its 90 % interval; dp tp pp cp ep: degrees of data, tensor, pipeline, "
        "context and expert parallelism; 8x5: 8 stages of 5 parts each; zero1: sharded optimizer; mb: samples of a "
        "micro-batch; in n: n micro-batches a step"
    )
    if equivalent := _count_equivalent(ranking.layouts):
        yield f"~: not significantly slower than the first ({pluralize(equivalent, 'layout')}); measure them"
    if (advice := ranking.next_run) is not None:
        now, then = (format_percent(expm1(NORMAL_90 * spread)) for spread in (advice.spread_now, advice.spread_then))
        compared = min(MAX_COMPARED, len(ranking.layouts))
        yield (
            f"a run of {layout_name(advice.layout)} would narrow the ratios of the first {compared} most: ±{now} to "
            f"±{then}"
        )
    if ranking.tight:
        best = ranking.tight[0]
        memory = format_bytes(int(best.peak_memory_gib * GIB))
        yield (
            f"{pluralize(len(ranking.tight), 'faster layout')} above {format_percent(SAFE_SHARE)} of the memory, where "
            f"an allocator may stall a run: {layout_name(best.layout)}, {_step_text(best)}, {memory}"
        )
    reasons = dict.fromkeys(row.priced_only for row in ranking.layouts[:most] if row.priced_only)
    if reasons:
        yield f"runs: empty where hpcbench only prices a layout: {'; '.join(reasons)}"
    runnable = [(place, row) for place, row in enumerate(ranking.layouts, 1) if row.priced_only is None]
    if runnable and runnable[0][0] > most:
        place, row = runnable[0]
        yield f"the best that hpcbench can run is number {place}: {layout_name(row.layout)}, {row.ratio:.2f} x the best"


def refused_layouts_table(recommendation: LayoutRecommendation) -> PrintedView:
    """The reasons that exclude layouts, of all numbers of nodes together."""
    counts: dict[str, int] = {}
    for ranking in recommendation.rankings.values():
        for reason, count in ranking.refused.items():
            counts[reason] = counts.get(reason, 0) + count
    columns = [
        text_column("reason", lambda row: row[0], heading="left out", wraps=True),
        Column("layouts", "layouts", lambda row: row[1]),
    ]
    return PrintedView(View.from_rows("", columns, list(counts.items())))


def layouts_json(recommendation: LayoutRecommendation, objective: str) -> dict[str, Any]:
    """Return ``{"objective", "machine", "notes", "recommendations": [{nodes, tasks_per_node, candidates, layouts,
    tight, refused, priced, examined}]}``; ``candidates`` is empty."""
    entries = [
        {
            "nodes": nodes, "tasks_per_node": recommendation.tasks_per_node, "candidates": [],
            "layouts": [_layout_json(recommendation, row) for row in ranking.layouts],
            "tight": [_layout_json(recommendation, row) for row in ranking.tight],
            "refused": [{"reason": reason, "layouts": count} for reason, count in ranking.refused.items()],
            "priced": ranking.priced, "examined": ranking.examined,
        }
        for nodes, ranking in recommendation.rankings.items()
    ]  # fmt: skip
    header = {"objective": objective, "machine": recommendation.machine.name, "notes": recommendation.notes}
    return {**header, "recommendations": entries}


def _layout_json(recommendation: LayoutRecommendation, row: RankedLayout) -> dict[str, Any]:
    return {
        "layout": msgspec.to_builtins(row.layout),
        "predicted": {
            "step_time_s": row.step_time_s,
            "interval": {"low": row.step_time_low_s, "high": row.step_time_high_s},
            "samples_per_s": row.samples_per_s,
            "tokens_per_s": row.tokens_per_s_per_gpu * row.layout.gpus,
            "tokens_per_s_per_device": row.tokens_per_s_per_gpu,
            "mfu": model_flops_utilisation(recommendation, row),
            "peak_memory_bytes": int(row.peak_memory_gib * GIB),
        },
        "ratio": {"value": row.ratio, "low": row.ratio_low, "high": row.ratio_high},
        "significant": row.is_told_apart,
        "priced_only": row.priced_only,
        "measured_step_time_s": _measured_s(recommendation, row),
        "run": None if row.priced_only else run_point(row.layout),
    }


def layouts_sweep_toml(recommendation: LayoutRecommendation, name: str, dataset: str) -> str:
    """Return a sweep that measures the best layouts that can be run, with repeats; empty where none can."""
    points = []
    sequence = 0
    for nodes, ranking in recommendation.rankings.items():
        best = [row for row in ranking.layouts if row.priced_only is None]
        sequence = ranking.sequence
        points += [
            {"nodes": nodes, "tasks_per_node": recommendation.tasks_per_node, **run_point(row.layout)}
            for row in best[:MEASURED_PER_SCALE]
        ]
    if not points:
        return ""
    fixed = {
        "model": recommendation.shape.name, "dataset": dataset, "precision": "bf16", "optimizer": "adamw",
        "input_size": sequence,
    }  # fmt: skip
    return sweep_toml({"name": name, "repeats": SWEEP_REPEATS}, fixed, points)
