"""Results as points of a plot: series and panel of each point, and the limits that keep a plot readable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import polars as pl

from hpcbench.config.run_spec import DEGREE_NAMES
from hpcbench.errors import ConfigError
from hpcbench.fileio import printable_text
from hpcbench.report.column_names import DERIVED_COLUMNS, split_option_column, with_derived_columns, with_option_column
from hpcbench.report.configurations import (
    GROUP_COLUMNS,
    HIGH,
    LOW,
    SPEEDUP_COLUMNS,
    SPREAD_COLUMNS,
    STEP_TIME,
    THROUGHPUT,
    Scaling,
    aggregate_launches,
    ok_results,
    with_speedups,
)
from hpcbench.report.plots.plot_model import DEVICES, NothingToDraw
from hpcbench.report.table_model import short_name
from hpcbench.results.schema import STATUS_OK
from hpcbench.units import pluralize

MAX_PANELS = 9
MAX_SERIES = 12
_IMPLAUSIBLE = 1e18
_MAX_NAME = 60
"""Characters of a name; who writes longer ones has the whole in the table."""
_PANEL_TEXTS = {
    "cluster": "on {}", "spec.model": "{}", "spec.model_options": "{}", "spec.dataset": "{}",
    "spec.input_size": "size {}", "_batch": "{}", "_devices": "{}", "spec.precision": "{}", "spec.data": "data {}",
    "spec.optimizer": "{}", "spec.channels_last": "channels_last {}", "environment_digest": "environment {}",
}  # fmt: skip
"""Columns whose values all points of one panel share, with the format of each value."""
_ALWAYS_IN_SUBTITLE = ("spec.model", "spec.dataset", "_batch", "_devices", "cluster")
_SERIES_KEYS = frozenset({"cluster", "sweep", "environment_digest", *DERIVED_COLUMNS})
"""Columns that may distinguish lines, in addition to parameters and provenance."""
_BATCH_KINDS: tuple[tuple[str, str, Scaling], ...] = (
    ("spec.batch_size", "batch {} per replica", "weak"), ("global_batch_size", "global batch {}", "strong"),
    ("_per_device", "{} samples per device", "weak"),
)  # fmt: skip
POINT_COLUMNS = tuple(dict.fromkeys((
    *GROUP_COLUMNS, "sweep", *(f"spec.{name}" for name in DEGREE_NAMES), *SPEEDUP_COLUMNS, STEP_TIME, *SPREAD_COLUMNS,
)))  # fmt: skip
"""Columns of a results frame that ``plot_points`` reads, in addition to the metric."""


class PlotPoints(NamedTuple):
    """``frame``: rows of ``configurations`` with ``speedup`` and ``efficiency``, ``panel``, ``series``, ``devices`` and
    ``label`` (the strategy with its degrees)."""

    frame: pl.DataFrame
    shared: str
    """Values that all points share, as text."""
    notes: list[str]


def plot_points(
    frame: pl.DataFrame, by: Sequence[str] = (), metric: str = THROUGHPUT, x: str = "", *, every: bool = False
) -> PlotPoints:
    """The measured configurations of ``frame`` that have a ``metric``; of several for one point the fastest.

    With ``every`` all of them, however many. Raises ``NothingToDraw`` if there is none. ``x`` is the column of the x
    axis; other numbers of devices are then other panels. Without it points are named by their devices.
    """
    ended = ok_results(frame)
    if ended.is_empty():
        raise NothingToDraw(no_points_reason(frame))
    failed = frame.filter(frame["status"] != STATUS_OK)
    notes = []
    if len(failed):
        notes = [f"not drawn: {pluralize(len(failed), 'run')} that did not end well ({_status_counts(failed)})"]
    rows = with_derived_columns(aggregate_launches(_with_key_columns(ended, [*by, *([x] if x else [])])))
    rows = rows.with_columns((pl.col("global_batch_size") / pl.col("devices")).alias("_per_device"))
    # The batch that the runs hold equal while devices grow: the one with the fewest values.
    batch, text, scaling = min(_BATCH_KINDS, key=lambda kind: rows[kind[0]].n_unique())
    # Add the bounds of the rate of single launches: those of the 95 % interval of the median step time.
    single = pl.col("launches") < 2
    bounds = [
        pl.when(single & (pl.col(f"{STEP_TIME}:{other}") > 0))
        .then(pl.col(THROUGHPUT) * pl.col(STEP_TIME) / pl.col(f"{STEP_TIME}:{other}"))
        .otherwise(pl.col(f"{THROUGHPUT}:{side}")).alias(f"{THROUGHPUT}:{side}")
        for side, other in ((LOW, HIGH), (HIGH, LOW))
    ]  # fmt: skip
    rows = with_speedups(rows.with_columns(bounds), scaling=scaling)
    # What nobody can have measured would only stretch an axis.
    possible = (pl.col(metric) > 0) & (pl.col(metric) < _IMPLAUSIBLE) & (pl.col("devices") > 0)
    if x and rows.schema[x].is_numeric():
        possible &= pl.col(x).is_not_null()
    there = rows.filter(possible).with_columns(
        pl.when((pl.col(name) > 0) & (pl.col(name) < _IMPLAUSIBLE)).then(name).alias(name)
        for name in [f"{name}:{side}" for name in {metric, THROUGHPUT, STEP_TIME, "speedup"} for side in (LOW, HIGH)]
        if name in rows.columns
    )
    if there.is_empty():
        count = pluralize(len(rows), "configuration")
        why = "no baseline is one device with the same workload"
        why = why if metric == "efficiency" else f"none has a measured {short_name(metric)}"
        raise NothingToDraw(f"{count} ended well, but {why}", notes)
    if len(there) < len(rows):
        notes.append(f"without {short_name(metric)}: {len(rows) - len(there)} configurations")
    there = there.with_columns(batch_text(text, _rounded_text(batch)))
    if x and (x != DEVICES or there[x].n_unique() == 1):
        there = there.with_columns(_device_count().alias("_devices"))
    there, shared = with_panels(_with_series_and_label(there, by), x)
    return PlotPoints(there if every else _fastest_of_each_point(there, notes, x or DEVICES), shared, notes)


def has_numeric_axis(rows: pl.DataFrame, x: str) -> bool:
    """Whether ``x`` has several values, and they are numbers."""
    return rows.schema[x].is_numeric() and rows[x].n_unique() > 1


def batch_text(text: str, size: pl.Expr) -> pl.Expr:
    """The column ``_batch``; a command has no batch that would be known."""
    return pl.when(pl.col("spec.model") == "").then(pl.lit("")).otherwise(pl.format(text, size)).alias("_batch")


def limit_panels_and_series(rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Return the rows of no more panels and lines than a reader can distinguish; a note counts the others."""
    for key, most, words in (("panel", MAX_PANELS, "panels"), ("series", MAX_SERIES, "lines")):
        counts = rows.group_by(key, maintain_order=True).len().sort("len", descending=True, maintain_order=True)
        if len(counts) > most:
            rows = rows.filter(pl.col(key).is_in(counts[key].head(most).to_list()))
            notes.append(f"the {most} {words} with most points of {len(counts)}; others can be chosen with --where")
    return rows


def _fastest_of_each_point(rows: pl.DataFrame, notes: list[str], x: str) -> pl.DataFrame:
    rows = limit_panels_and_series(rows, notes)
    cell = list(dict.fromkeys(["panel", "series", x]))
    fastest = rows.sort(THROUGHPUT, descending=True, nulls_last=True, maintain_order=True).unique(
        cell, keep="first", maintain_order=True
    )
    if len(fastest) < len(rows):
        notes.append(
            f"a point is the fastest of its configurations: {len(rows) - len(fastest)} slower ones are not drawn; "
            "--by separates them"
        )
    panels = sorted(fastest["panel"].unique(), key=_natural_sort_key)
    return fastest.sort([_order_of(panels), "series", x], maintain_order=True)


def _order_of(panels: Iterable[str]) -> pl.Expr:
    """The number of each row's panel in ``panels``."""
    return pl.col("panel").replace_strict({name: n for n, name in enumerate(panels)}, return_dtype=pl.Int64)


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Numbers in names by their size."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name[:_MAX_NAME])]


def no_points_reason(frame: pl.DataFrame) -> str:
    """Return why a frame without a run that ended well gives an empty plot."""
    if frame.is_empty():
        return "there are no results"
    count = "the one run" if len(frame) == 1 else f"none of {len(frame)} runs"
    verb = "did not end well" if len(frame) == 1 else "ended well"
    return f"{count} {verb}: {_status_counts(frame)}"


def _status_counts(frame: pl.DataFrame) -> str:
    counts = frame.group_by("status", maintain_order=True).len().sort("len", descending=True, maintain_order=True)
    return ", ".join(f"{count} {printable_text(status)[:_MAX_NAME]}" for status, count in counts.iter_rows())


def _with_key_columns(frame: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    for column in by:
        if split_option_column(column):
            frame = with_option_column(frame, column)
        elif not column.startswith(("spec.", "provenance.")) and column not in _SERIES_KEYS:
            raise ConfigError(f"--by {short_name(column)}: equal for all lines", hint="name another parameter")
    return frame


def _rounded_text(column: str) -> pl.Expr:
    """Whole numbers without a decimal point."""
    value = pl.col(column)
    return pl.when(value == value.round()).then(value.cast(pl.Int64).cast(pl.String)).otherwise(
        value.cast(pl.Float64).round(3).cast(pl.String)
    )  # fmt: skip


def _strategy_with_degrees(template: str) -> pl.Expr:
    """The strategy; of a hybrid with ``template`` for each of its degrees."""
    degrees = {name.removesuffix("_degree"): pl.col(f"spec.{name}") for name in DEGREE_NAMES}
    is_hybrid = pl.sum_horizontal(degree > 1 for degree in degrees.values()) > 1
    parts = [
        pl.when(is_hybrid & (degree > 1)).then(pl.format(template, pl.lit(name), degree)).otherwise(pl.lit(""))
        for name, degree in degrees.items()
    ]
    return pl.concat_str([pl.col("spec.strategy"), *parts])


def with_labels(frame: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Rows of a results frame with ``series``, ``label`` and ``devices``, as ``points`` names them."""
    return _with_series_and_label(with_derived_columns(_with_key_columns(frame, by)), by)


def _with_series_and_label(rows: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """A hybrid is one line however large its degrees are: ``filter dp tp``; its label is ``strategy_label``."""
    parts = [
        _strategy_with_degrees(" {}:{}").str.replace_all(r":\d+", "") if name == "spec.strategy"
        else pl.format(f"{short_name(name).rpartition('.')[2]} {{}}", pl.col(name).cast(pl.String).fill_null("default"))
        for name in by or ("spec.strategy",)
    ]  # fmt: skip
    rows = rows.with_columns(series=pl.concat_str(parts, separator=", "), label=_strategy_with_degrees(" {}{}"))
    return with_printable_names(rows, "series", "label")


def with_printable_names(rows: pl.DataFrame, *columns: str) -> pl.DataFrame:
    """``rows`` with short harmless texts in ``columns``: another user may have written these names."""
    for column in columns:
        names = rows[column].unique().to_list()
        printable = pl.col(column).replace_strict(names, list(map(printable_name, names)), return_dtype=pl.String)
        rows = rows.with_columns(printable)
    return rows


def printable_name(value: Any) -> str:
    """``value`` as a short piece of text that steers nothing."""
    text = printable_text(str(value))
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 3]}..."


def with_panels(rows: pl.DataFrame, x: str = "") -> tuple[pl.DataFrame, str]:
    """``rows`` with ``panel``: what differs between them; and what does not. They have a text ``_batch``.

    A column that changes with ``x`` alone, as the global batch does with the batch, makes no panels.
    """
    differing = [name for name in _PANEL_TEXTS if name in rows.columns and rows[name].n_unique() > 1]
    varying = [name for name in differing if x in ("", DEVICES) or _differs_at_one_x(rows, name, x)]
    same = [name for name in _ALWAYS_IN_SUBTITLE if name in rows.columns and name not in differing]
    texts = [_panel_text(name, rows[name][0]) for name in same]
    shared = ", ".join(filter(None, texts))
    if not varying:
        return rows.with_columns(pl.lit("").alias("panel")), shared
    different = rows.select(varying).unique(maintain_order=True)
    names: dict[str, None] = {}
    for values in different.iter_rows():
        name = ", ".join(filter(None, map(_panel_text, varying, values)))
        # What was cut short may look alike.
        names[name if name not in names else f"{name} ({len(names) + 1})"] = None
    panels = different.with_columns(pl.Series("panel", list(names), dtype=pl.String))
    return rows.join(panels, on=varying, how="left", nulls_equal=True, maintain_order="left"), shared


def _differs_at_one_x(rows: pl.DataFrame, name: str, x: str) -> bool:
    return name != x and len(rows.select(pl.struct(name, x).unique())) > rows[x].n_unique()


def _panel_text(name: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if name == "spec.model_options":
        value = " ".join(f"{key} {option}" for key, option in msgspec.json.decode(value).items())
    return _PANEL_TEXTS[name].format(printable_name(value))


MAX_CHART_ROWS = 24


def select_rows(points: PlotPoints, by: Sequence[str], most: int = MAX_CHART_ROWS) -> tuple[pl.DataFrame, list[str]]:
    """The points of the most devices as rows, few devices first, with ``row`` their name; and the notes.

    Points are named by strategy and degrees, or by the columns of ``by``.
    """
    rows, notes = points.frame, points.notes
    if len(rows) > most:
        notes = [*notes, f"the {most} rows with most devices of {len(rows)}; others can be chosen with --where"]
        rows = rows.sort("devices", descending=True, maintain_order=True).head(most)
    order = _order_of(points.frame["panel"].unique(maintain_order=True))
    return rows.with_columns(row_name_column(by)).sort(order, "devices", "series", maintain_order=True), notes


def row_name_column(by: Sequence[str]) -> pl.Expr:
    """``row``: ``ddp, 4 devices``."""
    return pl.format("{}, {}", "series" if by else "label", _device_count()).alias("row")


def _device_count() -> pl.Expr:
    unit = pl.when(pl.col("devices") == 1).then(pl.lit("device")).otherwise(pl.lit("devices"))
    return pl.format("{} {}", "devices", unit)
