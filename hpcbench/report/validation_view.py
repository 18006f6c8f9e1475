"""Accuracy tables of the oracle: by strategy, by predictor, by part of the step, and per configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any

import msgspec

from hpcbench.config.run_spec import strategy_label
from hpcbench.oracle import scoring
from hpcbench.oracle.baselines import CHOICE_BASELINES
from hpcbench.report.oracle_validation import ORACLE_NAME, case_json
from hpcbench.report.prediction_view import basis_text
from hpcbench.report.table_files import view_json
from hpcbench.report.table_model import Column, View, text_column

_PART_HEADINGS = {
    "compute_s": "computation", "comm_s": "communication",
    "peak_memory_bytes": "memory",
}  # fmt: skip


def _format_percent(value: float | None, missing: str = "") -> str:
    return missing if value is None else f"{value * 100:.1f}"


def _percent_column(name: str, heading: str, missing: str = "", *, optional: bool = False) -> Column:
    value = attrgetter(name)
    return Column(name, heading, value, lambda row: _format_percent(value(row), missing), optional=optional)


def _accuracy_cell(summary: scoring.AccuracySummary) -> str:
    if summary.count <= 1:
        return _format_percent(summary.mean)
    return f"{_format_percent(summary.mean)} [{_format_percent(summary.low)} {_format_percent(summary.high)}]"


_SUMMARY_COLUMNS = (
    Column("count", "n", attrgetter("count")),
    Column("mean", "accuracy [95 %]", attrgetter("mean"), _accuracy_cell),
    _percent_column("median", "median"), _percent_column("least", "min", optional=True),
    Column("good", f">={scoring.GOOD_ACCURACY:.0%}", attrgetter("good"), lambda summary: f"{summary.good:.0%}"),
    Column("signed", "signed", attrgetter("signed"),
           lambda summary: "" if summary.signed is None else f"{summary.signed * 100:+.1f}"),
    _percent_column("noise", "noise", "?"),
)  # fmt: skip


def accuracy_by_strategy_view(score: scoring.PredictorScore) -> View:
    """Accuracy of the step time: one row per strategy and one for all."""
    notes = [
        "accuracy: 1 - |predicted - measured| / measured, in percent, not clipped; signed: mean of (predicted - "
        "measured) / measured",
        "noise: spread between launches of the same configuration (standard deviation of logarithms), the limit of any "
        "prediction; ? with one launch",
    ]
    if score.total is not None and score.total.failed:
        notes.append(f"{score.total.failed} failed unexpectedly or have no prediction: accuracy 0")
    if score.total is not None and score.total.covered is not None:
        notes.append(f"{score.total.covered:.0%} of the measured medians lie within their predicted 90 % interval")
    return _summary_view("step time, by strategy", "strategy", {**score.strategies, "all": score.total}, notes)


def accuracy_by_part_view(score: scoring.PredictorScore) -> View:
    """Accuracy of computation, communication and memory: errors of opposite sign cancel in the step time."""
    rows = {_PART_HEADINGS[name]: summary for name, summary in score.parts.items()}
    note = f"configurations where the part was measured; times of at least {scoring.MIN_STEP_FRACTION:.0%} of the step"
    return _summary_view("parts of the step, each on its own", "part", rows, [note])


def _summary_view(title: str, key: str, rows: Mapping[str, scoring.AccuracySummary | None], notes: list[str]) -> View:
    columns = [text_column(key, itemgetter(0), is_key=True)]
    columns += [_column_of_part(column, itemgetter(1)) for column in _SUMMARY_COLUMNS]
    return View.from_rows(title, columns, [row for row in rows.items() if row[1] is not None], notes)


def _column_of_part(column: Column, part: Callable[[Any], Any]) -> Column:
    """``column`` for rows of which it reads a part, which may be ``None``."""

    def value(row: Any) -> Any:
        return None if part(row) is None else column.raw_of(part(row))

    def text(row: Any) -> str:
        return "" if part(row) is None else column.cell_of(part(row))

    return replace(column, value=value, text=text)


def predictor_comparison_view(scores: Sequence[scoring.PredictorScore]) -> View:
    """The oracle and the baselines side by side."""
    _, mean, median, minimum, good, signed, _ = (
        _column_of_part(column, attrgetter("total")) for column in _SUMMARY_COLUMNS
    )
    columns = [
        text_column("predictor", attrgetter("predictor"), is_key=True),
        Column("count", "n", lambda score: score.total.count if score.total else 0),
        mean,
        _percent_column("other", "ours there"),
        signed,
        Column("tau", "tau", attrgetter("ranking.tau"),
               lambda score: "" if score.ranking.tau is None else f"{score.ranking.tau:.2f}"),
        Column("regret", "regret", attrgetter("ranking.regret"), lambda score: _format_share(score.ranking.regret)),
        Column("worst_regret", "worst", attrgetter("ranking.worst_regret"),
               lambda score: _format_share(score.ranking.worst_regret)),
        *(replace(column, optional=True) for column in (median, minimum, good)),
    ]  # fmt: skip
    groups = max((score.ranking.groups for score in scores), default=0)
    notes = [
        f"n: configurations with a prediction; ours there: accuracy of {ORACLE_NAME} over the same ones",
        f"tau: Kendall's, of configurations ranked by time per sample, mean over {groups} groups of the same model and "
        "devices; regret: excess time of the predicted best over the measured best, mean and worst, 0 where the "
        "difference is not significant",
    ]
    fits = scores[0].fits if scores else None
    if fits is not None and fits.count:
        notes.append(
            f"memory: {fits.false_fits} of {fits.said_to_fit} predicted to fit did not, {fits.false_alarms} of "
            f"{fits.count - fits.said_to_fit} predicted not to fit did"
        )
    failed = sum(score.ranking.failed for score in scores if score.predictor == ORACLE_NAME)
    if failed:
        notes.append(f"in {failed} groups the predicted best did not run")
    return View.from_rows("against the baselines", columns, scores, notes)


def _format_share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def chosen_strategies_view(
    cases: Sequence[scoring.ValidationCase],
    predictors: Sequence[str] = (ORACLE_NAME, "paradl", "ddlbench", *CHOICE_BASELINES),
) -> View:
    """The choice of each predictor per model, data set and devices, beside the measured best."""

    def choice(number: int) -> Column:
        name = predictors[number]
        return Column(
            name, name, lambda group: _choice_texts(group[number])[0],
            lambda group: " ".join(_choice_texts(group[number])).strip(),
            is_number=False, optional=name != ORACLE_NAME,
        )  # fmt: skip

    columns = [
        Column("model", "model", lambda group: group[0].best.measured.spec.model, is_key=True, is_number=False),
        Column("dataset", "data", lambda group: group[0].best.measured.spec.dataset, is_key=True, is_number=False),
        Column("devices", "devices", lambda group: group[0].best.measured.spec.devices, is_key=True),
        text_column("best", lambda group: strategy_label(group[0].best.measured.spec), heading="measured best"),
        *map(choice, range(len(predictors))),
    ]
    groups = zip(*(scoring.predicted_bests(cases, name) for name in predictors), strict=True)
    notes = ["+: time per sample above that of the measured best; =: not significant; ?: did not run"]
    return View.from_rows("chosen strategies", columns, groups, notes)


def _choice_texts(group: scoring.PredictedBest) -> tuple[str, str]:
    """The chosen strategy and its excess time."""
    if group.chosen is None:
        return "", ""
    excess = "?" if group.regret is None else f"+{group.regret:.0%}" if group.regret >= 0.005 else ""
    excess += "=" if excess and group.is_tie else ""
    return strategy_label(group.chosen.measured.spec), excess


def configuration_cases_view(cases: Sequence[scoring.ValidationCase]) -> View:
    """Every configuration, measured and predicted; other predictors where there is room."""

    def predicted_s(name: str) -> Callable[[scoring.ValidationCase], float | None]:
        return lambda case: case.said.get(name, scoring.PredictorResult()).step_time_s

    def case_accuracy(case: scoring.ValidationCase) -> float | None:
        predicted, measured = predicted_s(ORACLE_NAME)(case), case.measured.step_time_s
        return scoring.accuracy(predicted, measured) if predicted and measured else None

    def basis(case: scoring.ValidationCase) -> str:
        rests_on = case.said.get(ORACLE_NAME, scoring.PredictorResult()).rests_on
        return "" if rests_on is None else basis_text(rests_on)

    others = {ORACLE_NAME, *CHOICE_BASELINES}
    names = [name for name in cases[0].said if name not in others] if cases else []
    columns = [
        text_column("strategy", lambda case: strategy_label(case.measured.spec), is_key=True),
        text_column("model", attrgetter("measured.spec.model"), is_key=True),
        Column("ranks", "ranks", attrgetter("measured.spec.ranks"), is_key=True),
        Column("batch_size", "batch", attrgetter("measured.spec.batch_size"), is_key=True),
        Column("measured_s", "measured", attrgetter("measured.step_time_s")),
        Column("predicted_s", "predicted", predicted_s(ORACLE_NAME)),
        Column("accuracy", "acc.", case_accuracy, lambda case: _format_percent(case_accuracy(case))),
        Column("noise", "noise", attrgetter("measured.noise"), lambda case: _format_percent(case.measured.noise, "?")),
        text_column("status", attrgetter("measured.status")),
        replace(text_column("rests_on", basis, heading="rests on"), optional=True),
        *(Column(f"{name}_s", name, predicted_s(name), optional=True) for name in names),
    ]
    return View.from_rows("every configuration", columns, cases)


def validation_json(
    cases: Sequence[scoring.ValidationCase], scores: Sequence[scoring.PredictorScore], notes: Sequence[str]
) -> dict[str, Any]:
    """Return ``{"choices", "scores", "cases", "notes"}``: all figures behind the tables."""
    return {
        "choices": view_json(chosen_strategies_view(cases))["rows"],
        "scores": [msgspec.to_builtins(score) for score in scores],
        "cases": [case_json(case) for case in cases],
        "notes": list(notes),
    }
