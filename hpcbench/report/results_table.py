"""The results table: one row per configuration with differing parameters, metrics, spreads and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from hpcbench.config.run_spec import PARAMETER_DEFAULTS, RunSpec, run_label, sorted_json, spec_document, strategy_label
from hpcbench.fileio import printable_excerpt
from hpcbench.report.table_model import Column, View, WarningFootnotes, text_column
from hpcbench.results.schema import STATUS_OK
from hpcbench.units import count_span, format_bytes, format_figure, format_percent, format_rate, or_empty, three_digits


@dataclass
class ResultRow:
    """One configuration on one cluster in one environment."""

    cluster: str
    config_id: str
    spec: RunSpec | None
    status: str
    reason: str = ""
    launches: int = 0
    step_time_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    spread: str = ""
    """The kind of ``low_s`` and ``high_s``: within one launch, or between several."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_memory_bytes: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    accuracy: float | None = None
    verified: bool | None = None
    """Whether all verified launches agree with the reference run; ``None`` without any."""
    warnings: list[str] = field(default_factory=list)
    run_ids: list[str] = field(default_factory=list)
    own_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of a command: medians over launches."""
    own_units: dict[str, str] = field(default_factory=dict)


_ALWAYS_COLUMNS = ("strategy",)
_DEGREE_PARAMETERS = ("devices_per_task", "dp_degree", "tp_degree", "sp_degree", "pp_degree")
"""Parts of the strategy's label and of the ranks for readers; columns of their own for programs."""
_NEVER_COLUMNS = {
    "nodes", "tasks_per_node", "repeat", "seed", "verify", "time_limit_min", "spec_version", "workload",
    "command_digest", "parameters", *_DEGREE_PARAMETERS,
}  # fmt: skip


def results_text_view(rows: list[ResultRow], title: str) -> View:
    """The table for readers: differing parameters, formatted metrics, and the reasons of failures below."""
    varying, shared = split_parameters([row.spec for row in rows if row.spec is not None])
    footnotes = WarningFootnotes(rows, shared=True)
    identity = identity_columns(rows, varying)
    # The rows; those without figures that would look the same (launches of a configuration) are together.
    groups: dict[Any, list[ResultRow]] = {}
    for row in rows:
        is_single = row.status == STATUS_OK or row.step_time_s is not None or row.spec is None
        looks = (row.status, row.warnings, [column.raw_of(row) for column in identity])
        groups.setdefault(row.run_ids[0] if is_single else repr(looks), []).append(row)
    equal = list(groups.values())
    counts = {members[0].run_ids[0]: f" ({len(members)})" for members in equal if len(members) > 1}

    def status_text(row: ResultRow) -> str:
        return f"{row.status}{counts.get(row.run_ids[0], '')}{footnotes.marks(row)}"

    all_ok = all(status_text(row) == STATUS_OK for row in rows)
    status = text_column("status", status_text, optional=3 if all_ok else 0)
    columns = [*identity, *_metric_columns(rows), status]
    notes = _joined([*([f"all runs: {shared}"] if shared else []), *_table_notes(rows)])
    shown = [members[0] for members in equal]
    return View.from_rows(title, columns, shown, notes, [*_failure_notes(rows), *footnotes.footnotes()])


_DATA_FIELDS = [
    name
    for name in ResultRow.__dataclass_fields__
    if name not in {"spec", "warnings", "run_ids", "own_metrics", "own_units"}
]


def results_data_view(rows: list[ResultRow], title: str) -> View:
    """The table for programs: every parameter that differs or is always shown, and all figures in SI units."""
    specs = [row.spec for row in rows if row.spec is not None]
    always = ("model", "dataset", "strategy", "nodes", "tasks_per_node", "batch_size", "precision")
    degrees = [name for name in _DEGREE_PARAMETERS if len({getattr(spec, name) for spec in specs}) > 1]
    varying = [name for name in split_parameters(specs)[0] if name not in always]
    columns = [parameter_column(name) for name in (*always, *degrees, *varying)]
    columns += [data_column(name, attrgetter(name)) for name in _DATA_FIELDS]
    columns += [data_column(column.name, column.raw_of) for column in own_metric_columns(rows)]
    columns.append(data_column("warnings", lambda row: "; ".join(row.warnings)))
    columns.append(data_column("run_ids", lambda row: " ".join(row.run_ids)))
    return View.from_rows(title, columns, rows)


def table_json(rows: list[ResultRow]) -> dict[str, Any]:
    """Return ``{"columns", "rows"}``: the results table with figures in SI units."""
    # dataclasses.asdict would copy every list and parameter first.
    documents = [{name: getattr(row, name) for name in ResultRow.__dataclass_fields__} for row in rows]
    for document, row in zip(documents, rows, strict=True):
        document["spec"] = spec_document(row.spec) if row.spec is not None else None
    return {"columns": list(ResultRow.__dataclass_fields__), "rows": documents}


def data_column(name: str, value: Callable[[Any], Any]) -> Column:
    """A column for programs: its cells are the plain values."""
    return Column(name, name, value, lambda row: or_empty(value(row)))


def parameter_column(name: str) -> Column:
    """A column for programs with a parameter of the specification; tables of options as JSON."""

    def value(row: IdentifiedRow) -> Any:
        parameter = read_parameter(row.spec, name)
        return sorted_json(parameter) if isinstance(parameter, dict) else parameter

    return data_column(name, value)


def split_parameters(specs: list[RunSpec]) -> tuple[list[str], str]:
    """Return the names of parameters that differ between ``specs``, and a text about those that all share.

    Parameters of a command are called ``parameters.lr``.
    """
    is_training = any(spec.model for spec in specs)
    # The one option of commands is their launch, which all runs of a sweep share.
    never = _NEVER_COLUMNS if is_training else {*_NEVER_COLUMNS, "options"}
    names = [name for name in RunSpec.__struct_fields__ if name not in never]
    names += dict.fromkeys(f"parameters.{name}" for spec in specs for name in spec.parameters)
    values = {name: [read_parameter(spec, name) for spec in specs] for name in names}
    varying = [name for name in names if any(value != values[name][0] for value in values[name])]
    always = ("model", "dataset", "strategy", "batch_size", "precision") if is_training else ()
    alike = [name for name in names if specs and name not in varying and name not in _ALWAYS_COLUMNS]
    shared = [
        parameter_text(value, f"{name}.") if isinstance(value, dict) else f"{name.removeprefix('parameters.')} {value}"
        for name in alike
        if (value := values[name][0]) and (name in always or value != PARAMETER_DEFAULTS.get(name))
    ]
    return [name for name in varying if name not in _ALWAYS_COLUMNS], printable_excerpt(", ".join(shared))


def read_parameter(spec: RunSpec | None, name: str) -> Any:
    """The value of a parameter by a name of ``split_parameters``, such as ``parameters.lr``."""
    table, _, key = name.partition(".")
    value = getattr(spec, table, None)
    return value.get(key) if key and value is not None else value


class IdentifiedRow(Protocol):
    """A row about one configuration; rows without a specification are called by their first run."""

    @property
    def cluster(self) -> str: ...
    @property
    def spec(self) -> RunSpec | None: ...
    @property
    def run_ids(self) -> list[str]: ...


def identity_columns(rows: Sequence[IdentifiedRow], varying: Iterable[str]) -> list[Column]:
    """The columns that identify ``rows``: strategy, ranks, and ``varying`` parameters; the cluster if several."""
    columns = [
        text_column("strategy", lambda row: strategy_label(row.spec) if row.spec else row.run_ids[0], is_key=True),
        text_column("ranks", _ranks_cell, is_key=True, is_number=True),
    ]
    if len({row.cluster for row in rows}) > 1:
        columns.insert(0, text_column("cluster", lambda row: row.cluster, is_key=True, folds=True))
    return [*columns, *map(_parameter_key_column, varying)]


def _parameter_key_column(name: str) -> Column:
    heading, own_name = _PARAMETER_HEADINGS.get(name), name.removeprefix("parameters.")
    return text_column(
        heading or own_name, lambda row: parameter_text(read_parameter(row.spec, name)), is_key=True,
        is_number=heading is not None, folds=heading is None,
    )  # fmt: skip


_PARAMETER_HEADINGS = {
    "batch_size": "batch", "micro_batches": "micro-batches", "input_size": "size", "learning_rate": "lr",
}  # fmt: skip


def _ranks_cell(row: IdentifiedRow) -> str:
    if row.spec is None:
        return ""
    per_node = row.spec.ranks_per_node
    return str(per_node) if row.spec.nodes == 1 else f"{row.spec.nodes}x{per_node}"


def parameter_text(value: Any, table: str = "") -> str:
    """``value`` of a parameter; ``key=value`` words of a table of options, each after ``table``, such as ``env.``."""
    if isinstance(value, dict):
        return " ".join(f"{table}{key}={part}" for key, part in value.items())
    return or_empty(value)


def _metric_columns(rows: list[ResultRow]) -> list[Column]:
    """Step time, throughput, speed-up, MFU, memory, loss and verification, as far as any row has them."""
    columns = [text_column(f"step ms {_spread_heading(rows)}", _step_time_cell)]
    is_training = any(row.spec is None or row.spec.model for row in rows)
    if is_training or any(row.samples_per_s for row in rows):
        columns.append(_figure_column("samples/s", "samples_per_s", format_rate, "samples\nper s"))
    if any(row.tokens_per_s for row in rows):
        columns.append(_figure_column("tokens/s", "tokens_per_s", format_rate, "tokens\nper s"))
        columns.append(_figure_column("/device", "tokens_per_s_per_device", format_rate))
    if any(row.speedup for row in rows):
        columns.append(_figure_column("speed-up", "speedup", "{:.2f}".format, "speed-\nup"))
        columns.append(_figure_column("eff.", "efficiency", format_percent, optional=4))
    if any(row.mfu is not None for row in rows):
        columns.append(text_column("MFU", lambda row: format_percent(row.mfu, 1)))
    if _has_recomputation(rows):
        columns.append(text_column("HFU", lambda row: format_percent(row.hfu, 1)))
    columns += own_metric_columns(rows)
    columns.append(_figure_column("memory", "peak_memory_bytes", format_bytes, optional=2))
    if is_training:
        columns.append(text_column("loss", _loss_cell, optional=5))
    columns = [replace(column, is_number=True) for column in columns]
    if any(row.verified is not None for row in rows):
        verified = {None: "", True: "yes", False: "no"}
        columns.append(text_column("verified", lambda row: verified[row.verified]))
    return columns


def _spread_heading(rows: list[ResultRow]) -> str:
    return "[95 %]" if all(row.launches < 2 for row in rows) else "[range]"


def own_metric_columns(rows: Iterable[ResultRow]) -> list[Column]:
    """Columns of the metrics of commands, without the step time, which has a column of its own."""

    def text(name: str, row: ResultRow) -> str:
        return format_figure(row.own_metrics[name], row.own_units.get(name, "")) if name in row.own_metrics else ""

    return [
        Column(name, name, lambda row, name=name: row.own_metrics.get(name), partial(text, name))  # type: ignore[misc]
        for name in dict.fromkeys(name for row in rows for name in row.own_metrics)
        if name != "step_time"
    ]


def _figure_column(
    heading: str, field_name: str, form: Callable[[float], str], compact_heading: str = "", optional: int = 0
) -> Column:
    """A column of a field; empty where it is absent or 0."""
    read = attrgetter(field_name)
    return text_column(
        heading, lambda row: form(read(row)) if read(row) else "", compact_heading=compact_heading, optional=optional
    )


def _has_recomputation(rows: list[ResultRow]) -> bool:
    """Return whether any row's HFU differs from its MFU."""
    return any(row.hfu is not None and row.mfu is not None and row.hfu > row.mfu for row in rows)


def _step_time_cell(row: ResultRow) -> str:
    if row.step_time_s is None:
        return ""
    if row.low_s is None or row.high_s is None:
        return _format_ms(row.step_time_s)
    return f"{_format_ms(row.step_time_s)} [{_format_ms(row.low_s)} {_format_ms(row.high_s)}]"


def _format_ms(seconds: float) -> str:
    return three_digits(seconds * 1e3)


def _loss_cell(row: ResultRow) -> str:
    if row.loss_first is None:
        return ""
    last = f"{row.loss_last:.2g}" if row.loss_last is not None else "?"
    return f"{row.loss_first:.2g}→{last}"


def _table_notes(rows: list[ResultRow]) -> list[str]:
    notes = []
    launches = sorted({row.launches for row in rows if row.step_time_s is not None})
    spreads = (
        ["95 % of one launch's median" if len(launches) > 1 else "of one launch's median"] if 1 in launches else []
    )
    if launches and launches[-1] > 1:
        spreads.append(f"min and max of {count_span(launches)} launches")
    if spreads:
        notes.append(f"{_spread_heading(rows)}: {'; '.join(spreads)}")
    if any(row.speedup for row in rows):
        equal = "batch per replica" if any(row.spec and row.spec.model for row in rows) else "parameters"
        notes.append(f"speed-up: over one rank with the same {equal}; eff.: per device")
    if any(row.mfu is not None for row in rows):
        notes.append("MFU: the model's own FLOPs (no recomputation) over the devices' peak in the run's precision")
    if _has_recomputation(rows):
        notes.append("HFU: as MFU, with the forward passes that activation checkpointing repeats")
    if any(row.tokens_per_s for row in rows):
        notes.append("/device: tokens/s of one device")
    if any(row.verified is not None for row in rows):
        notes.append("verified: a launch of this row with verify = true trained as one process does")
    return notes


_NOTE_WIDTH = 80


def _joined(notes: Sequence[str]) -> list[str]:
    """``notes`` with those on one line that fit together."""
    lines: list[str] = []
    for note in notes:
        if lines and len(lines[-1]) + len(note) + 2 <= _NOTE_WIDTH:
            lines[-1] += f"; {note}"
        else:
            lines.append(note)
    return lines


_MAX_NAMED_FAILURES = 5
"""Up to so many failures with the same reason are listed one by one."""


def _failure_notes(rows: list[ResultRow]) -> list[str]:
    """Reasons of rows that are not ok, by status and reason."""
    by_reason: dict[tuple[str, str], list[ResultRow]] = {}
    for row in rows:
        if row.status != STATUS_OK:
            by_reason.setdefault((row.status, row.reason or "no reason was left"), []).append(row)
    texts = []
    for (status, reason), failed in by_reason.items():
        named = failed if len(failed) <= _MAX_NAMED_FAILURES else failed[:1]
        more = f" (first of {len(failed)} such rows)" if len(failed) > _MAX_NAMED_FAILURES else ""
        texts += [f"{_row_label(row)}: {status}: {reason}{more}" for row in named]
    return texts


def _row_label(row: ResultRow) -> str:
    return row.run_ids[0] if row.spec is None else f"{run_label(row.spec)} ({row.run_ids[0]})"
