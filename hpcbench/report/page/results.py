"""The tables of a page that list results: configurations, the rows behind a finding, runs that failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcbench.config.spec import DEGREES, RunSpec, strategy_label
from hpcbench.report.answers.answer import Evidence
from hpcbench.report.marks import Marks
from hpcbench.report.page.grid import Grid, grid
from hpcbench.report.rows import Row
from hpcbench.report.tables import split_parameters
from hpcbench.results.schema import OK

_KEYS = ("cluster", "spec.model", "spec.dataset", "spec.strategy", "spec.nodes", "devices", "spec.batch_size", "status")
_FIGURES = {
    "metrics.step_time_s.median": "step_time_s", "metrics.step_time_s.low": "low_s",
    "metrics.step_time_s.high": "high_s", "metrics.samples_per_s": "samples_per_s", "speedup": "speedup",
    "efficiency": "efficiency", "metrics.mfu": "mfu",
    "metrics.peak_memory_bytes": "peak_memory_bytes", "metrics.loss.last": "loss_last", "metrics.accuracy": "accuracy",
}  # fmt: skip
_HEADINGS = {
    "spec.batch_size": "batch", "metrics.step_time_s.low": "from", "metrics.step_time_s.high": "to",
    "metrics.loss.last": "last loss", "metrics.peak_memory_bytes": "peak memory", "metrics.mfu": "MFU",
}  # fmt: skip


def results_grid(rows: Sequence[Row], sweeps: Mapping[str, str], marks: Marks) -> Grid:
    """Every configuration with its figures; of parameters those that differ. ``sweeps`` names that of each run."""
    known = [row for row in rows if row.spec is not None]
    varying, shared = split_parameters([row.spec for row in known if row.spec is not None])
    others = [name for name in varying if f"spec.{name}" not in _KEYS and name not in DEGREES]
    names = [
        "sweep", *_KEYS[:-1], *(f"spec.{name}" for name in others), *_FIGURES, "launches", "status", "warnings", "run",
    ]  # fmt: skip
    table = [[sweeps.get(row.run_ids[0]), *_line(row, others, marks)] for row in known]
    # What all have in common is told once, below.
    for place in (3, 2, 1, 0):
        if len({line[place] for line in table}) == 1:
            names, table = (
                [*names[:place], *names[place + 1 :]],
                [[*line[:place], *line[place + 1 :]] for line in table],
            )
    notes = [f"all runs: {shared}"] if shared else []
    notes.append(
        "step time: the median; from, to: the least and the most of several launches, or the 95 % interval within one"
    )
    if any(row.warnings for row in known):
        notes.append("warnings: their letters are those of the table below")
    if any(row.speedup for row in known):
        notes.append("speed-up: samples/s over that of one device with the same batch per replica")
    return grid(
        "results", "Every configuration", names, table, keys=("sweep", *_KEYS, *(f"spec.{name}" for name in others)),
        notes=notes, headings=_HEADINGS,
    )  # fmt: skip


def _line(row: Row, others: Sequence[str], marks: Marks) -> list[Any]:
    spec = row.spec
    assert spec is not None
    return [
        row.cluster, spec.model, spec.dataset, strategy_label(spec), spec.nodes, spec.devices, spec.batch_size,
        *(_plain(getattr(spec, name)) for name in others), *(getattr(row, name) for name in _FIGURES.values()),
        row.launches if row.status == OK else None, row.status, marks.of(row).removeprefix("*"), row.run_ids[0],
    ]  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{key}={one}" for key, one in value.items())
    return str(value) if isinstance(value, bool) else value


_EVIDENCE = {
    "spec.strategy": "strategy", "spec.nodes": "nodes", "devices": "devices", "spec.batch_size": "batch_size",
    "launches": "launches", "metrics.samples_per_s": "samples_per_s", "metrics.samples_per_s.low": "samples_per_s_low",
    "metrics.samples_per_s.high": "samples_per_s_high", "metrics.step_time_s.median": "step_time_s",
    "efficiency": "efficiency", "metrics.peak_memory_bytes": "peak_memory_bytes", "status": "status", "run": "run_id",
}  # fmt: skip


def evidence_grid(ident: str, rows: Sequence[Evidence]) -> Grid:
    """The configurations behind a finding."""
    headings = {**_HEADINGS, "metrics.samples_per_s.low": "least", "metrics.samples_per_s.high": "most"}
    table = [[getattr(row, name) for name in _EVIDENCE.values()] for row in rows]
    return grid(
        ident, "What it rests on", list(_EVIDENCE), table, headings=headings, filters=False,
    )  # fmt: skip


def warnings_grid(rows: Sequence[Row], marks: Marks) -> Grid | None:
    """What the letters of ``results_grid`` mean; ``None`` where there are none."""
    kinds = marks.kinds()
    if not kinds:
        return None
    having = [next(row for row in rows if texts[0] in row.warnings) for _, texts in kinds]
    table = [[letter, len(texts), texts[0], row.run_ids[0]] for (letter, texts), row in zip(kinds, having, strict=True)]
    names = ["letter", "configurations", "warning, of several the first", "run"]
    return grid("warned", "Warnings by kind", names, table, filters=False)


def failures_grid(rows: Sequence[Row]) -> Grid | None:
    """Runs that did not end well, one by one; ``None`` where there are none."""
    gone = [row for row in rows if row.status != OK]
    if not gone:
        return None
    names = ["cluster", "status", "spec.strategy", "spec.nodes", "devices", "spec.batch_size", "reason", "run"]
    table = [
        [row.cluster, row.status, *_shape(row.spec), row.reason or "no reason was left", row.run_ids[0]] for row in gone
    ]
    return grid(
        "failed", "Runs that did not end well", names, table, headings=_HEADINGS,
        keys=("cluster", "status", "spec.strategy", "spec.nodes"),
        notes=["`hpcbench logs RUN` shows what a run said"],
    )  # fmt: skip


def _shape(spec: RunSpec | None) -> list[Any]:
    if spec is None:
        return [None, None, None, None]
    return [strategy_label(spec), spec.nodes, spec.devices, spec.batch_size]
