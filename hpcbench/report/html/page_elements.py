"""Tables and figures of the HTML page, its provenance tables, and the sweep and commands that reproduce its results."""

from __future__ import annotations

import base64
import importlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import msgspec
import polars as pl

from hpcbench.config.run_spec import DEGREE_NAMES, RunSpec, spec_document, strategy_label
from hpcbench.config.sweep_file import sweep_toml
from hpcbench.errors import ConfigError
from hpcbench.fileio import escape_control_characters, printable_excerpt
from hpcbench.report.findings.finding import Finding
from hpcbench.report.plots.plot_model import Plot, PlotRequest
from hpcbench.report.plots.plotting import PLOTS, draw_plot, plot_specification, svg_of
from hpcbench.report.results_table import (
    ResultRow,
    own_metric_columns,
    parameter_text,
    read_parameter,
    split_parameters,
)
from hpcbench.report.table_model import Column, View, WarningFootnotes, column_heading
from hpcbench.results.schema import STATUS_OK, RunResult
from hpcbench.units import format_bytes, join_words

MAX_HTML_ROWS = 2000
"""A page with more rows would open slowly; ``table --out`` writes all."""


def page_view(name: str, title: str, columns: Sequence[Column], rows: Sequence[Any], notes: Sequence[str] = ()) -> View:
    """Return a view of ``rows`` for a page, without columns that are empty and rows above ``MAX_HTML_ROWS``."""
    shown = rows[:MAX_HTML_ROWS]
    filled = [column for column in columns if any(column.raw_of(row) not in (None, "") for row in shown)]
    more = f"the first {MAX_HTML_ROWS} of {len(rows)} rows; `hpcbench table --out` writes all"
    view = View.from_rows(title, filled, shown, [more, *notes] if len(rows) > MAX_HTML_ROWS else notes)
    return replace(view, name=name)


def plain_columns(
    names: Sequence[str], headings: Mapping[str, str] | None = None, keys: Sequence[str] = ()
) -> list[Column]:
    """Columns of rows that are sequences in the order of ``names``; those of ``keys`` offer choices."""
    texts = headings or {}
    return [
        Column(name, texts.get(name, column_heading(name)), itemgetter(number), choices=name in keys)
        for number, name in enumerate(names)
    ]


def _parameter(name: str, read: Callable[[RunSpec], Any], heading: str = "") -> Column:
    """A column of ``ResultRow`` with a value of its specification."""

    def value(row: ResultRow) -> Any:
        return None if row.spec is None else read(row.spec)

    return Column(name, heading or column_heading(name), value, choices=True)


_ROW_COLUMNS = [
    Column("cluster", "cluster", attrgetter("cluster"), choices=True),
    _parameter("spec.model", attrgetter("model")), _parameter("spec.dataset", attrgetter("dataset")),
    _parameter("spec.strategy", strategy_label), _parameter("spec.nodes", attrgetter("nodes")),
    _parameter("devices", attrgetter("devices")), _parameter("spec.batch_size", attrgetter("batch_size"), "batch"),
]  # fmt: skip
"""Cluster and shape of a ``ResultRow``."""
_LAST_COLUMNS = [
    Column("status", "status", attrgetter("status"), choices=True),
    Column("run", "run", lambda row: row.run_ids[0]),
]


def results_view(rows: Sequence[ResultRow], sweeps: Mapping[str, str], marks: WarningFootnotes) -> View:
    """Every configuration with its figures and differing parameters; ``sweeps`` names the sweep of each run."""
    valid = [row for row in rows if row.spec is not None]
    varying, shared = split_parameters([row.spec for row in valid if row.spec is not None])
    leading = [Column("sweep", "sweep", lambda row: sweeps.get(row.run_ids[0]), choices=True), *_ROW_COLUMNS]
    shown = {column.name.removeprefix("spec.") for column in leading}
    others = [
        _parameter(f"spec.{name}", lambda spec, name=name: _plain_value(read_parameter(spec, name)))  # type: ignore[misc]
        for name in varying
        if name not in shown and name not in DEGREE_NAMES
    ]
    # Sweep, cluster, model and data set that all rows share are in a note.
    leading = [
        column for number, column in enumerate(leading) if number > 3 or len({column.raw_of(row) for row in valid}) != 1
    ]
    # Status and warnings stand where a wide table is not yet scrolled.
    columns = [
        *leading, _LAST_COLUMNS[0],
        Column("warnings", "warnings", lambda row: marks.marks(row).removeprefix("*")),
        *others, *own_metric_columns(valid), *_RESULT_FIGURES,
        Column("launches", "launches", lambda row: row.launches if row.status == STATUS_OK else None),
        _LAST_COLUMNS[1],
    ]  # fmt: skip
    notes = [f"all runs: {shared}"] if shared else []
    notes.append("step time: median; from, to: min and max of several launches, or the 95 % interval within one launch")
    if any(row.warnings for row in valid):
        notes.append("warnings: the letters of the table below")
    if any(row.speedup for row in valid):
        notes.append("speed-up: samples/s over that of one device with the same batch per replica")
    return page_view("results", "Every configuration", columns, valid, notes=notes)


def _attribute_columns(*entries: tuple[str, str, str]) -> list[Column]:
    """Columns by name, attribute of a row, and heading other than the usual one."""
    return [
        Column(name, heading or column_heading(name), attrgetter(attribute)) for name, attribute, heading in entries
    ]


_RESULT_FIGURES = _attribute_columns(
    ("metrics.step_time_s.median", "step_time_s", ""), ("metrics.step_time_s.low", "low_s", "from"),
    ("metrics.step_time_s.high", "high_s", "to"), ("metrics.samples_per_s", "samples_per_s", ""),
    ("metrics.tokens_per_s", "tokens_per_s", ""), ("metrics.tokens_per_s_per_device", "tokens_per_s_per_device", ""),
    ("speedup", "speedup", ""), ("efficiency", "efficiency", ""), ("metrics.mfu", "mfu", ""),
    ("metrics.hfu", "hfu", ""),
    ("metrics.peak_memory_bytes", "peak_memory_bytes", "peak memory"), ("metrics.loss.last", "loss_last", "last loss"),
    ("metrics.accuracy", "accuracy", ""),
)  # fmt: skip
_EVIDENCE_COLUMNS = _attribute_columns(
    ("spec.strategy", "strategy", ""), ("spec.nodes", "nodes", ""), ("devices", "devices", ""),
    ("spec.batch_size", "batch_size", "batch"), ("launches", "launches", ""),
    ("metrics.samples_per_s", "samples_per_s", ""), ("metrics.samples_per_s.low", "samples_per_s_low", "min"),
    ("metrics.samples_per_s.high", "samples_per_s_high", "max"), ("metrics.step_time_s.median", "step_time_s", ""),
    ("efficiency", "efficiency", ""), ("metrics.peak_memory_bytes", "peak_memory_bytes", "peak memory"),
    ("status", "status", ""), ("run", "run_id", ""),
)  # fmt: skip


def evidence_view(finding: Finding, number: int) -> View | None:
    """The configurations behind the finding of this number of its kind; ``None`` without any."""
    name = f"rows-{finding.kind}-{number}"
    return page_view(name, "Evidence", _EVIDENCE_COLUMNS, finding.evidence) if finding.evidence else None


def warnings_view(rows: Sequence[ResultRow], marks: WarningFootnotes) -> View | None:
    """The letters of ``results_view``; ``None`` without warnings."""
    table = [
        [letter, len(texts), texts[0], next(row.run_ids[0] for row in rows if texts[0] in row.warnings)]
        for letter, texts in marks.kinds()
    ]
    names = ["letter", "configurations", "warning, the first of similar ones", "run"]
    return page_view("warned", "Warnings by kind", plain_columns(names), table) if table else None


def failures_view(rows: Sequence[ResultRow]) -> View | None:
    """Runs that did not end well, one by one; ``None`` without any."""
    failed = [row for row in rows if row.status != STATUS_OK]
    if not failed:
        return None
    cluster, _, _, *shape = _ROW_COLUMNS
    status, run = _LAST_COLUMNS
    reason = Column("reason", "reason", lambda row: row.reason or "no reason was left")
    notes = ["`hpcbench logs RUN` shows the output of a run"]
    columns = [cluster, status, *shape, reason, run]
    return page_view("failed", "Runs that did not end well", columns, failed, notes=notes)


PREDICTED_PLOT, SCALING_PLOT = "predicted", "scaling"
_MAX_DATA_ROWS = 300
_MAX_SPECIFICATION_CHARS = 500_000
"""A plot with a longer specification is shown as a picture only."""


class PageFigure(NamedTuple):
    """``source`` is a data URL of the picture, ``specification`` JSON for a script element."""

    ident: str
    title: str
    alt: str
    source: str
    specification: str
    notes: list[str]
    data: View


def draw_page_figures(
    frame: pl.DataFrame, request: PlotRequest, predicted: pl.DataFrame | None = None, lines: pl.DataFrame | None = None
) -> tuple[list[PageFigure], list[str], str]:
    """Draw every kind of plot of a results frame that has data; none if a package is missing.

    Returns the figures, the reasons why others are absent, and the library that makes them interactive (empty without
    figures).

    Args:
        frame: results with all columns.
        request: options of the plots.
        predicted: the frame of the plot ``predicted``.
        lines: predicted lines of the plot ``scaling``.
    """
    extra = {PREDICTED_PLOT: predicted, SCALING_PLOT: lines}
    workloads = {None, *frame["spec.workload"]}
    names = [name for name, kind in PLOTS.items() if kind.on_page and kind.workload in workloads]
    plots = [draw_plot(name, frame, replace(request, predicted=extra.get(name))) for name in names]
    left_out = [printable_excerpt(f"{plot.name}: {plot.nothing}") for plot in plots if plot.drawing is None]
    try:
        drawn = [make_page_figure(plot) for plot in plots if plot.drawing is not None]
    except ConfigError as error:
        return [], [f"no plots: {error.message}; {error.hint}"], ""
    scripts = ""
    if any(figure.specification for figure in drawn):
        # It is installed: the pictures were made with it.
        scripts = importlib.import_module("vl_convert").javascript_bundle()
        assert "</script" not in scripts.lower(), "the library cannot stand in a page"
    return drawn, left_out, scripts


def make_page_figure(plot: Plot) -> PageFigure:
    """Return ``plot`` for a page. Raises ``ConfigError`` if altair or vl-convert is missing."""
    drawn = plot_specification(plot)
    image, specification = base64.b64encode(svg_of(drawn)).decode(), script_json(drawn)
    names = list(plot.frame.columns) if plot.frame is not None else []
    rows = [list(map(_plain_value, row.values())) for row in plot.rows]
    notes = [f"the first {_MAX_DATA_ROWS} of {len(rows)} points"] if len(rows) > _MAX_DATA_ROWS else []
    title = printable_excerpt(plot.title)
    data = page_view(
        f"data-{plot.name}", f"Points of {title}", plain_columns(names), rows[:_MAX_DATA_ROWS], notes=notes
    )  # fmt: skip
    return PageFigure(
        plot.name, title, printable_excerpt(plot.alt), f"data:image/svg+xml;base64,{image}",
        specification if len(specification) <= _MAX_SPECIFICATION_CHARS else "",
        [printable_excerpt(note) for note in plot.notes], data,
    )  # fmt: skip


def _plain_value(value: object) -> object:
    """``value`` if it is a number or a text; words for truth values, tables and lists."""
    is_plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    return value if is_plain or value is None else parameter_text(value)


def script_json(value: object) -> str:
    """JSON for a script element: nothing in it ends the element, opens a comment, or hides."""
    text = escape_control_characters(msgspec.json.encode(value).decode())
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


MAX_PROVENANCE_READ = 1000
"""Maximum number of full results that are read for their provenance."""
_MAX_VALUES = 12
_MAX_ENVIRONMENTS = 8


def runs_view(frame: pl.DataFrame) -> View:
    """Number, statuses and times of runs by cluster, sweep and environment."""
    keys = ["cluster", "sweep", "environment_digest"]
    ended_at_s = pl.col("ended_at_s")
    is_ok = pl.col("status") == STATUS_OK
    groups = frame.group_by(keys, maintain_order=True).agg(
        pl.len().alias("runs"), is_ok.sum().alias("ok"), pl.col("status").filter(~is_ok),
        ended_at_s.min().alias("first"), ended_at_s.max().alias("last"),
    ).sort(keys, nulls_last=True)  # fmt: skip
    table = [
        [*identity, runs, ok, _status_counts(statuses), _format_time(first), _format_time(last)]
        for *identity, runs, ok, statuses, first, last in groups.iter_rows()
    ]
    names = [*keys, "runs", "ok", "others", "first", "last"]
    headings = {"environment_digest": "environment", "others": "not ok", "first": "first result", "last": "last result"}
    notes = ["times (UTC) of the ends of runs"] if any(row[6] for row in table) else []
    columns = plain_columns(names, headings)
    return page_view("runs", "Runs by cluster, sweep and environment", columns, table, notes=notes)


def _status_counts(statuses: Sequence[str]) -> str:
    """``1 failed, 2 oom``, by name."""
    return ", ".join(f"{count} {printable_excerpt(status)}" for status, count in sorted(Counter(statuses).items()))


def _format_time(time_s: float | None) -> str | None:
    if time_s is None:
        return None
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%d %H:%M")


def sample_runs(frame: pl.DataFrame) -> list[tuple[str, str]]:
    """Return cluster and id of the runs whose provenance is read: all, or equally many of each environment."""
    keys = ["cluster", "environment_digest"]
    ended = frame.filter(pl.col("config_id").is_not_null())
    if len(ended) > MAX_PROVENANCE_READ:
        share = max(1, MAX_PROVENANCE_READ // max(1, len(ended.select(keys).unique())))
        ended = ended.group_by(keys, maintain_order=True).head(share).head(MAX_PROVENANCE_READ)
    return list(ended.select("cluster", "run_id").iter_rows())


def environments_view(results: Iterable[RunResult], runs: int) -> View | None:
    """One row per fact and one column per environment: hosts, devices, software; ``None`` if nothing is known."""
    environments: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    read = 0
    for result in results:
        read += 1
        facts = environments.setdefault((result.cluster, result.environment_digest or "unknown"), {})
        for name, path in _ENVIRONMENT_FACTS.items():
            if texts := _fact_texts(result.provenance, path):
                facts.setdefault(name, {}).update(dict.fromkeys(texts))
    shown = dict(sorted((key, facts) for key, facts in environments.items() if facts)[:_MAX_ENVIRONMENTS])
    if not shown:
        return None
    names = ["fact", *(f"{cluster} {digest}" for cluster, digest in shown)]
    table = [
        [name, *(join_words(list(facts.get(name, {})), _MAX_VALUES) for facts in shown.values())]
        for name in _ENVIRONMENT_FACTS if any(name in facts for facts in shown.values())
    ]  # fmt: skip
    notes = [f"read from {read} of {runs} runs"] if read < runs else []
    if len(environments) > _MAX_ENVIRONMENTS:
        notes.append(f"the first {_MAX_ENVIRONMENTS} of {len(environments)} environments")
    columns = plain_columns(names, {name: name for name in names})
    return page_view("environments", "Hardware and software", columns, table, notes=notes)


def _fact_texts(provenance: dict[str, Any], path: str) -> list[str]:
    """The text of the value at ``path``, or of each value of a list there."""
    value: Any = provenance
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if path == "memory_bytes":
        value = format_bytes(value) if isinstance(value, int) and 0 < value < 2**60 else None
    elif path == "packages":
        value = [f"{name} {version}" for name, version in value.items()] if isinstance(value, dict) else None
    if value in (None, "", [], {}):
        return []
    return [printable_excerpt(str(part)) for part in (value if isinstance(value, list) else [value])]


_ENVIRONMENT_FACTS = {
    "hosts": "hosts", "device": "device", "GPU": "gpu_model", "processor": "cpu_model", "logical cores": "cores",
    "memory of a host": "memory_bytes", "partition": "job.partition", "launcher": "launcher", "hpcbench": "hpcbench",
    "commit": "hpcbench_commit", "torch": "torch", "CUDA": "cuda", "NCCL": "nccl", "HIP": "hip", "RCCL": "rccl",
    "driver": "driver",
    "Python": "python", "packages": "packages", "system": "os", "kernel": "kernel", "container": "container",
    "submissions": "submission",
}  # fmt: skip
"""Names of facts, and their paths in the provenance of a result."""
MAX_SWEEP_POINTS = 200


def reproducing_sweep_toml(specs: Sequence[RunSpec], repeats: int) -> str | None:
    """Return a sweep ``again`` of ``specs`` with ``repeats`` each; ``None`` above ``MAX_SWEEP_POINTS`` points.

    It contains every parameter that is not at its default, degrees included, so that the runs keep their ids.
    """
    points: dict[str, dict[str, Any]] = {}
    for spec in specs:
        point = {key: value for key, value in spec_document(spec).items() if key not in ("spec_version", "repeat")}
        points[json.dumps(point, sort_keys=True)] = point
    if not points or len(points) > MAX_SWEEP_POINTS:
        return None
    first, *others = points.values()
    # A table of options is merged with that of the fixed parameters, so it is fixed for all or for none.
    fixed = {key: value for key, value in first.items() if all(point.get(key) == value for point in others)}
    differing = [{key: value for key, value in point.items() if key not in fixed} for point in points.values()]
    return sweep_toml({"name": "again", "repeats": repeats}, fixed, differing if others else [])


def reproducing_commands(
    sources: Sequence[str], clusters: Sequence[str], where: str | None, *, has_sweep: bool
) -> list[str]:
    """Return the command that made this page, and those that measure it again."""
    narrowed = ["--where", where] if where else []
    commands = [["hpcbench", "report", *sources, *narrowed, "--out", "report.html"]]
    if has_sweep:
        commands += [["hpcbench", "submit", "again.toml", "--cluster", cluster] for cluster in clusters]
        commands.append(["hpcbench", "report", "again", *narrowed, "--out", "report.html"])
    return [shlex.join(command) for command in commands]
