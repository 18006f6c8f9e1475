"""Predictions and calibrations as tables and JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Any

import msgspec

from hpcbench.config.expression import Expression
from hpcbench.config.run_spec import RunSpec, config_id, spec_document
from hpcbench.config.sweep_expansion import expression_values
from hpcbench.config.sweep_loader import COMPUTED_NAMES
from hpcbench.fileio import printable_text
from hpcbench.forecast.forecast import Forecast
from hpcbench.oracle.calibration.calibration_store import Calibration, FitResidual
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.prediction import NotPredicted, Prediction
from hpcbench.report.configurations import ResultRow
from hpcbench.report.results_table import identity_columns, split_parameters
from hpcbench.report.table_model import Column, View
from hpcbench.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

PREDICTION_FIGURES = (
    "step_time_s", "compute_s", "comm_s", "exposed_comm_s", "bubble_fraction", "straggler_s", "samples_per_s",
    "peak_memory_bytes", "bound_by", "fits",
)  # fmt: skip
"""What a condition may ask for beside the parameters."""


@dataclass(frozen=True)
class PredictedConfiguration:
    """Runs of one configuration, and what the oracle says of them."""

    spec: RunSpec
    run_ids: list[str]
    found: Prediction | NotPredicted


def predict_configurations(
    runs: dict[str, RunSpec], forecast: Forecast, where: str | None = None
) -> list[PredictedConfiguration]:
    """``runs`` by configuration, in their order: those for which ``where`` holds.

    Raises ``ConfigError`` where the condition is none.
    """
    condition = (
        Expression(where, [*RunSpec.__struct_fields__, *COMPUTED_NAMES, *PREDICTION_FIGURES], "--where")
        if where
        else None
    )
    by_config: dict[str, PredictedConfiguration] = {}
    for run_id, spec in runs.items():
        key = config_id(spec)
        if key not in by_config:
            by_config[key] = PredictedConfiguration(spec, [], forecast.predict(spec))
        by_config[key].run_ids.append(run_id)
    if condition is None:
        return list(by_config.values())
    return [one for one in by_config.values() if _condition_holds(condition, _condition_values(one))]


def _condition_holds(condition: Expression, values: dict[str, Any]) -> bool:
    """A figure that nobody knows makes no condition true."""
    return condition(values) is not None and condition.holds(values)


def _condition_values(one: PredictedConfiguration) -> dict[str, Any]:
    priced = not isinstance(one.found, NotPredicted)
    figures = {name: getattr(one.found, name) if priced else None for name in PREDICTION_FIGURES}
    return {**expression_values(msgspec.structs.asdict(one.spec)), **figures}


def predictions_json(found: Iterable[PredictedConfiguration], machines: Sequence[Machine]) -> dict[str, Any]:
    """``{"predictions": [...], "machines": [...]}``; a run that cannot be priced has ``reason`` for ``predicted``."""
    entries = []
    for one in found:
        said = (
            {"reason": one.found.reason}
            if isinstance(one.found, NotPredicted)
            else {"predicted": msgspec.to_builtins(one.found)}
        )
        entries += [{"run_id": run_id, "spec": spec_document(one.spec), **said} for run_id in one.run_ids]
    return {"predictions": entries, "machines": [machine_json(one) for one in machines]}


def machine_json(machine: Machine) -> dict[str, Any]:
    """Where the numbers are from."""
    return {
        "cluster": machine.cluster,
        "depth": machine.depth,
        "source": machine.source,
        "memory_bytes": machine.memory_bytes,
        "notes": machine.notes,
    }


def machine_notes(machines: Sequence[Machine]) -> list[str]:
    """Depth, source and guesses in words, each once."""
    lines = [f"{machine.depth}: {machine.source}" for machine in machines]
    return list(dict.fromkeys([*lines, *(note for machine in machines for note in machine.notes)]))


def predictions_view(found: Sequence[PredictedConfiguration], title: str) -> View:
    """A row a configuration."""
    rows = [ResultRow("", config_id(one.spec), one.spec, "planned") for one in found]
    varying, shared = split_parameters([one.spec for one in found])
    followed = _redundant_parameters(rows, varying)
    keys = identity_columns(rows, [name for name in varying if name not in followed])
    columns = [
        *(Column(one.heading, one.heading, is_key=True, is_number=one.is_number) for one in keys),
        *(Column(name, heading, is_number=name != "bound_by") for name, heading in _PREDICTION_HEADINGS.items()),
    ]
    limits = {one.found.memory_limit_bytes for one in found if not isinstance(one.found, NotPredicted)}
    view = View(title, columns, [], [])
    for row, one in zip(rows, found, strict=True):
        cells, raw = prediction_cells(one.found, len(limits) > 1)
        named = [column.cell(row) for column in keys]
        view.raw.append([*named, *raw])
        view.cells.append([*named, *cells])
    view.notes = [*([f"all runs: {shared}"] if shared else []), *_prediction_notes(found, limits)]
    if followed:
        view.notes.insert(0, f"{', '.join(followed)}: differ, but not between rows that are alike otherwise")
    view.warnings = _not_predicted_notes(found)
    return view


_TRAINING_PARAMETERS = ("weight_decay", "momentum", "learning_rate", "optimizer", "options")


def _redundant_parameters(rows: list[ResultRow], varying: list[str]) -> list[str]:
    """Of what a prediction hardly depends on, that without which the rows are told from each other all the same."""
    left = list(varying)
    for name in _TRAINING_PARAMETERS:
        others = [one for one in left if one != name]
        cells = {tuple(column.cell(row) for column in identity_columns(rows, others)) for row in rows}
        if name in left and len(cells) == len(rows):
            left = others
    return [name for name in varying if name not in left]


_PREDICTION_HEADINGS = {
    "step_time_s": "step [90 %]",
    "split": "split",
    "peak_memory_bytes": "memory",
    "bound_by": "bound by",
    "samples_per_s": "samples/s",
}


def prediction_cells(found: Prediction | NotPredicted, limit: bool = True) -> tuple[list[str], list[Any]]:
    """Texts and numbers of a prediction, in the order of the headings; ``limit``: say of how much memory, too."""
    if isinstance(found, NotPredicted):
        return ["-", "", "", "not priced", ""], [None] * len(_PREDICTION_HEADINGS)
    texts = [
        interval_text(found),
        time_split_text(found),
        memory_text(found, limit),
        found.bound_by,
        format_rate(found.samples_per_s),
    ]
    return texts, [found.step_time_s, texts[1], found.peak_memory_bytes, found.bound_by, found.samples_per_s]


def time_split_text(found: Prediction) -> str:
    """``90+8+2``: percent of the step that is computation, communication that nothing hides, bubble."""
    total = found.step_time_s or 1.0
    parts = [(found.compute_s + found.straggler_s) / total, found.exposed_comm_s / total, found.bubble_fraction]
    if not parts[2]:
        parts.pop()
    return "+".join(f"{part * 100:.0f}" for part in parts)


def interval_text(found: Prediction) -> str:
    """``12.3 ms [8.0 19]``: the bounds in the unit of the step time."""
    text = format_seconds(found.step_time_s)
    number, _, unit = text.partition(" ")
    factor = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}.get(unit)
    if factor is None:
        return f"{text} [{format_seconds(found.interval.low)} {format_seconds(found.interval.high)}]"
    low, high = (_two_digits(bound * factor) for bound in (found.interval.low, found.interval.high))
    return f"{number} [{low} {high}] {unit}"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def memory_text(found: Prediction, limit: bool = True) -> str:
    """What the fullest rank holds, of how much; ``!`` where that is too much."""
    text = format_bytes(found.peak_memory_bytes)
    if limit and found.memory_limit_bytes is not None:
        text += f" of {format_bytes(found.memory_limit_bytes)}"
    return text + (" !" if found.fits is False else "")


def _prediction_notes(found: Sequence[PredictedConfiguration], limits: set[int | None]) -> list[str]:
    priced = [one.found for one in found if not isinstance(one.found, NotPredicted)]
    notes = [
        "[90 %]: where the step time lies in nine of ten cases, if the numbers above are as uncertain as they say",
        "split: percent of the step: computation + communication that nothing hides + bubble",
    ]
    if len(limits) == 1 and None not in limits:
        notes.append(f"memory: of the fullest rank, out of {format_bytes(max(one or 0 for one in limits))}")
    if any(one.fits is False for one in priced):
        notes.append("!: does not fit; its time is that of a rank with more memory")
    if None in limits:
        notes.append("the profile says nothing of memory: whether a run fits is not known")
    return notes


def _not_predicted_notes(found: Sequence[PredictedConfiguration]) -> list[str]:
    reasons = Counter(one.found.reason for one in found if isinstance(one.found, NotPredicted))
    return [f"not priced: {count} of {len(found)}: {reason}" for reason, count in reasons.most_common()]


def fitted_parameters(machine: Machine) -> Iterator[tuple[str, str]]:
    """What of the machine was found, in two columns."""
    compute, comm = machine.compute, machine.comm
    for moved in machine.posterior.parameters if machine.posterior is not None else []:
        yield moved.name, f"{exp(moved.log_factor):.2f} times; {_format_percent(moved.learned)} of it from the runs"
    if compute.samples:
        factors = ", ".join(f"{name} {value:.2f}" for name, value in sorted(compute.factors.items()) if name)
        yield "kernels", f"{len(compute.samples)}; a step takes so many times their sum: {factors}"
        yield "computation of other models", f"to {_format_percent(compute.spread)}"
    for tasks, factor in sorted(compute.crowding.items()):
        if tasks > 1:
            yield f"{tasks} ranks on a node", f"each computes {factor:.2f} times as long"
    if comm.collectives:
        yield "collectives", f"{len(comm.collectives)} lines; to {_format_percent(comm.spread)}"
        yield "issuing a collective", format_seconds(comm.call_s)
        yield "computing under a collective", f"{comm.overlap_slowdown:.2f} times as long"
        yield "a collective under computing", f"{comm.comm_slowdown:.2f} times as long"
    for flows, phi in sorted(comm.contention.items()):
        yield f"{flows} groups on one link", f"each takes {phi:.2f} times as long"
    yield "scatter of ranks", _format_percent(machine.straggling)
    yield "memory of a process", f"{machine.base_bytes / 2**20:.0f} MiB"
    for key, one in sorted(machine.strategies.items()):
        yield key, f"computes {one.compute_factor:.2f} times as long, and {format_seconds(one.step_s)} a step"


def _format_percent(share: float) -> str:
    return f"{share:.1%}".replace(".0%", "%")


def calibration_view(calibration: Calibration) -> RenderableType:
    """Tables for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    found = Table("found", "", box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name, text in fitted_parameters(calibration.machine):
        found.add_row(Text(printable_text(name)), Text(printable_text(text)))
    fits = Table("fit", "points", "error", "R2", box=None, padding=(0, 2, 0, 0))
    for one in worst_residuals(calibration.residuals):
        r2 = "" if one.r2 is None else f"{one.r2:.3f}"
        fits.add_row(Text(printable_text(one.what)), str(one.points), _format_percent(one.error), r2)
    notes = [Text(f"nominal: {printable_text(note)}") for note in calibration.notes]
    return Group(found, "", fits, *([""] if notes else []), *notes)


def worst_residuals(residuals: list[FitResidual]) -> list[FitResidual]:
    """One line for every operation of the collectives and for runs of the same words: the worst of them.

    The points of runs are all of theirs; of an operation they are those of its worst band.
    """
    worst: dict[str, list[FitResidual]] = defaultdict(list)
    for one in residuals:
        key = one.what.partition(",")[0] if one.part == "collectives" else one.what
        worst[key].append(one)
    return [_worst_residual(found) for found in worst.values()]


def _worst_residual(found: list[FitResidual]) -> FitResidual:
    one = max(found, key=lambda one: one.error)
    return msgspec.structs.replace(one, points=sum(other.points for other in found)) if one.part == "runs" else one
