"""The results table: one row per configuration with differing parameters, metrics, spreads and failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hpcbench.config.run_spec import RunSpec, run_label, strategy_label
from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.report.configurations import ResultRow
from hpcbench.report.status_text import STATUS_STYLE
from hpcbench.report.table_model import Column as Heading
from hpcbench.report.table_model import View, WarningFootnotes
from hpcbench.report.table_output import render_view
from hpcbench.results.frame import encode_sorted_json
from hpcbench.results.schema import STATUS_OK
from hpcbench.units import format_bytes, format_rate


class ResultsColumn(NamedTuple):
    """A column's heading, its cell of a row, whether it is a number, and whether its cells may be folded."""

    heading: str
    cell: Callable[[ResultRow], str]
    is_number: bool = True
    folds: bool = False


_ALWAYS_COLUMNS = ("strategy",)
_DEGREE_PARAMETERS = ("devices_per_task", "dp_degree", "tp_degree", "sp_degree", "pp_degree")
"""Told by the strategy's label and the ranks where people read, columns of their own for programs."""
_NEVER_COLUMNS = {
    "nodes",
    "tasks_per_node",
    "repeat",
    "seed",
    "verify",
    "time_limit_min",
    "spec_version",
    *_DEGREE_PARAMETERS,
}


_MIN_FOLDED_WIDTH = 12
"""A column that may be folded keeps so many characters."""


@dataclass(frozen=True)
class ResultsTable:
    """The rows as a table, what they share above it, what needs explaining below it.

    Where it is wider than the terminal it goes on in further blocks that repeat what tells the rows from each other.
    """

    rows: list[ResultRow]
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See the class."""
        varying, shared = split_parameters([row.spec for row in self.rows if row.spec is not None])
        columns = [*identity_columns(self.rows, varying), *_metric_columns(self.rows)]
        marks = WarningFootnotes(self.rows)
        columns.append(ResultsColumn("status", lambda row: row.status + marks.of(row), is_number=False))
        if _min_table_width(columns, self.rows) > options.max_width:
            yield render_view(results_text_view(self.rows, self.title), options.max_width)
            return
        table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        for column in columns:
            justify: Literal["left", "right"] = "right" if column.is_number else "left"
            table.add_column(
                column.heading, justify=justify, no_wrap=not column.folds, overflow="fold",
                min_width=_min_column_width(column, self.rows),
            )  # fmt: skip
        for row in self.rows:
            *cells, status = (printable_excerpt(column.cell(row)) for column in columns)
            table.add_row(*map(Text, cells), Text(status, style=STATUS_STYLE.get(row.status, "")))
        yield Text(printable_text(self.title), style="bold")
        if shared:
            yield Text(f"all runs: {shared}", style="dim")
        below: list[RenderableType] = [Text(""), table, Text(""), *_table_notes(self.rows), *marks.explained()]
        yield from below


def _min_column_width(column: ResultsColumn, rows: list[ResultRow]) -> int:
    """The narrowest that ``column`` may be."""
    heading = max(cell_len(line) for line in column.heading.split("\n"))
    widest = max([heading, *(cell_len(printable_excerpt(column.cell(row))) for row in rows)])
    return min(widest, _MIN_FOLDED_WIDTH) if column.folds else widest


def _min_table_width(columns: list[ResultsColumn], rows: list[ResultRow]) -> int:
    return sum(_min_column_width(column, rows) + 1 for column in columns) - 1


def results_text_view(rows: list[ResultRow], title: str) -> View:
    """The table's texts for documents."""
    varying, shared = split_parameters([row.spec for row in rows if row.spec is not None])
    columns = [*identity_columns(rows, varying), *_metric_columns(rows)]
    marks = WarningFootnotes(rows)
    headings = [*(column.heading.replace("-\n", "").replace("\n", "") for column in columns), "status"]
    numbers = [*(column.is_number for column in columns), False]
    shown: list[list[str]] = [[*(column.cell(row) for column in columns), row.status + marks.of(row)] for row in rows]
    keys = len(identity_columns(rows, varying))
    heads = [
        Heading(name, name, is_key=place < keys, is_number=number)
        for place, (name, number) in enumerate(zip(headings, numbers, strict=True))
    ]
    notes = [*([f"all runs: {shared}"] if shared else []), *(text.plain for text in _table_notes(rows))]
    return View(title, heads, [[*row] for row in shown], shown, notes, marks.texts())


_DATA_FIELDS = [name for name in ResultRow.__dataclass_fields__ if name not in {"spec", "warnings", "run_ids"}]


def results_data_view(rows: list[ResultRow], title: str) -> View:
    """The table's figures for programs: every parameter that differs or is always told, and all figures in SI units."""
    specs = [row.spec for row in rows if row.spec is not None]
    always = ("model", "dataset", "strategy", "nodes", "tasks_per_node", "batch_size", "precision")
    places = [name for name in _DEGREE_PARAMETERS if len({getattr(spec, name) for spec in specs}) > 1]
    varying = [name for name in split_parameters(specs)[0] if name not in always]
    names = [*always, *places, *varying]
    heads = [Heading(name, name) for name in [*names, *_DATA_FIELDS, "warnings", "run_ids"]]
    raw = [
        [
            *(_scalar_value(getattr(row.spec, name, None)) for name in names),
            *(getattr(row, name) for name in _DATA_FIELDS),
            "; ".join(row.warnings),
            " ".join(row.run_ids),
        ]
        for row in rows
    ]
    return View(title, heads, raw, [["" if value is None else str(value) for value in row] for row in raw])


def _scalar_value(value: Any) -> Any:
    return encode_sorted_json(value) if isinstance(value, dict) else value


def split_parameters(specs: list[RunSpec]) -> tuple[list[str], str]:
    """Names of the parameters that differ between runs, and in words those that all of them share."""
    names = [name for name in RunSpec.__struct_fields__ if name not in _NEVER_COLUMNS]
    values = {name: [getattr(spec, name) for spec in specs] for name in names}
    varying = [name for name in names if any(value != values[name][0] for value in values[name])]
    always = ("model", "dataset", "strategy", "batch_size", "precision")
    shared = [
        f"{name} {values[name][0]}"
        for name in names
        if specs
        and name not in varying
        and name not in _ALWAYS_COLUMNS
        and (name in always or _differs_from_default(specs[0], name))
    ]
    return [name for name in varying if name not in _ALWAYS_COLUMNS], printable_excerpt(", ".join(shared))


def _differs_from_default(spec: RunSpec, name: str) -> bool:
    fields = dict(
        zip(
            RunSpec.__struct_fields__[-len(RunSpec.__struct_defaults__) :],
            RunSpec.__struct_defaults__,
            strict=True,
        )
    )
    value = getattr(spec, name)
    return bool(value) and value != fields.get(name)


def identity_columns(rows: list[ResultRow], varying: list[str]) -> list[ResultsColumn]:
    """What tells ``rows`` from each other: strategy, ranks, and ``varying`` parameters."""
    columns = [ResultsColumn("strategy", _strategy_cell, is_number=False), ResultsColumn("ranks", _ranks_cell)]
    if len({row.cluster for row in rows}) > 1:
        columns.insert(0, ResultsColumn("cluster", lambda row: row.cluster, is_number=False, folds=True))
    for name in varying:
        columns.append(
            ResultsColumn(
                _PARAMETER_HEADINGS.get(name, name),
                _parameter_cell(name),
                is_number=name in _PARAMETER_HEADINGS,
                folds=name not in _PARAMETER_HEADINGS,
            )
        )
    return columns


_PARAMETER_HEADINGS = {
    "batch_size": "batch",
    "micro_batches": "micro-batches",
    "input_size": "size",
    "learning_rate": "lr",
}


def _strategy_cell(row: ResultRow) -> str:
    return strategy_label(row.spec) if row.spec else row.run_ids[0]


def _ranks_cell(row: ResultRow) -> str:
    if row.spec is None:
        return ""
    return str(row.spec.ranks) if row.spec.nodes == 1 else f"{row.spec.nodes}x{row.spec.tasks_per_node}"


def _parameter_cell(name: str) -> Callable[[ResultRow], str]:
    def cell(row: ResultRow) -> str:
        value: Any = getattr(row.spec, name, "")
        if isinstance(value, dict):
            return " ".join(f"{key}={one}" for key, one in value.items())
        return "" if value is None else str(value)

    return cell


def _metric_columns(rows: list[ResultRow]) -> list[ResultsColumn]:
    within = all(row.launches < 2 for row in rows)
    mfu = ResultsColumn("MFU", lambda row: f"{row.mfu:.1%}" if row.mfu is not None else "")
    speedup = ResultsColumn("speed\n-up", lambda row: f"{row.speedup:.2f}" if row.speedup else "")
    efficiency = ResultsColumn("eff.", lambda row: f"{row.efficiency:.0%}" if row.efficiency else "")
    verified = (
        [ResultsColumn("veri-\nfied", _verified_cell, is_number=False)]
        if any(_verified_cell(row) for row in rows)
        else []
    )
    return [
        ResultsColumn("step ms [95 %]" if within else "step ms [range]", _step_time_cell),
        ResultsColumn("samples\n/s", lambda row: format_rate(row.samples_per_s) if row.samples_per_s else ""),
        *([speedup, efficiency] if any(row.speedup for row in rows) else []),
        *([mfu] if any(row.mfu is not None for row in rows) else []),
        ResultsColumn("memory", lambda row: format_bytes(row.peak_memory_bytes) if row.peak_memory_bytes else ""),
        ResultsColumn("loss", _loss_cell),
        *verified,
    ]


def _verified_cell(row: ResultRow) -> str:
    return {None: "", True: "yes", False: "no"}[row.verified]


def _step_time_cell(row: ResultRow) -> str:
    if row.step_time_s is None:
        return ""
    if row.low_s is None or row.high_s is None:
        return _format_ms(row.step_time_s)
    return f"{_format_ms(row.step_time_s)} [{_format_ms(row.low_s)} {_format_ms(row.high_s)}]"


def _format_ms(seconds: float | None) -> str:
    value = (seconds or 0.0) * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _loss_cell(row: ResultRow) -> str:
    if row.loss_first is None:
        return ""
    last = f"{row.loss_last:.2g}" if row.loss_last is not None else "?"
    return f"{row.loss_first:.2g}>{last}"


_MAX_NAMED_FAILURES = 5
"""So many failures of one reason are named one by one."""


def _table_notes(rows: list[ResultRow]) -> list[Text]:
    notes = []
    launches = sorted({row.launches for row in rows if row.step_time_s is not None})
    spreads = ["95 % block bootstrap of the median over the steps of one launch"] if 1 in launches[:1] else []
    if launches and launches[-1] > 1:
        several = [count for count in launches if count > 1]
        counts = str(several[0]) if len(several) == 1 else f"{several[0]} to {several[-1]}"
        spreads.append(f"lowest and highest median between {counts} launches")
    if spreads:
        notes.append(f"spread: {'; '.join(spreads)}")
    if any(row.speedup for row in rows):
        notes.append("speed-up: samples/s over one rank's with the same batch per replica; eff.: speed-up per device")
    if any(row.mfu is not None for row in rows):
        notes.append("MFU: the model's own FLOPs (no recomputation) over the devices' peak in the run's precision")
    if any(row.verified is not None for row in rows):
        notes.append("verified: trains as one process does, in a launch of this row with verify = true")
    texts = [Text(note, style="dim") for note in notes]
    alike: dict[tuple[str, str], list[ResultRow]] = {}
    for row in rows:
        if row.status != STATUS_OK:
            alike.setdefault((row.status, row.reason or "no reason was left"), []).append(row)
    for (status, reason), failed in alike.items():
        named = failed if len(failed) <= _MAX_NAMED_FAILURES else failed[:1]
        more = f" (the first of {len(failed)} rows alike)" if len(failed) > _MAX_NAMED_FAILURES else ""
        texts += [Text(printable_excerpt(f"{_row_label(row)}: {status}: {reason}{more}")) for row in named]
    return texts


def _row_label(row: ResultRow) -> str:
    if row.spec is None:
        return row.run_ids[0]
    return f"{run_label(row.spec)} ({row.run_ids[0]})"
