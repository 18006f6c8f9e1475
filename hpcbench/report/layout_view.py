"""Ranked layouts of a decoder as tables and JSON, and a sweep of those that can be run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hpcbench.config.sweep_file import sweep_toml
from hpcbench.forecast.oracle_requests import LayoutRecommendation, priced_only_reason, run_point
from hpcbench.oracle.transformer.layout import Layout
from hpcbench.oracle.transformer.layout_search import LayoutRanking, RankedLayout
from hpcbench.report.phrases import pluralize
from hpcbench.report.table_model import Column, View, text_column
from hpcbench.report.table_output import PrintedView
from hpcbench.units import format_bytes, format_rate, format_seconds

MEASURED_PER_SCALE = 3
SWEEP_REPEATS = 3
_GIB = 2**30


def layout_name(layout: Layout) -> str:
    """The degrees above 1 and the rest of a layout: ``dp=8 tp=4 pp=8x5 cp=2 in 128``.

    ``pp=8x5`` are 8 stages of 5 chunks, ``in 128`` the micro-batches of a replica.
    """
    stages = f"{layout.pipeline}x{layout.chunks}" if layout.chunks > 1 else str(layout.pipeline)
    degrees = (
        ("fsdp", layout.shards, str(layout.shards)), ("dp", layout.replicas, str(layout.replicas)),
        ("tp", layout.tensor, str(layout.tensor)), ("pp", layout.pipeline, stages),
        ("cp", layout.context, str(layout.context)),
    )  # fmt: skip
    words = [f"{name}={text}" for name, degree, text in degrees if degree > 1] or ["one GPU"]
    words += ["zero1"] if layout.zero else []
    words += [f"mb={layout.micro_batch}"] if layout.micro_batch > 1 else []
    words += [f"in {layout.accumulation}"] if layout.accumulation > 1 else []
    return " ".join([*words, *(["recomputing"] if layout.recompute == "full" else [])])


def layouts_view(found: LayoutRecommendation, nodes: int, most: int) -> View:
    """The best layouts on so many nodes, at most ``most``."""
    ranking = found.rankings[nodes]
    title = (
        f"{pluralize(nodes, 'node')} x {found.tasks_per_node} = {pluralize(ranking.gpus, 'GPU')}: "
        f"{pluralize(len(ranking.layouts), 'layout')} fit"
    )
    columns = [
        Column("place", "", lambda row: row[0], is_key=True),
        text_column("layout", lambda row: layout_name(row[1].layout), is_key=True),
        Column("ratio", "to best [90 %]", lambda row: row[1].ratio, lambda row: _ratio_text(*row)),
        Column("step_time_s", "step [90 %]", lambda row: row[1].step_time_s, lambda row: _step_text(row[1])),
        Column("tokens_per_s_per_device", "tokens/s /device", lambda row: row[1].tokens_per_s_per_gpu,
               lambda row: format_rate(row[1].tokens_per_s_per_gpu)),
        Column("mfu", "MFU", lambda row: model_flops_utilisation(found, row[1]),
               lambda row: f"{model_flops_utilisation(found, row[1]):.1%}"),
        Column("memory", "memory", lambda row: row[1].peak_memory_gib,
               lambda row: format_bytes(int(row[1].peak_memory_gib * _GIB))),
        text_column("runs", lambda row: "" if priced_only_reason(found.shape, row[1].layout) else "yes"),
    ]  # fmt: skip
    return View.from_rows(title, columns, enumerate(ranking.layouts[:most], 1), _view_notes(found, ranking, most))


def _ratio_text(rank: int, row: RankedLayout) -> str:
    if rank == 1:
        return "1"
    mark = "" if row.is_told_apart else " ~"
    return f"{row.ratio:.2f} [{row.ratio_low:.2f} {row.ratio_high:.2f}]{mark}"


def _step_text(row: RankedLayout) -> str:
    low, high = (format_seconds(value) for value in (row.step_time_low_s, row.step_time_high_s))
    return f"{format_seconds(row.step_time_s)} [{low} {high}]"


def model_flops_utilisation(found: LayoutRecommendation, row: RankedLayout) -> float:
    """Return the predicted MFU at the bf16 peak of the profile."""
    flops = found.shape.flops_per_token(row.layout.sequence) * row.tokens_per_s_per_gpu
    return flops / found.peak_flops_per_s


def _view_notes(found: LayoutRecommendation, ranking: LayoutRanking, most: int) -> Iterable[str]:
    yield (
        f"{ranking.examined:,} layouts examined, {ranking.priced:,} priced; memory up to "
        f"{found.machine.fits_below_gib:.0f} GiB of {found.machine.device.memory_gib:.0f}"
    )
    if equivalent := sum(not row.is_told_apart for row in ranking.layouts[1:]):
        yield f"~: not significantly slower than the first ({pluralize(equivalent, 'layout')}); measure them"
    if ranking.tight:
        best = ranking.tight[0]
        yield (
            f"{pluralize(len(ranking.tight), 'faster layout')} may not fit (mean error of the memory: 10 %): "
            f"{layout_name(best.layout)}, {_step_text(best)}, {format_bytes(int(best.peak_memory_gib * _GIB))}"
        )
    reasons = dict.fromkeys(
        reason for row in ranking.layouts[:most] if (reason := priced_only_reason(found.shape, row.layout))
    )
    if reasons:
        yield f"runs: empty where hpcbench only prices a layout: {'; '.join(reasons)}"
    runnable = [
        (place, row)
        for place, row in enumerate(ranking.layouts, 1)
        if priced_only_reason(found.shape, row.layout) is None
    ]
    if runnable and runnable[0][0] > most:
        place, row = runnable[0]
        yield f"the first that hpcbench runs is number {place}: {layout_name(row.layout)}, {row.ratio:.2f} to best"


def refused_layouts_table(found: LayoutRecommendation) -> PrintedView:
    """The reasons that exclude layouts, of all numbers of nodes together."""
    counts: dict[str, int] = {}
    for ranking in found.rankings.values():
        for reason, count in ranking.refused.items():
            counts[reason] = counts.get(reason, 0) + count
    columns = [
        text_column("reason", lambda row: row[0], heading="left out", wraps=True),
        Column("layouts", "layouts", lambda row: row[1]),
    ]
    return PrintedView(View.from_rows("", columns, list(counts.items())))


def layouts_json(found: LayoutRecommendation, objective: str) -> dict[str, Any]:
    """Return ``{"objective", "machine", "notes", "recommendations": [{nodes, tasks_per_node, candidates, layouts,
    tight, refused, priced, examined}]}``; ``candidates`` is empty."""
    entries = [
        {
            "nodes": nodes, "tasks_per_node": found.tasks_per_node, "candidates": [],
            "layouts": [_layout_json(found, row) for row in ranking.layouts],
            "tight": [_layout_json(found, row) for row in ranking.tight],
            "refused": [{"reason": reason, "layouts": count} for reason, count in ranking.refused.items()],
            "priced": ranking.priced, "examined": ranking.examined,
        }
        for nodes, ranking in found.rankings.items()
    ]  # fmt: skip
    return {
        "objective": objective, "machine": found.machine.name, "notes": found.notes, "recommendations": entries,
    }  # fmt: skip


def _layout_json(found: LayoutRecommendation, row: RankedLayout) -> dict[str, Any]:
    reason = priced_only_reason(found.shape, row.layout)
    return {
        "layout": msgspec.to_builtins(row.layout),
        "predicted": {
            "step_time_s": row.step_time_s,
            "interval": {"low": row.step_time_low_s, "high": row.step_time_high_s},
            "samples_per_s": row.samples_per_s,
            "tokens_per_s": row.tokens_per_s_per_gpu * row.layout.gpus,
            "tokens_per_s_per_device": row.tokens_per_s_per_gpu,
            "mfu": model_flops_utilisation(found, row),
            "peak_memory_bytes": int(row.peak_memory_gib * _GIB),
        },
        "ratio": {"value": row.ratio, "low": row.ratio_low, "high": row.ratio_high},
        "told_apart": row.is_told_apart,
        "priced_only": reason,
        "run": None if reason else run_point(row.layout),
    }


def layouts_sweep_toml(found: LayoutRecommendation, name: str, dataset: str) -> str:
    """Return a sweep that measures the best layouts that can be run, with repeats; empty where none can."""
    points = []
    sequence = 0
    for nodes, ranking in found.rankings.items():
        best = [row for row in ranking.layouts if priced_only_reason(found.shape, row.layout) is None]
        sequence = ranking.sequence
        points += [
            {"nodes": nodes, "tasks_per_node": found.tasks_per_node, **run_point(row.layout)}
            for row in best[:MEASURED_PER_SCALE]
        ]
    if not points:
        return ""
    fixed = {
        "model": found.shape.name, "dataset": dataset, "precision": "bf16", "optimizer": "adamw",
        "input_size": sequence,
    }  # fmt: skip
    return sweep_toml({"name": name, "repeats": SWEEP_REPEATS}, fixed, points)
