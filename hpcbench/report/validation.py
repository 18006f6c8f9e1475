"""Measured configurations beside their predictions: errors, ranks, and the regret of choosing by them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from operator import attrgetter, itemgetter
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import polars as pl

from hpcbench.config.run_spec import RunSpec, strategy_label
from hpcbench.predict.cluster_forecasts import ClusterForecasts
from hpcbench.predict.machine import Machine
from hpcbench.predict.prediction import NotPredicted, Prediction, count_bases
from hpcbench.report.configurations import SPEC_COLUMNS, STEP_TIME, run_spec_of
from hpcbench.report.hypothesis_tests import pooled_spread
from hpcbench.report.prediction_view import basis_text
from hpcbench.report.results_table import split_parameters
from hpcbench.report.table_files import view_json
from hpcbench.report.table_model import Column, View, text_column
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import STATUS_OK
from hpcbench.strategies.catalog import representative
from hpcbench.units import format_percent, format_seconds, pluralize


def errors_view(cases: Sequence[ValidationCase]) -> View:
    """The error of the step time: one row per strategy and one for all."""
    errors: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        if case.error is not None:
            errors[case.measured.spec.strategy].append(case.error)
    rows = [*errors.items(), ("all", [error for own in errors.values() for error in own])] if errors else []
    columns = [
        text_column("strategy", itemgetter(0), is_key=True),
        Column("count", "n", lambda row: len(row[1])),
        _percent_column("error", "error", lambda row: fmean(map(abs, row[1]))),
        _percent_column("signed_error", "signed", lambda row: fmean(row[1]), sign="+"),
    ]
    notes = ["error: mean of |predicted - measured| / measured; signed: mean of (predicted - measured) / measured"]
    predicted = [case for case in cases if case.known is not None and case.known.fits is not False]
    failed = Counter(case.measured.status for case in predicted if case.measured.status != STATUS_OK)
    if failed:
        counts = ", ".join(f"{count} {status}" for status, count in failed.most_common())
        notes.append(f"{failed.total()} were predicted to run and did not: {counts}")
    return View.from_rows("step time, by strategy", columns, rows, notes)


def _percent_column(name: str, heading: str, value: Callable[[Any], float | None], sign: str = "") -> Column:
    return Column(name, heading, value, lambda row: format_percent(value(row), 1, sign=sign))


def choices_view(choices: Sequence[GroupChoice]) -> View:
    """The measured and the predicted best of each model, data set and number of devices, and the regrets."""
    always = f"always {CONSTANT_CHOICE}"
    columns = [
        text_column("model", attrgetter("best.spec.model"), is_key=True),
        text_column("dataset", attrgetter("best.spec.dataset"), heading="data", is_key=True),
        Column("devices", "devices", attrgetter("best.spec.devices"), is_key=True),
        text_column("best", lambda choice: strategy_label(choice.best.spec), heading="measured best"),
        text_column("predicted_best", _predicted_label, heading="predicted best"),
        _percent_column("regret", "regret", attrgetter("regret")),
        _percent_column("constant_regret", always, attrgetter("constant_regret")),
    ]
    notes = ["regret: excess time per sample over the measured best, 0 where the difference is not significant"]
    for words, name in (("the predicted best", "regret"), (always, "constant_regret")):
        regrets = [regret for choice in choices if (regret := getattr(choice, name)) is not None]
        if regrets:
            mean, worst = format_percent(fmean(regrets), 1), format_percent(max(regrets), 1)
            notes.append(f"{words} in {pluralize(len(regrets), 'group')}: mean {mean}, worst {worst}")
    failed = sum(choice.predicted_best is not None and choice.regret is None for choice in choices)
    if failed:
        notes.append(f"in {failed} groups the predicted best did not run")
    return View.from_rows("chosen strategies", columns, choices, notes)


def _predicted_label(choice: GroupChoice) -> str:
    return strategy_label(choice.predicted_best.spec) if choice.predicted_best else ""


def cases_view(cases: Sequence[ValidationCase]) -> View:
    """Every configuration, measured and predicted; in place of a time that was not measured the end of the run."""
    varying, _ = split_parameters([case.measured.spec for case in cases])
    columns = [
        text_column("strategy", lambda case: strategy_label(case.measured.spec), is_key=True),
        text_column("model", lambda case: _model_text(case.measured.spec, varying), is_key=True),
        Column("devices", "devices", attrgetter("measured.spec.devices"), is_key=True),
        Column("batch_size", "batch", attrgetter("measured.spec.batch_size"), is_key=True),
        Column("measured_s", "measured", attrgetter("measured.step_time_s"),
               lambda case: format_seconds(step_s) if (step_s := case.measured.step_time_s) else case.measured.status),
        Column("predicted_s", "predicted", lambda case: None if case.known is None else case.known.step_time_s),
        _percent_column("error", "error", attrgetter("error"), sign="+"),
        Column("rank", "rank", attrgetter("rank"),
               lambda case: f"{case.rank} / {case.predicted_rank}" if case.rank else ""),
        Column("predicted_rank", "predicted rank", attrgetter("predicted_rank"), optional=True),
        text_column("status", attrgetter("measured.status"), optional=True),
        text_column("dataset", attrgetter("measured.spec.dataset"), heading="data", optional=True),
        text_column("rests_on", lambda case: basis_text(case.known.rests_on) if case.known else "", heading="rests on",
                    optional=True),
    ]  # fmt: skip
    notes = ["rank: place by measured / by predicted time per sample in the group of a model, data set and devices"]
    return View.from_rows("every configuration", columns, cases, notes)


def _model_text(spec: RunSpec, varying: Collection[str]) -> str:
    """The model, or of a command the parameters that differ between the rows."""
    own = (f"{name}={value}" for name, value in spec.parameters.items() if f"parameters.{name}" in varying)
    return spec.model or " ".join(own)


def validation_json(validation: Validation) -> dict[str, Any]:
    """Return ``{"errors", "choices", "cases", "notes"}``: the rows of the tables, and of each case its launches."""
    return {
        "errors": view_json(errors_view(validation.cases))["rows"],
        "choices": view_json(choices_view(validation.choices))["rows"],
        "cases": [
            {**msgspec.to_builtins(case.measured), **row}
            for case, row in zip(validation.cases, view_json(cases_view(validation.cases))["rows"], strict=True)
        ],
        "notes": validation.notes,
    }


VALIDATION_COLUMNS = ("cluster", "run_id", "config_id", "environment_digest", "status", STEP_TIME, *SPEC_COLUMNS)
COUNTED_FAILURES = frozenset({"oom", "failed", "timeout"})
"""Ends that contradict a prediction of a step time; the oracle predicts none of the others."""
CONSTANT_CHOICE = representative("replicas")
"""The strategy of ``always ddp``: a recommender with a larger regret is worse than a habit."""
_IMPLAUSIBLE_S = 1e18
"""Larger values are errors."""
_NORMAL_95 = 1.96
"""Number of standard deviations within which 95 % of a normal distribution lie."""


class MeasuredConfiguration(msgspec.Struct, kw_only=True):
    """A configuration on one cluster in one environment, as it was run."""

    cluster: str
    config_id: str
    spec: RunSpec
    status: str = STATUS_OK
    """``ok`` where any launch ended well, else how the first one ended."""
    run_ids: list[str] = []
    launches_s: list[float] = []
    """Median step time of every launch."""
    samples_per_step: float = 0
    """Samples of all replicas; for a command by its declared layout, else 1."""

    def __post_init__(self) -> None:
        self.samples_per_step = self.samples_per_step or self.spec.global_batch_size or 1

    @property
    def step_time_s(self) -> float | None:
        """The median over launches."""
        return median(self.launches_s) if self.launches_s else None

    @property
    def s_per_sample(self) -> float:
        """Measured time per sample; infinite where no launch ended well."""
        return (self.step_time_s or inf) / self.samples_per_step

    @property
    def group(self) -> Hashable:
        """Equal for configurations that are alternatives: of one workload, on the same number of devices."""
        spec, options = self.spec, msgspec.json.encode(self.spec.model_options, order="deterministic")
        workload = (spec.model or spec.command_digest, options, spec.dataset, spec.input_size, spec.precision)
        return (self.cluster, *workload, spec.devices)


def measured_configurations(frame: pl.DataFrame) -> list[MeasuredConfiguration]:
    """Return the launches of each configuration on one cluster in one environment, in their first order.

    ``frame`` has ``VALIDATION_COLUMNS``. Failed launches count where no launch of the configuration is ok.
    """
    launches: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in frame.select(VALIDATION_COLUMNS).iter_rows(named=True):
        if row["config_id"] is not None:
            is_ok = row["status"] == STATUS_OK
            environment = row["environment_digest"] if is_ok else None
            launches[row["cluster"], row["config_id"], is_ok, environment].append(row)
    succeeded = {key[:2] for key in launches if key[2]}
    return [
        MeasuredConfiguration(
            cluster=rows[0]["cluster"], config_id=rows[0]["config_id"], spec=run_spec_of(rows[0]),
            status=rows[0]["status"], run_ids=[row["run_id"] for row in rows],
            launches_s=[row[STEP_TIME] for row in rows if key[2] and 0 < (row[STEP_TIME] or 0) < _IMPLAUSIBLE_S],
        )
        for key, rows in launches.items()
        if key[2] or key[:2] not in succeeded
    ]  # fmt: skip


def excess_time(chosen: MeasuredConfiguration, best: MeasuredConfiguration) -> float | None:
    """Relative difference between their times per sample; ``None`` where the chosen one did not run."""
    return chosen.s_per_sample / best.s_per_sample - 1 if chosen.launches_s else None


def regret_of(
    chosen: MeasuredConfiguration, best: MeasuredConfiguration, noise: Mapping[str, tuple[float, int]]
) -> float | None:
    """Return ``excess_time``, or 0 where it is below 1.96 standard errors by the ``pooled_spread`` of the launches."""
    excess = excess_time(chosen, best)
    if excess is None or best.cluster not in noise:
        return excess
    spread, _ = noise[best.cluster]
    limit = _NORMAL_95 * spread * sqrt(1 / len(chosen.launches_s) + 1 / len(best.launches_s))
    return 0.0 if log(1 + excess) <= limit else excess


@dataclass
class ValidationCase:
    """A measured configuration and its prediction, which uses none of its own results."""

    measured: MeasuredConfiguration
    prediction: Prediction | NotPredicted
    rank: int | None = None
    """Place by measured time per sample among those of its group that ran and are predicted to fit."""
    predicted_rank: int | None = None
    """Place among the same by predicted time per sample."""

    @property
    def known(self) -> Prediction | None:
        """The prediction; ``None`` if the configuration is not predicted."""
        return None if isinstance(self.prediction, NotPredicted) else self.prediction

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; ``None`` if either is missing."""
        measured_s = self.measured.step_time_s
        return (self.known.step_time_s - measured_s) / measured_s if self.known and measured_s else None

    @property
    def predicted_s_per_sample(self) -> float:
        """Predicted time per sample; infinite where it is not predicted, or predicted not to fit into memory."""
        step_s = inf if self.known is None or self.known.fits is False else self.known.step_time_s
        # Formulas that agree may differ by rounding: the order of strategies must not depend on it.
        return float(f"{step_s / self.measured.samples_per_step:.9g}")


class GroupChoice(NamedTuple):
    """The configurations that would have been chosen in a group, and their regrets."""

    best: MeasuredConfiguration
    """The measured best."""
    predicted_best: MeasuredConfiguration | None
    """``None`` where fewer than two configurations are predicted."""
    regret: float | None
    """``None`` also where the predicted best did not run."""
    constant_regret: float | None
    """That of ``CONSTANT_CHOICE`` with the largest batch; ``None`` where it did not run."""


def compare_groups(cases: Sequence[ValidationCase]) -> list[GroupChoice]:
    """Set the ranks of ``cases``; return the choices in each group of two configurations or more of which any ran."""
    groups: dict[Hashable, list[ValidationCase]] = defaultdict(list)
    for case in cases:
        groups[case.measured.group].append(case)
    noise, choices = pooled_spread((case.measured.cluster, case.measured.launches_s) for case in cases), []
    for group in groups.values():
        feasible = [case for case in group if case.predicted_s_per_sample < inf]
        ranked = [case for case in feasible if case.measured.launches_s]
        for case in ranked:
            case.rank = 1 + sum(other.measured.s_per_sample < case.measured.s_per_sample for other in ranked)
            case.predicted_rank = 1 + sum(
                other.predicted_s_per_sample < case.predicted_s_per_sample for other in ranked
            )
        best = min((case.measured for case in group), key=lambda one: one.s_per_sample)
        if len(group) < 2 or not best.launches_s:
            continue
        feasible.sort(key=lambda case: (case.predicted_s_per_sample, case.measured.config_id))
        chosen = feasible[0].measured if len(feasible) > 1 else None
        constant = [case.measured for case in group if case.measured.spec.strategy == CONSTANT_CHOICE]
        largest = min(constant, key=lambda one: (-one.spec.global_batch_size, one.config_id), default=None)
        regrets = (None if one is None else regret_of(one, best, noise) for one in (chosen, largest))
        choices.append(GroupChoice(best, chosen, *regrets))
    return choices


class Validation(NamedTuple):
    """The compared configurations, the choices in their groups, and the machines of the predictions."""

    cases: list[ValidationCase]
    choices: list[GroupChoice]
    machines: list[Machine]
    notes: list[str]


def validate(frame: pl.DataFrame, results: ResultsTree) -> Validation:
    """Predict the configurations of ``frame``, which has ``VALIDATION_COLUMNS``, with the calibrations of a tree."""
    forecasts = ClusterForecasts(results)
    measured, notes = measured_configurations(frame), []
    conditions: dict[str, Callable[[MeasuredConfiguration], Any]] = {
        "that were skipped, cancelled, preempted or unsupported":
            lambda one: one.launches_s if one.status == STATUS_OK else one.status in COUNTED_FAILURES,
        # A probe measures, it does not train.
        "of strategies that the oracle has no formulas for":
            lambda one: forecasts.has_formulas(one.cluster, one.spec),
        "that the cluster's calibration was fitted to":
            lambda one: not forecasts.fitted_from(one.cluster, one.spec) & {*one.run_ids},
    }  # fmt: skip
    for reason, is_kept in conditions.items():
        kept = [one for one in measured if is_kept(one)]
        if len(kept) < len(measured):
            notes.append(f"not compared: {len(measured) - len(kept)} configurations {reason}")
        measured = kept
    cases = [ValidationCase(one, forecasts.predict(one.cluster, one.spec)) for one in measured]
    for case in cases:
        if case.known is not None and case.measured.spec.workload == "command":
            case.measured.samples_per_step = case.known.samples_per_s * case.known.step_time_s
    choices = compare_groups(cases)
    reasons = {case.prediction.reason for case in cases if isinstance(case.prediction, NotPredicted)}
    notes += [f"not predicted: {reason}" for reason in sorted(reasons)]
    bases = [case.known.rests_on for case in cases if case.known is not None]
    if bases:
        held_out = "; each leaves the results of its own configuration out (held out)"
        notes.append(f"predictions: {count_bases(bases)}{held_out if any(basis.counts for basis in bases) else ''}")
    return Validation(cases, choices, forecasts.machines(), notes)
