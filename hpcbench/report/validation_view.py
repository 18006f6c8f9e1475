"""Accuracy tables of the oracle: by strategy, by predictor, by part of the step, and per configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from hpcbench.config.run_spec import strategy_label
from hpcbench.oracle.scoring import (
    GOOD_ACCURACY,
    MIN_STEP_FRACTION,
    AccuracySummary,
    PredictedBest,
    PredictorResult,
    PredictorScore,
    ValidationCase,
    accuracy,
    predicted_bests,
)
from hpcbench.report.oracle_validation import ORACLE_NAME, case_json
from hpcbench.report.table_model import Column, View
from hpcbench.units import format_seconds

_PART_HEADINGS = {
    "compute_s": "computation", "comm_s": "communication", "exposed_comm_s": "communication not hidden",
    "peak_memory_bytes": "memory",
}  # fmt: skip
_SUMMARY_HEADINGS = {
    "count": "n", "mean": "accuracy [95 %]", "median": "median", "least": "least", "good": f">={GOOD_ACCURACY:.0%}",
    "signed": "signed", "noise": "noise",
}  # fmt: skip


def accuracy_by_strategy_view(one: PredictorScore) -> View:
    """Accuracy of the step time, a row a strategy and one for all."""
    view = _summary_view("step time, by strategy", "strategy", {**one.strategies, "all": one.total})
    view.notes = [
        "accuracy: 1 - |predicted - measured| / measured, in percent, not clipped; signed: mean of (predicted - "
        "measured) / measured",
        "noise: spread between launches of the same configuration (standard deviation of logarithms); no prediction "
        "can be better; ? where there was one launch",
    ]
    failed = one.total.failed if one.total else 0
    if failed:
        view.notes.append(f"{failed} failed unpredicted or were not predicted: accuracy 0")
    covered = one.total.covered if one.total else None
    if covered is not None:
        view.notes.append(f"{covered:.0%} of the measured medians lie within their predicted 90 % interval")
    return view


def accuracy_by_part_view(one: PredictorScore) -> View:
    """Computation, communication and memory apart: errors of opposite sign cancel in the step time."""
    view = _summary_view(
        "parts, each by itself", "part", {_PART_HEADINGS[name]: found for name, found in one.parts.items()}
    )
    view.notes = [
        f"over configurations where the part was measured, times that are {MIN_STEP_FRACTION:.0%} of the step or more"
    ]
    return view


def _summary_view(title: str, key: str, rows: dict[str, AccuracySummary | None]) -> View:
    columns = [Column(key, key, is_key=True, is_number=False)]
    columns += [Column(name, heading, can_go=name == "least") for name, heading in _SUMMARY_HEADINGS.items()]
    view = View(title, columns, [], [])
    for name, found in rows.items():
        if found is not None:
            view.raw.append([name, *(getattr(found, column) for column in _SUMMARY_HEADINGS)])
            view.cells.append([name, *_summary_cells(found)])
    return view


def _summary_cells(found: AccuracySummary) -> list[str]:
    return [
        str(found.count),
        _format_percent(found.mean)
        + (f" [{_format_percent(found.low)} {_format_percent(found.high)}]" if found.count > 1 else ""),
        _format_percent(found.median),
        _format_percent(found.least),
        f"{found.good:.0%}",
        "" if found.signed is None else f"{found.signed * 100:+.1f}",
        "?" if found.noise is None else f"{found.noise * 100:.1f}",
    ]


def _format_percent(value: float) -> str:
    return f"{value * 100:.1f}"


def predictor_comparison_view(scores: Sequence[PredictorScore]) -> View:
    """The oracle and the baselines side by side."""
    columns = [
        Column("predictor", "predictor", is_key=True, is_number=False),
        Column("count", "n"),
        Column("mean", "accuracy [95 %]"),
        Column("other", "ours there"),
        Column("signed", "signed"),
        Column("tau", "tau"),
        Column("regret", "regret"),
        Column("worst_regret", "worst"),
        *(Column(name, _SUMMARY_HEADINGS[name], can_go=True) for name in ("median", "least", "good")),
    ]
    view = View("against the baselines", columns, [], [])
    for one in scores:
        total, rank = one.total, one.ranking
        view.raw.append([
            one.predictor, total.count if total else 0, total.mean if total else None, one.other,
            total.signed if total else None, rank.tau, rank.regret, rank.worst_regret,
            *((total.median, total.least, total.good) if total else (None, None, None)),
        ])  # fmt: skip
        texts = _summary_cells(total) if total else [""] * len(_SUMMARY_HEADINGS)
        view.cells.append([
            one.predictor, texts[0] or "0", texts[1], "" if one.other is None else _format_percent(one.other), texts[5],
            "" if rank.tau is None else f"{rank.tau:.2f}",
            _format_share(rank.regret), _format_share(rank.worst_regret), *texts[2:5],
        ])  # fmt: skip
    groups = max((one.ranking.groups for one in scores), default=0)
    view.notes = [
        f"n: configurations that it says something of; ours there: accuracy of {ORACLE_NAME} over the same ones",
        f"tau: Kendall's, of configurations ranked by time per sample, mean over {groups} groups of the same model and "
        "devices; regret: how much slower than the measured best the predicted best is, mean and worst",
    ]
    fits = scores[0].fits if scores else None
    if fits is not None and fits.count:
        view.notes.append(
            f"memory: of {fits.said_to_fit} said to fit {fits.false_fits} did not, of "
            f"{fits.count - fits.said_to_fit} said not to fit {fits.false_alarms} did"
        )
    failed = sum(one.ranking.failed for one in scores if one.predictor == ORACLE_NAME)
    if failed:
        view.notes.append(f"in {failed} groups the predicted best did not run")
    return view


def chosen_strategies_view(
    cases: Sequence[ValidationCase], predictors: Sequence[str] = (ORACLE_NAME, "paradl", "ddlbench")
) -> View:
    """What each predictor would have had run, beside what was best: by default we and both papers."""
    columns = [
        Column("model", "model", is_key=True, is_number=False),
        Column("dataset", "data", is_key=True, is_number=False),
        Column("devices", "devices", is_key=True),
        Column("best", "measured best", is_number=False),
        *(Column(name, name, is_number=False, can_go=name != ORACLE_NAME) for name in predictors),
    ]
    view = View("which strategy each would have chosen", columns, [], [])
    by_predictor = [predicted_bests(cases, name) for name in predictors]
    for group in zip(*by_predictor, strict=True):
        best = group[0].best.measured.spec
        key = [best.model, best.dataset, best.devices]
        view.raw.append([*key, strategy_label(best), *(_choice_cell(one)[0] for one in group)])
        view.cells.append(
            [*map(str, key), strategy_label(best), *(" ".join(_choice_cell(one)).strip() for one in group)]
        )
    view.notes = ["+ so much slower than the measured best, by time per sample; ? did not run"]
    return view


def _choice_cell(one: PredictedBest) -> tuple[str, str]:
    if one.chosen is None:
        return "", ""
    off = "?" if one.regret is None else f"+{one.regret:.0%}" if one.regret >= 0.005 else ""
    return strategy_label(one.chosen.measured.spec), off


def _format_share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def configuration_cases_view(cases: Sequence[ValidationCase]) -> View:
    """Every configuration, measured and predicted; raw columns for every predictor."""
    names = [name for name in cases[0].said if name != ORACLE_NAME] if cases else []
    columns = [
        Column("strategy", "strategy", is_key=True, is_number=False),
        Column("model", "model", is_key=True, is_number=False),
        Column("ranks", "ranks", is_key=True),
        Column("batch_size", "batch", is_key=True),
        Column("measured_s", "measured"),
        Column("predicted_s", "predicted"),
        Column("accuracy", "acc."),
        Column("noise", "noise"),
        Column("status", "status", is_number=False),
        *(Column(f"{name}_s", name, can_go=True) for name in names),
    ]
    view = View("every configuration", columns, [], [])
    for one in cases:
        spec, there, said = one.measured.spec, one.measured.step_time_s, one.said.get(ORACLE_NAME, PredictorResult())
        right = accuracy(said.step_time_s, there) if said.step_time_s and there else None
        others = [one.said[name].step_time_s for name in names]
        key = [strategy_label(spec), spec.model, spec.ranks, spec.batch_size]
        view.raw.append([
            *key, there, said.step_time_s, right, one.measured.noise, one.measured.status, *others,
        ])  # fmt: skip
        view.cells.append([
            *map(str, key), _format_time(there), _format_time(said.step_time_s),
            "" if right is None else _format_percent(right),
            "?" if one.measured.noise is None else _format_percent(one.measured.noise), one.measured.status,
            *map(_format_time, others),
        ])  # fmt: skip
    return view


def _format_time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def validation_json(
    cases: Sequence[ValidationCase], scores: Sequence[PredictorScore], notes: Sequence[str]
) -> dict[str, Any]:
    """``{"scores", "choices", "cases", "notes"}``: everything, so that it can be checked line by line."""
    chosen = chosen_strategies_view(cases)
    return {
        "choices": [dict(zip((one.name for one in chosen.columns), row, strict=True)) for row in chosen.raw],
        "scores": [msgspec.to_builtins(one) for one in scores],
        "cases": [case_json(one) for one in cases],
        "notes": list(notes),
    }
