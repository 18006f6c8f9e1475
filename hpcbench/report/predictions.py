"""What the oracle says of a sweep's runs, as a table, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hpcbench.config.expand import names
from hpcbench.config.expression import Expression
from hpcbench.config.load import COMPUTED
from hpcbench.config.spec import RunSpec, as_dict, config_id
from hpcbench.oracle.answers import Unpriced
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.predict import Prediction
from hpcbench.report.rows import Row
from hpcbench.report.tables import identity_columns, split_parameters
from hpcbench.report.view import Column, View
from hpcbench.submit.forecast import Forecast
from hpcbench.units import format_bytes, format_rate, format_seconds

FIGURES = (
    "step_time_s", "compute_s", "comm_s", "exposed_comm_s", "bubble_fraction", "straggler_s", "samples_per_s",
    "peak_memory_bytes", "bound_by", "fits",
)  # fmt: skip
"""What a condition may ask for beside the parameters."""


@dataclass(frozen=True)
class Predicted:
    """Runs of one configuration, and what the oracle says of them."""

    spec: RunSpec
    run_ids: list[str]
    found: Prediction | Unpriced


def predictions(runs: dict[str, RunSpec], forecast: Forecast, where: str | None = None) -> list[Predicted]:
    """``runs`` by configuration, in their order: those for which ``where`` holds.

    Raises ``ConfigError`` where the condition is none.
    """
    condition = Expression(where, [*RunSpec.__struct_fields__, *COMPUTED, *FIGURES], "--where") if where else None
    by_config: dict[str, Predicted] = {}
    for run_id, spec in runs.items():
        key = config_id(spec)
        if key not in by_config:
            by_config[key] = Predicted(spec, [], forecast.of(spec))
        by_config[key].run_ids.append(run_id)
    if condition is None:
        return list(by_config.values())
    return [one for one in by_config.values() if _holds(condition, _values(one))]


def _holds(condition: Expression, values: dict[str, Any]) -> bool:
    """A figure that nobody knows makes no condition true."""
    return condition(values) is not None and condition.holds(values)


def _values(one: Predicted) -> dict[str, Any]:
    priced = not isinstance(one.found, Unpriced)
    figures = {name: getattr(one.found, name) if priced else None for name in FIGURES}
    return {**names(msgspec.structs.asdict(one.spec)), **figures}


def predictions_json(found: Iterable[Predicted], machines: Sequence[Machine]) -> dict[str, Any]:
    """``{"predictions": [...], "machines": [...]}``; a run that cannot be priced has ``reason`` for ``predicted``."""
    entries = []
    for one in found:
        said = (
            {"reason": one.found.reason}
            if isinstance(one.found, Unpriced)
            else {"predicted": msgspec.to_builtins(one.found)}
        )
        entries += [{"run_id": run_id, "spec": as_dict(one.spec), **said} for run_id in one.run_ids]
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


def predictions_view(found: Sequence[Predicted], title: str) -> View:
    """A row a configuration."""
    rows = [Row("", config_id(one.spec), one.spec, "planned") for one in found]
    varying, shared = split_parameters([one.spec for one in found])
    followed = _followed(rows, varying)
    keys = identity_columns(rows, [name for name in varying if name not in followed])
    columns = [
        *(Column(one.heading, one.heading, is_key=True, is_number=one.is_number) for one in keys),
        *(Column(name, heading, is_number=name != "bound_by") for name, heading in _HEADINGS.items()),
    ]
    limits = {one.found.memory_limit_bytes for one in found if not isinstance(one.found, Unpriced)}
    view = View(title, columns, [], [])
    for row, one in zip(rows, found, strict=True):
        cells, raw = figures_of(one.found, len(limits) > 1)
        named = [column.cell(row) for column in keys]
        view.raw.append([*named, *raw])
        view.cells.append([*named, *cells])
    view.notes = [*([f"all runs: {shared}"] if shared else []), *_notes(found, limits)]
    if followed:
        view.notes.insert(0, f"{', '.join(followed)}: differ, but not between rows that are alike otherwise")
    view.warnings = _unpriced(found)
    return view


_TRAINING = ("weight_decay", "momentum", "learning_rate", "optimizer", "options")


def _followed(rows: list[Row], varying: list[str]) -> list[str]:
    """Of what a prediction hardly depends on, that without which the rows are told from each other all the same."""
    left = list(varying)
    for name in _TRAINING:
        others = [one for one in left if one != name]
        cells = {tuple(column.cell(row) for column in identity_columns(rows, others)) for row in rows}
        if name in left and len(cells) == len(rows):
            left = others
    return [name for name in varying if name not in left]


_HEADINGS = {
    "step_time_s": "step [90 %]",
    "split": "split",
    "peak_memory_bytes": "memory",
    "bound_by": "bound by",
    "samples_per_s": "samples/s",
}


def figures_of(found: Prediction | Unpriced, limit: bool = True) -> tuple[list[str], list[Any]]:
    """Texts and numbers of a prediction, in the order of the headings; ``limit``: say of how much memory, too."""
    if isinstance(found, Unpriced):
        return ["-", "", "", "not priced", ""], [None] * len(_HEADINGS)
    texts = [
        interval_text(found),
        split_text(found),
        memory_text(found, limit),
        found.bound_by,
        format_rate(found.samples_per_s),
    ]
    return texts, [found.step_time_s, texts[1], found.peak_memory_bytes, found.bound_by, found.samples_per_s]


def split_text(found: Prediction) -> str:
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


def _notes(found: Sequence[Predicted], limits: set[int | None]) -> list[str]:
    priced = [one.found for one in found if not isinstance(one.found, Unpriced)]
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


def _unpriced(found: Sequence[Predicted]) -> list[str]:
    reasons = Counter(one.found.reason for one in found if isinstance(one.found, Unpriced))
    return [f"not priced: {count} of {len(found)}: {reason}" for reason, count in reasons.most_common()]
