"""Tables and JSON of ``hpcbench validate``: errors by strategy, choices by group, and every configuration."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from statistics import fmean
from typing import Any

import msgspec

from hpcbench.config.run_spec import strategy_label
from hpcbench.report.prediction_view import basis_text
from hpcbench.report.table_files import view_json
from hpcbench.report.table_model import Column, View, text_column
from hpcbench.report.validation import CONSTANT_CHOICE, GroupChoice, Validation, ValidationCase
from hpcbench.results.schema import STATUS_OK
from hpcbench.units import format_seconds


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
    return Column(name, heading, value, lambda row: "" if value(row) is None else f"{value(row):{sign}.1%}")


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
            notes.append(f"{words} in {len(regrets)} groups: mean {fmean(regrets):.1%}, worst {max(regrets):.1%}")
    failed = sum(choice.predicted_best is not None and choice.regret is None for choice in choices)
    if failed:
        notes.append(f"in {failed} groups the predicted best did not run")
    return View.from_rows("chosen strategies", columns, choices, notes)


def _predicted_label(choice: GroupChoice) -> str:
    return strategy_label(choice.predicted_best.spec) if choice.predicted_best else ""


def cases_view(cases: Sequence[ValidationCase]) -> View:
    """Every configuration, measured and predicted; in place of a time that was not measured the end of the run."""
    columns = [
        text_column("strategy", lambda case: strategy_label(case.measured.spec), is_key=True),
        text_column("model", attrgetter("measured.spec.model"), is_key=True),
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
