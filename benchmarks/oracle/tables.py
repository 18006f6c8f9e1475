"""Tables of the score: the oracle against measurements, its goals and simpler predictors."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.oracle.baselines import BASELINES, baseline_predictor
from benchmarks.oracle.cases import BLIND, CALIBRATED
from benchmarks.oracle.neighbours import cases_after_pilots, held_out_cases
from benchmarks.oracle.registered import DATA_PARALLEL, Commit, Look, Register
from benchmarks.oracle.scoring import (
    MEMORY,
    MIN_STEP_FRACTION,
    ORACLE_NAME,
    AccuracySummary,
    PredictorScore,
    ScoredCase,
    mean_tau,
    score_predictor,
    scored_configurations,
)
from hpcbench.config.run_spec import strategy_label
from hpcbench.predict.cluster_forecasts import ClusterForecasts
from hpcbench.report.table_model import Column, View, text_column
from hpcbench.report.table_output import render_view
from hpcbench.results.results_tree import ResultsTree
from hpcbench.units import format_percent, format_seconds

if TYPE_CHECKING:
    import polars

_DATA_GOAL, _GOAL, _REGRET_GOAL, _MEMORY_GOAL = 0.024, 0.05, 0.02, 0.10
MOVED = "moved"
"""The oracle's predictions, each moved by the measurements of all other configurations of the grid."""
_SMALLER = ("flat", "perfect", "log_p")
"""Baselines that look at measured runs on fewer ranks: said when there are some."""


def show(cases: Sequence[ScoredCase], register: Register, commit: Commit | None, looks: Sequence[Look]) -> None:
    """Everything, on standard output; tables are as wide as the terminal. ``cases`` are at least one."""
    console = Console()
    for case, moved in zip(cases, held_out_cases(cases), strict=True):
        case.said[MOVED] = moved.said[ORACLE_NAME]
    names = list(cases[0].said)
    scores = [score_predictor(cases, name, None if name == ORACLE_NAME else ORACLE_NAME) for name in names]
    for line in _head(cases, register, commit, looks):
        console.print(line, highlight=False)
    for view in (_goals(cases, scores[0]), _parts(scores[0]), _predictors(cases, scores), _terms(cases)):
        console.print("", render_view(view, console.width), sep="\n")


def measured_cases(
    frame: polars.DataFrame, results: ResultsTree, register: Register, model_folder: Path
) -> list[ScoredCase]:
    """Return measurements with their registered predictions; a configuration without one is not scored."""
    foretold = {one.config_id: one for one in register.configurations}
    measured = [one for one in scored_configurations(frame) if one.config_id in foretold]
    forecasts = ClusterForecasts(results, model_folder)
    later = {name: baseline_predictor(forecasts, BASELINES[name], measured) for name in _SMALLER}
    return [
        ScoredCase(one, {**foretold[one.config_id].said, **{name: say(one) for name, say in later.items()}})
        for one in measured
    ]


def interval_rows(cases_by_score: Mapping[str, Sequence[ScoredCase]]) -> dict[str, list[str]]:
    """Return by score, and for all together, how often the 90 % interval holds, and its median width."""
    rows = {}
    everything = [case for own in cases_by_score.values() for case in own]
    for name, own in {**cases_by_score, "all of them": everything}.items():
        score = score_predictor(own, ORACLE_NAME)
        results = [case.said[ORACLE_NAME] for case in own if case.measured.step_time_s]
        widths = [sqrt(result.high_s / result.low_s) for result in results if result.low_s and result.high_s]
        assert score.total is not None
        rows[name] = [str(len(widths)), format_percent(score.total.covered or 0.0), f"x {median(widths):.2f}"]
    return rows


def box_rows(cases: Sequence[ScoredCase], present: Sequence[ScoredCase]) -> dict[str, list[str]]:
    """Return by strategy the mean accuracy of each kind of prediction, and the noise, as cells of a table.

    The kinds: from the profile alone, calibrated, calibrated for the sweep, the same as ``present`` cases have it, and
    then with one pilot per model and strategy, of which the others are predicted.
    """
    kinds = [
        (cases, BLIND),
        (cases, CALIBRATED),
        (cases, ORACLE_NAME),
        (present, ORACLE_NAME),
        (cases_after_pilots(cases), ORACLE_NAME),
    ]
    scores = [score_predictor(own, name) for own, name in kinds]
    data = {case.measured.config_id for case in cases if case.measured.spec.strategy in DATA_PARALLEL}
    of_data = [
        score_predictor([case for case in own if case.measured.config_id in data], name).total for own, name in kinds
    ]
    rows = {"data parallelism": [_accuracy_text(summary) for summary in of_data]}
    rows["all"] = [_accuracy_text(score.total) for score in scores]
    # Where each model and strategy has one configuration, pilots leave none.
    means = [[one.mean for one in score.strategies.values() if one.mean is not None] for score in scores]
    rows["mean over strategies"] = [format_percent(fmean(own), 1) if own else "" for own in means]
    for strategy in scores[0].strategies:
        rows[f"`{strategy}`"] = [_accuracy_text(score.strategies.get(strategy)) for score in scores]
    noise = {f"`{name}`": summary.noise for name, summary in scores[0].strategies.items()}
    noise |= {"all": scores[0].total.noise if scores[0].total else None}
    return {
        name: [*cells, "" if noise.get(name) is None else format_percent(noise[name], 1)]
        for name, cells in rows.items()
    }


def _accuracy_text(summary: AccuracySummary | None) -> str:
    return "" if summary is None or summary.mean is None else f"{format_percent(summary.mean, 1)} of {summary.count}"


def _head(
    cases: Sequence[ScoredCase], register: Register, commit: Commit | None, looks: Sequence[Look]
) -> Iterator[str]:
    launches = sum(len(one.measured.launches_s) for one in cases)
    yield f"{len(cases)} of {len(register.configurations)} configurations, {launches} launches that ended well"
    yield f"predicted from: {'; '.join(register.sources)}"
    when = datetime.datetime.fromtimestamp(register.made_unix_s, datetime.timezone.utc)
    yield (
        f"predictions of {when:%Y-%m-%d %H:%M} UTC, committed as {commit.name}"
        if commit
        else f"predictions of {when:%Y-%m-%d %H:%M} UTC, NOT committed: this is no score"
    )
    yield f"look {len(looks)}: so many sets of predictions were compared with measurements of this grid"


def _goals(cases: Sequence[ScoredCase], ours: PredictorScore) -> View:
    columns = [
        Column("goal", "goal", is_key=True, is_number=False),
        Column("reached", "reached"),
        Column("asked", "asked"),
        Column("noise", "noise"),
        Column("met", "", is_number=False),
    ]
    view = View("goals", columns, [], [])
    data = [one for one in cases if one.measured.spec.strategy in DATA_PARALLEL and one.measured.spec.dp_degree > 1]
    rows = [("data parallelism, mean error", *_error(data), _DATA_GOAL)]
    for name in ours.strategies:
        own = [one for one in cases if one.measured.spec.strategy == name]
        rows.append((f"{name}, mean error", *_error(own), _GOAL))
    for what, reached, noise, goal in rows:
        asked = max(goal, 2 * noise)
        _row(view, what, reached, asked, noise)
    noise = _error(cases)[1]
    regret = ours.ranking.regret
    if regret is not None:
        _row(view, "recommended over best, mean", regret, max(_REGRET_GOAL, noise), noise)
    memory = ours.parts.get(MEMORY)
    if memory is not None:
        _row(view, "memory, mean error", 1 - memory.mean, _MEMORY_GOAL, 0.0)
    _row(view, "false fits", float(ours.false_fits), 0.0, 0.0, as_count=True)
    view.notes = ["asked: the goal, or twice the noise floor (spread between launches) where that is more"]
    return view


def _row(view: View, what: str, reached: float, asked: float, noise: float, as_count: bool = False) -> None:
    met = "met" if reached <= asked else "missed"
    view.raw.append([what, reached, asked, noise, met])
    shown = (
        (f"{reached:.0f}", f"{asked:.0f}", "")
        if as_count
        else tuple(format_percent(v, 1) for v in (reached, asked, noise))
    )
    view.cells.append([what, *shown, met])


def _error(cases: Sequence[ScoredCase]) -> tuple[float, float]:
    """Mean relative error and mean noise; what failed or was not predicted counts as an error of 1."""
    errors = []
    for one in cases:
        told, there = one.said[ORACLE_NAME].step_time_s, one.measured.step_time_s
        errors.append(abs(told - there) / there if told and there else 1.0)
    noise = [value for one in cases if (value := one.measured.noise) is not None]
    return fmean(errors) if errors else 1.0, fmean(noise) if noise else 0.0


_PARTS = {"compute_s": "computation", "comm_s": "communication", MEMORY: "memory"}


def _parts(ours: PredictorScore) -> View:
    """Accuracy of computation, communication and memory: errors of opposite sign cancel in the step time."""
    columns = [
        text_column("part", lambda row: _PARTS[row[0]], is_key=True),
        Column("count", "n", lambda row: row[1].count),
        _percent_column("mean", "accuracy", lambda row: row[1].mean),
        _percent_column("signed", "signed", lambda row: row[1].signed, sign="+"),
        _percent_column("noise", "noise", lambda row: row[1].noise),
    ]
    note = (
        f"configurations where the part was measured; times of at least {format_percent(MIN_STEP_FRACTION)} of the step"
    )
    return View.from_rows("parts of the step, each on its own", columns, ours.parts.items(), [note])


def _percent_column(name: str, heading: str, value: Callable[[Any], float | None], sign: str = "") -> Column:
    def text(row: Any) -> str:
        share = value(row)
        return "" if share is None else format_percent(share, 1, sign=sign)

    return Column(name, heading, value, text)


def _predictors(cases: Sequence[ScoredCase], scores: Sequence[PredictorScore]) -> View:
    """The oracle and the baselines side by side."""
    columns = [
        text_column("predictor", lambda score: score.predictor, is_key=True),
        Column("count", "n", lambda score: score.total.count if score.total else 0),
        Column("failed", "failed", lambda score: score.total.failed if score.total else 0),
        _percent_column("mean", "accuracy", lambda score: score.total and score.total.mean),
        _percent_column("other", "ours there", lambda score: score.other),
        _percent_column("signed", "signed", lambda score: score.total and score.total.signed, sign="+"),
        Column("tau", "tau", lambda score: mean_tau(cases, score.predictor)),
        _percent_column("regret", "regret", lambda score: score.ranking.regret),
        _percent_column("worst_regret", "worst", lambda score: score.ranking.worst_regret),
    ]
    notes = [
        f"n: configurations with a prediction; ours there: accuracy of {ORACLE_NAME} over the same ones; failed: "
        "accuracy 0",
        "tau: Kendall's, of configurations ranked by time per sample, mean over groups of the same model and devices",
    ]
    return View.from_rows("against the baselines", columns, scores, notes)


def _terms(cases: Sequence[ScoredCase]) -> View:
    """Return the term that is most wrong: computation or communication, measured and predicted, or the rest."""
    columns = [
        Column("strategy", "strategy", is_key=True, is_number=False),
        Column("model", "model", is_key=True, is_number=False),
        Column("ranks", "ranks", is_key=True),
        Column("step", "step"),
        Column("step_said", "said"),
        Column("compute", "computes"),
        Column("compute_said", "said"),
        Column("comm", "sends"),
        Column("comm_said", "said"),
        Column("rest", "rest"),
        Column("wrong", "most wrong", is_number=False),
    ]
    view = View("where the step times differ", columns, [], [])
    for one in cases:
        spec, there, said = one.measured.spec, one.measured.step_time_s, one.said[ORACLE_NAME]
        if not there or not said.step_time_s:
            continue
        measured = [one.measured.figures.get(name, 0.0) for name in ("compute_s", "comm_s")]
        told = [said.figures.get(name, 0.0) for name in ("compute_s", "comm_s")]
        off = {
            "computation": told[0] - measured[0],
            "communication": told[1] - measured[1],
            "rest": (said.step_time_s - sum(told)) - (there - sum(measured)),
        }
        wrong = max(off, key=lambda name: abs(off[name]))
        key = [strategy_label(spec), spec.model.rpartition(":")[2], spec.ranks]
        rest = there - sum(measured)
        times = (there, said.step_time_s, measured[0], told[0], measured[1], told[1], rest)
        view.raw.append([*key, *times, wrong])
        view.cells.append([
            *map(str, key), *map(format_seconds, times),
            f"{wrong} {format_percent(off[wrong] / there, sign='+')}",
        ])  # fmt: skip
    view.notes = [
        "computes, sends: of profiled steps, the rank that computes longest; rest: bubbles and waits for others, less "
        "what overlaps; percent of the measured step"
    ]
    return view
