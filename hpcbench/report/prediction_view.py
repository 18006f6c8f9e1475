"""Predictions and calibrations as tables and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from statistics import median
from types import MappingProxyType
from typing import Any

import msgspec
from rich.console import Group, RenderableType

from hpcbench.config.expression import Expression
from hpcbench.config.run_spec import OptionValue, RunSpec, config_id, run_label, spec_document
from hpcbench.config.sweep_loader import COMPUTED_NAMES, expression_values
from hpcbench.predict.calibration.calibration_store import Calibration
from hpcbench.predict.explain import Explanation
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.machine import Machine
from hpcbench.predict.measured_factors import counted_phrase
from hpcbench.predict.prediction import MEASURED_FOR_SWEEP, BasisKind, NotPredicted, Prediction, PredictionBasis
from hpcbench.report.results_table import identity_columns, split_parameters
from hpcbench.report.table_model import Column, View, text_column
from hpcbench.report.table_output import PrintedView
from hpcbench.units import format_bytes, format_percent, format_rate, format_seconds, join_words, pluralize

PREDICTION_FIGURES = (
    "step_time_s", "compute_s", "comm_s", "exposed_comm_s", "bubble_fraction", "straggler_s", "samples_per_s",
    "peak_memory_bytes", "bound_by", "fits",
)  # fmt: skip
"""Names that a condition may use beside the parameters."""


@dataclass(frozen=True)
class PredictedConfiguration:
    """The runs of one configuration and their prediction."""

    spec: RunSpec
    run_ids: list[str]
    prediction: Prediction | NotPredicted
    cluster: str = ""

    @property
    def known(self) -> Prediction | None:
        """The prediction; ``None`` if the configuration is not predicted."""
        return None if isinstance(self.prediction, NotPredicted) else self.prediction


def predict_configurations(
    runs: dict[str, RunSpec],
    forecast: Forecast,
    where: str | None = None,
    parameters: Mapping[str, OptionValue] = MappingProxyType({}),
) -> list[PredictedConfiguration]:
    """Return the configurations of ``runs`` that satisfy ``where``, in their order, with predictions.

    ``parameters`` are those of the sweep's command with their defaults.

    Raises ``ConfigError`` if ``where`` is not an expression.
    """
    names = [*RunSpec.__struct_fields__, *COMPUTED_NAMES, *PREDICTION_FIGURES, *parameters]
    condition = Expression(where, names, "--where") if where is not None else None
    by_config: dict[str, PredictedConfiguration] = {}
    for run_id, spec in runs.items():
        key = config_id(spec)
        if key not in by_config:
            by_config[key] = PredictedConfiguration(spec, [], forecast.predict(spec))
        by_config[key].run_ids.append(run_id)
    if condition is None:
        return list(by_config.values())
    satisfying = []
    for entry in by_config.values():
        figures = {name: getattr(entry.known, name, None) for name in PREDICTION_FIGURES}
        values = {**expression_values(msgspec.structs.asdict(entry.spec)), **figures}
        values |= {**parameters, **entry.spec.parameters}
        # A condition on an unknown figure does not hold.
        satisfying += [entry] if condition(values) is not None and condition.holds(values) else []
    return satisfying


def predictions_json(configurations: Iterable[PredictedConfiguration], machines: Sequence[Machine]) -> dict[str, Any]:
    """Return ``{"predictions": [...], "machines": [...]}``; a run without ``predicted`` has a ``reason``."""
    entries = []
    for entry in configurations:
        if isinstance(entry.prediction, NotPredicted):
            outcome = {"reason": entry.prediction.reason}
        else:
            outcome = {"predicted": msgspec.to_builtins(entry.prediction)}
        entries += [{"run_id": run_id, "spec": spec_document(entry.spec), **outcome} for run_id in entry.run_ids]
    fields = ("cluster", "depth", "source", "memory_bytes", "notes")
    sources = [{name: getattr(machine, name) for name in fields} for machine in machines]
    return {"predictions": entries, "machines": sources}


def explanation_view(entry: PredictedConfiguration, explained: Explanation, measured_s: Sequence[float]) -> View:
    """The terms of a predicted step; ``measured_s`` are the medians of the configuration's launches."""
    prediction = explained.prediction
    columns = [
        text_column("term", attrgetter("name"), is_key=True),
        Column("seconds", "time", attrgetter("seconds"), lambda term: format_seconds(term.seconds)),
        Column("share", "share", lambda term: term.seconds / prediction.step_time_s,
               lambda term: format_percent(term.seconds / prediction.step_time_s, 1)),
        text_column("rests_on", attrgetter("rests_on"), heading="rests on", wraps=True),
    ]  # fmt: skip
    notes = [
        f"predicted {interval_text(prediction)} a step, without the results of this configuration",
        f"source: {prediction.source}",
    ]
    if measured_s:
        difference_s = median(measured_s) - prediction.step_time_s
        notes.append(
            f"measured {format_seconds(median(measured_s))} ({pluralize(len(measured_s), 'launch', 'launches')}): "
            f"{'+' if difference_s >= 0 else '-'}{format_seconds(abs(difference_s))}, "
            f"{format_percent(difference_s / prediction.step_time_s, 1, '+')} of the prediction, that no term explains"
        )
    return View.from_rows(run_label(msgspec.structs.replace(entry.spec, repeat=0)), columns, explained.terms, notes)


def explanation_json(
    entry: PredictedConfiguration, explained: Explanation, measured_s: Sequence[float]
) -> dict[str, Any]:
    """Return ``{run_ids, predicted, terms: [{name, seconds, rests_on}], measured_step_time_s}``."""
    return {
        "run_ids": entry.run_ids, "predicted": msgspec.to_builtins(explained.prediction),
        "terms": [term._asdict() for term in explained.terms],
        "measured_step_time_s": median(measured_s) if measured_s else None,
    }  # fmt: skip


def machine_notes(machines: Sequence[Machine]) -> list[str]:
    """Depth, source and assumptions of machine models, each text once."""
    lines = [f"{machine.depth}: {machine.source}" for machine in machines]
    return list(dict.fromkeys([*lines, *(note for machine in machines for note in machine.notes)]))


def predictions_view(rows: Sequence[PredictedConfiguration], title: str) -> View:
    """One row per configuration."""
    varying, shared = split_parameters([row.spec for row in rows])
    # The training parameters without which the other columns still identify every row.
    shown_names = list(varying)
    for name in _TRAINING_PARAMETERS:
        others = [other for other in shown_names if other != name]
        cells = {tuple(column.cell_of(row) for column in identity_columns(rows, others)) for row in rows}
        if name in shown_names and len(cells) == len(rows):
            shown_names = others
    redundant = [name for name in varying if name not in shown_names]
    limits = {row.known.memory_limit_bytes for row in rows if row.known}
    columns = [
        *identity_columns(rows, [name for name in varying if name not in redundant]),
        _figure("step_time_s", "step [90 %]", interval_text, missing="-"),
        _figure("split", "split", time_split_text, value=time_split_text),
        _figure("peak_memory_bytes", "memory", lambda prediction: memory_text(prediction, limit=len(limits) > 1)),
        replace(_figure("bound_by", "bound by", attrgetter("bound_by"), missing="not priced"), is_number=False),
        _figure("samples_per_s", "samples/s", lambda prediction: format_rate(prediction.samples_per_s)),
        *basis_columns([row.known for row in rows], attrgetter("known")),
    ]
    notes = [f"all runs: {shared}"] if shared else []
    if redundant:
        names = join_words([f"`{name}`" for name in redundant])
        verb = "vary" if len(redundant) > 1 else "varies"
        notes.insert(0, f"{names} also {verb}; hidden since the other columns identify every row")
    sources = dict.fromkeys(_INTERVAL_SOURCES[row.known.rests_on.kind] for row in rows if row.known)
    notes += [f"[90 %]: prediction interval, from {' or '.join(sources)}"] if sources else []
    notes.append("split: % of the step in computation + exposed communication + pipeline bubble")
    notes += sorted({row.known.source for row in rows if row.known and row.spec.workload == "command"})
    if len(limits) == 1 and None not in limits:
        capacity = format_bytes(max(limit or 0 for limit in limits))
        notes.append(f"memory: peak of the rank that uses most; capacity {capacity}")
    if any(row.known and row.known.fits is False for row in rows):
        notes.append("!: does not fit; the time is that of a rank with more memory")
    if None in limits:
        notes.append("the profile defines no memory: whether a run fits is unknown")
    notes += basis_notes([row.known for row in rows])
    reasons = Counter(row.prediction.reason for row in rows if isinstance(row.prediction, NotPredicted))
    warnings = [f"not priced: {count} of {len(rows)}: {reason}" for reason, count in reasons.most_common()]
    return View.from_rows(title, columns, rows, notes, warnings)


_INTERVAL_SOURCES: Mapping[BasisKind, str] = {
    "profile": "the assumed uncertainty of the hardware figures above",
    "published runs": "the error of the fit to published runs",
    MEASURED_FOR_SWEEP: "the scatter of the calibration's measurements",
    "measured neighbours": "the scatter of measured runs", "calibrated": "the error of the calibration's fits",
}  # fmt: skip

_TRAINING_PARAMETERS = ("weight_decay", "momentum", "learning_rate", "optimizer", "options")
"""Parameters that hardly influence a prediction."""


def _figure(
    name: str, heading: str, text: Callable[[Prediction], str], value: Callable[[Prediction], Any] | None = None,
    missing: str = "",
) -> Column:  # fmt: skip
    """A column of predictions; ``missing`` is the cell of a configuration without one."""
    read = value or attrgetter(name)
    return Column(
        name, heading, lambda row: read(row.known) if row.known else None,
        lambda row: text(row.known) if row.known else missing,
    )  # fmt: skip


def basis_text(basis: PredictionBasis) -> str:
    """The kind (``calibrated``, ``profile``, ...), or the nearest configurations: ``itself``, ``4 of strategy``."""
    return counted_phrase(basis.counts) if basis.counts else basis.kind


def basis_columns(
    predictions: Iterable[Prediction | None], prediction_of: Callable[[Any], Prediction | None]
) -> list[Column]:
    """The column that states what each row rests on, where that is more for any of ``predictions`` than for others.

    Otherwise the lines above a table state it for all rows.
    """
    bases = [prediction.rests_on for prediction in predictions if prediction is not None]
    if not any(basis.counts or basis.kind == MEASURED_FOR_SWEEP for basis in bases):
        return []

    def text(row: Any) -> str:
        return basis_text(prediction.rests_on) if (prediction := prediction_of(row)) else ""

    return [text_column("rests_on", text, heading="rests on")]


def basis_notes(predictions: Iterable[Prediction | None]) -> list[str]:
    """Explain the column of ``basis_columns``: what it counts, and by how much predictions were moved."""
    moved = [entry.rests_on for entry in predictions if entry is not None and entry.rests_on.counts]
    if not moved:
        return []
    factors = [basis.factor for basis in moved]
    return [
        "rests on: measured configurations (the nearest kind; --json names them) beside the numbers above; they moved "
        f"predictions by {min(factors):.2f} to {max(factors):.2f} times"
    ]


def time_split_text(prediction: Prediction) -> str:
    """``90+8+2``: percent of the step in computation, exposed communication and pipeline bubble."""
    total = prediction.step_time_s or 1.0
    computation = (prediction.compute_s + prediction.straggler_s) / total
    shares = [computation, prediction.exposed_comm_s / total]
    shares += [prediction.bubble_fraction] if prediction.bubble_fraction else []
    return "+".join(f"{share * 100:.0f}" for share in shares)


def interval_text(prediction: Prediction) -> str:
    """``12.3 ms [8.0 19]``: the bounds in the unit of the step time."""
    text = format_seconds(prediction.step_time_s)
    interval = prediction.interval
    number, _, unit = text.partition(" ")
    factor = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}.get(unit)
    if factor is None:
        return f"{text} [{format_seconds(interval.low)} {format_seconds(interval.high)}]"
    return f"{number} [{_two_digits(interval.low * factor)} {_two_digits(interval.high * factor)}] {unit}"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def memory_text(prediction: Prediction, limit: bool = True) -> str:
    """Peak memory of the rank that uses most, with its ``limit``; ``!`` if that is exceeded."""
    text = format_bytes(prediction.peak_memory_bytes)
    if limit and prediction.memory_limit_bytes is not None:
        text += f" of {format_bytes(prediction.memory_limit_bytes)}"
    return text + (" !" if prediction.fits is False else "")


def fitted_parameters(machine: Machine) -> Iterator[tuple[str, str]]:
    """Name and text of every calibrated number of a machine."""
    compute, comm = machine.compute, machine.comm
    if compute.kernels:
        yield "kernels", f"{len(compute.kernels)}; of other models to {_format_percent(compute.spread)}"
    for tasks, factor in sorted(compute.crowding.items()):
        if tasks > 1:
            yield f"{tasks} ranks on a node", f"each computes {factor:.2f} times as long"
    if comm.messages:
        yield "messages", f"{len(comm.messages)}; of other sizes to {_format_percent(comm.spread)}"
    if comm.overlaps:
        yield "computing under a collective", f"{median(one.slowdown for one in comm.overlaps):.2f} times as long"
        slowed = median(one.comm_slowdown for one in comm.overlaps)
        yield "a collective under computing", f"{slowed:.2f} times as long"
    yield "scatter of ranks", _format_percent(machine.straggling)
    yield "memory of a process", f"{machine.base_bytes / 2**20:.0f} MiB"
    for key, overhead in sorted(machine.strategies.items()):
        yield key, f"computes {overhead.compute_factor:.2f} times as long, and {format_seconds(overhead.step_s)} a step"


def _format_percent(share: float) -> str:
    return format_percent(share, 1).replace(".0 %", " %")


def calibration_view(calibration: Calibration) -> RenderableType:
    """The fitted numbers and the residuals of the fits, for a terminal."""
    numbers = [text_column("fitted", itemgetter(0)), text_column("value", itemgetter(1), heading="", wraps=True)]
    fits = [
        text_column("fit", attrgetter("what")),
        Column("points", "points", attrgetter("points"), lambda fit: str(fit.points)),
        Column("error", "error", attrgetter("error"), lambda fit: _format_percent(fit.error)),
    ]
    return Group(
        PrintedView(View.from_rows("", numbers, fitted_parameters(calibration.machine))),
        PrintedView(View.from_rows("", fits, calibration.residuals, calibration.notes)),
    )
