"""Tables and figures of the HTML page."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hpcbench.config.run_spec import DEGREE_NAMES, RunSpec, strategy_label
from hpcbench.errors import ConfigError
from hpcbench.fileio import escape_control_characters, printable_excerpt
from hpcbench.report.configurations import ResultRow
from hpcbench.report.findings.finding import EvidenceRow
from hpcbench.report.plots.plot_model import Plot, PlotRequest
from hpcbench.report.plots.plotting import PLOTS, draw_plot, encode_plot, plot_specification
from hpcbench.report.results_table import split_parameters
from hpcbench.report.table_model import WarningFootnotes, column_heading, format_value
from hpcbench.results.schema import STATUS_OK

if TYPE_CHECKING:
    import polars

MAX_HTML_ROWS = 2000
"""A page with more would be slow to open; the whole is one ``table --out`` away."""
_MAX_CHOICES = 24
_MAX_CELL_CHARS = 400


class HtmlCell(NamedTuple):
    """``sort`` is a number, or empty where the text itself is compared."""

    text: str
    sort: str = ""


@dataclass(frozen=True)
class HtmlColumn:
    """``choices``: the values that a reader can pick one of, where they are few."""

    name: str
    heading: str
    is_number: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class HtmlTable:
    """``ident`` is unique on its page; ``caption`` says what the rows are."""

    ident: str
    caption: str
    columns: list[HtmlColumn]
    rows: list[list[HtmlCell]]
    notes: list[str] = field(default_factory=list)
    filters: bool = True
    """Whether a reader would want to narrow it."""


def make_html_table(
    ident: str, caption: str, names: Sequence[str], rows: Sequence[Sequence[Any]], *,
    keys: Sequence[str] = (), notes: Sequence[str] = (), headings: dict[str, str] | None = None, filters: bool = True,
) -> HtmlTable:  # fmt: skip
    """A table of plain values: columns named as in a results frame, figures in SI units; empty columns are left out.

    ``keys`` are columns whose few values can be picked from.
    """
    kept = [place for place, _ in enumerate(names) if any(row[place] not in (None, "") for row in rows)]
    shown = rows[:MAX_HTML_ROWS]
    given = headings or {}
    columns = [
        HtmlColumn(
            names[place], printable_excerpt(given.get(names[place]) or column_heading(names[place])),
            any(isinstance(row[place], (int, float)) for row in shown),
            _column_choices(shown, place) if names[place] in keys else (),
        )
        for place in kept
    ]  # fmt: skip
    cells = [[make_html_cell(names[place], row[place]) for place in kept] for row in shown]
    more = f"the first {MAX_HTML_ROWS} of {len(rows)} rows; `hpcbench table --out` writes all"
    told = [*([more] if len(rows) > MAX_HTML_ROWS else []), *notes]
    return HtmlTable(ident, caption, columns, cells, told, filters and len(shown) > 1)


def make_html_cell(name: str, value: Any) -> HtmlCell:
    """``value`` of the column ``name`` with a unit that suits it."""
    # Ends of an interval are told in the unit of what they are ends of.
    text = printable_excerpt(format_value(name.removesuffix(".low").removesuffix(".high"), value))
    if len(text) > _MAX_CELL_CHARS:
        text = f"{text[:_MAX_CELL_CHARS]} ..."
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return HtmlCell(text, repr(value))
    return HtmlCell(text)


def _column_choices(rows: Sequence[Sequence[Any]], place: int) -> tuple[str, ...]:
    values = list(dict.fromkeys(row[place] for row in rows if row[place] not in (None, "")))
    if not 1 < len(values) <= _MAX_CHOICES:
        return ()
    numbers = all(isinstance(value, (int, float)) for value in values)
    return tuple(
        printable_excerpt(str(value)) for value in sorted(values, key=lambda one: one if numbers else str(one))
    )


_RESULT_KEYS = (
    "cluster",
    "spec.model",
    "spec.dataset",
    "spec.strategy",
    "spec.nodes",
    "devices",
    "spec.batch_size",
    "status",
)
_RESULT_FIGURES = {
    "metrics.step_time_s.median": "step_time_s", "metrics.step_time_s.low": "low_s",
    "metrics.step_time_s.high": "high_s", "metrics.samples_per_s": "samples_per_s", "speedup": "speedup",
    "efficiency": "efficiency", "metrics.mfu": "mfu",
    "metrics.peak_memory_bytes": "peak_memory_bytes", "metrics.loss.last": "loss_last", "metrics.accuracy": "accuracy",
}  # fmt: skip
_RESULT_HEADINGS = {
    "spec.batch_size": "batch", "metrics.step_time_s.low": "from", "metrics.step_time_s.high": "to",
    "metrics.loss.last": "last loss", "metrics.peak_memory_bytes": "peak memory", "metrics.mfu": "MFU",
}  # fmt: skip


def results_html_table(rows: Sequence[ResultRow], sweeps: Mapping[str, str], marks: WarningFootnotes) -> HtmlTable:
    """Every configuration with its figures; of parameters those that differ. ``sweeps`` names that of each run."""
    known = [row for row in rows if row.spec is not None]
    varying, shared = split_parameters([row.spec for row in known if row.spec is not None])
    others = [name for name in varying if f"spec.{name}" not in _RESULT_KEYS and name not in DEGREE_NAMES]
    names = [
        "sweep", *_RESULT_KEYS[:-1], *(f"spec.{name}" for name in others), *_RESULT_FIGURES,
        "launches", "status", "warnings", "run",
    ]  # fmt: skip
    table = [[sweeps.get(row.run_ids[0]), *_result_cells(row, others, marks)] for row in known]
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
    return make_html_table(
        "results", "Every configuration", names, table,
        keys=("sweep", *_RESULT_KEYS, *(f"spec.{name}" for name in others)),
        notes=notes, headings=_RESULT_HEADINGS,
    )  # fmt: skip


def _result_cells(row: ResultRow, others: Sequence[str], marks: WarningFootnotes) -> list[Any]:
    spec = row.spec
    assert spec is not None
    return [
        row.cluster, spec.model, spec.dataset, strategy_label(spec), spec.nodes, spec.devices, spec.batch_size,
        *(_plain_parameter(getattr(spec, name)) for name in others),
        *(getattr(row, name) for name in _RESULT_FIGURES.values()),
        row.launches if row.status == STATUS_OK else None, row.status, marks.of(row).removeprefix("*"), row.run_ids[0],
    ]  # fmt: skip


def _plain_parameter(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{key}={one}" for key, one in value.items())
    return str(value) if isinstance(value, bool) else value


_EVIDENCE_COLUMNS = {
    "spec.strategy": "strategy", "spec.nodes": "nodes", "devices": "devices", "spec.batch_size": "batch_size",
    "launches": "launches", "metrics.samples_per_s": "samples_per_s", "metrics.samples_per_s.low": "samples_per_s_low",
    "metrics.samples_per_s.high": "samples_per_s_high", "metrics.step_time_s.median": "step_time_s",
    "efficiency": "efficiency", "metrics.peak_memory_bytes": "peak_memory_bytes", "status": "status", "run": "run_id",
}  # fmt: skip


def evidence_html_table(ident: str, rows: Sequence[EvidenceRow]) -> HtmlTable:
    """The configurations behind a finding."""
    headings = {**_RESULT_HEADINGS, "metrics.samples_per_s.low": "least", "metrics.samples_per_s.high": "most"}
    table = [[getattr(row, name) for name in _EVIDENCE_COLUMNS.values()] for row in rows]
    return make_html_table(
        ident, "What it rests on", list(_EVIDENCE_COLUMNS), table, headings=headings, filters=False,
    )  # fmt: skip


def warnings_html_table(rows: Sequence[ResultRow], marks: WarningFootnotes) -> HtmlTable | None:
    """What the letters of ``results_html_table`` mean; ``None`` where there are none."""
    kinds = marks.kinds()
    if not kinds:
        return None
    having = [next(row for row in rows if texts[0] in row.warnings) for _, texts in kinds]
    table = [[letter, len(texts), texts[0], row.run_ids[0]] for (letter, texts), row in zip(kinds, having, strict=True)]
    names = ["letter", "configurations", "warning, of several the first", "run"]
    return make_html_table("warned", "Warnings by kind", names, table, filters=False)


def failures_html_table(rows: Sequence[ResultRow]) -> HtmlTable | None:
    """Runs that did not end well, one by one; ``None`` where there are none."""
    gone = [row for row in rows if row.status != STATUS_OK]
    if not gone:
        return None
    names = ["cluster", "status", "spec.strategy", "spec.nodes", "devices", "spec.batch_size", "reason", "run"]
    table = [
        [row.cluster, row.status, *_run_shape(row.spec), row.reason or "no reason was left", row.run_ids[0]]
        for row in gone
    ]
    return make_html_table(
        "failed", "Runs that did not end well", names, table, headings=_RESULT_HEADINGS,
        keys=("cluster", "status", "spec.strategy", "spec.nodes"),
        notes=["`hpcbench logs RUN` shows what a run said"],
    )  # fmt: skip


def _run_shape(spec: RunSpec | None) -> list[Any]:
    if spec is None:
        return [None, None, None, None]
    return [strategy_label(spec), spec.nodes, spec.devices, spec.batch_size]


PREDICTED_PLOT, SCALING_PLOT = "predicted", "scaling"
_MAX_DATA_ROWS = 300
_MAX_SPECIFICATION_CHARS = 500_000
"""Characters; a larger plot is shown as a picture only."""


@dataclass(frozen=True)
class PageFigure:
    """``source`` is the picture as an address that holds it, ``specification`` JSON that may stand in a script."""

    ident: str
    title: str
    alt: str
    source: str
    specification: str
    notes: list[str]
    data: HtmlTable


@dataclass(frozen=True)
class PageFigures:
    """Those that could be drawn, and why others were not."""

    drawn: list[PageFigure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    scripts: str = ""
    """The library that makes them explorable; nothing where there are none."""


def draw_page_figures(
    frame: polars.DataFrame,
    asked: PlotRequest,
    predicted: polars.DataFrame | None = None,
    lines: polars.DataFrame | None = None,
) -> PageFigures:
    """Every kind of plot of a results frame that has something to show; none where a package is missing.

    ``predicted`` is for the plot of that name alone, ``lines`` for ``scaling``.
    """
    foretold = {PREDICTED_PLOT: predicted, SCALING_PLOT: lines}
    pictures = [draw_plot(name, frame, replace(asked, predicted=foretold.get(name))) for name in PLOTS]
    left_out = [printable_excerpt(f"{one.name}: {one.nothing}") for one in pictures if one.drawing is None]
    try:
        drawn = [make_page_figure(one) for one in pictures if one.drawing is not None]
        scripts = _vega_library() if any(one.specification for one in drawn) else ""
    except ConfigError as error:
        return PageFigures(left_out=[f"no plots: {error.message}; {error.hint}"])
    return PageFigures(drawn, left_out, scripts)


def make_page_figure(picture: Plot) -> PageFigure:
    """``picture`` for a page. Raises ``ConfigError`` where altair or vl-convert is missing."""
    image = base64.b64encode(encode_plot(picture, ".svg")).decode()
    text = script_json(plot_specification(picture))
    names = list(picture.frame.columns) if picture.frame is not None else []
    rows = [[_plain_value(row[name]) for name in names] for row in picture.rows]
    notes = [f"the first {_MAX_DATA_ROWS} of {len(rows)} points"] if len(rows) > _MAX_DATA_ROWS else []
    data = make_html_table(
        f"data-{picture.name}",
        f"Points of {printable_excerpt(picture.title)}",
        names,
        rows[:_MAX_DATA_ROWS],
        notes=notes,
        filters=False,
    )
    return PageFigure(
        picture.name, printable_excerpt(picture.title), printable_excerpt(picture.alt),
        f"data:image/svg+xml;base64,{image}",
        text if len(text) <= _MAX_SPECIFICATION_CHARS else "", [printable_excerpt(note) for note in picture.notes],
        data,
    )  # fmt: skip


def _plain_value(value: object) -> object:
    return value if isinstance(value, (int, float, str)) or value is None else str(value)


def script_json(value: object) -> str:
    """JSON that may stand in a script element: nothing in it ends that, opens a comment, or hides."""
    text = escape_control_characters(msgspec.json.encode(value).decode())
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _vega_library() -> str:
    # There is one: the pictures were made with it.
    scripts: str = importlib.import_module("vl_convert").javascript_bundle()
    assert "</script" not in scripts.lower(), "the library cannot stand in a page"
    return scripts
