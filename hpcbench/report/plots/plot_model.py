"""The plot model: plotted rows, a chart of them, notes, alternative text and panels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from hpcbench.report.configurations import STEP_TIME
from hpcbench.report.plots.charts import Chart
from hpcbench.report.plots.theme import column_values
from hpcbench.report.table_model import short_name
from hpcbench.results.schema import RunResult
from hpcbench.units import count_span, pluralize

ReadFullResults = Callable[[Sequence[tuple[str, str]]], Iterable[RunResult]]
"""Gives the whole results of (cluster, run_id) pairs: what is in files alone, such as single steps."""


@dataclass(frozen=True)
class PlotRequest:
    """The options of a plot beside its results."""

    by: tuple[str, ...] = ()
    """Columns that distinguish the lines; without any it is the strategy."""
    whole: ReadFullResults | None = None
    predicted: pl.DataFrame | None = None
    """Rows of an oracle: columns as the kind of plot defines them."""
    metric: str = STEP_TIME
    """Column of the plot of history."""

    def read_results(self, rows: pl.DataFrame) -> dict[tuple[str, str], RunResult]:
        """The full results of the launches in ``rows`` (columns ``cluster``, ``run_ids``) by cluster and run id."""
        launches = rows.select("cluster", "run_ids").explode("run_ids").rows()
        results = self.whole(launches) if self.whole and launches else ()
        return {(result.cluster, result.run_id): result for result in results}


class NothingToDraw(Exception):
    """The reason why a plot is empty, and notes on what was left out."""

    def __init__(self, reason: str, notes: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.notes = list(notes)


@dataclass(frozen=True)
class Plot:
    """One plot. Where there is nothing to draw, ``nothing`` is the reason and ``drawing`` is ``None``.

    ``draw_plot`` sets name and title.
    """

    name: str = ""
    title: str = ""
    subtitle: str = ""
    """Values that all points share."""
    alt: str = ""
    """Description of the plot, as text with numbers computed from ``frame``."""
    drawing: Chart | None = None
    frame: pl.DataFrame | None = None
    """The plotted rows, in SI units."""
    notes: list[str] = field(default_factory=list)
    """Notes on the meaning of spreads, and on data that were left out."""
    nothing: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The plotted rows as plain data, in SI units."""
        return [] if self.frame is None else self.frame.to_dicts()


_MAX_PANELS_IN_ALT_TEXT = 4
_MAX_LISTED = 12


def legend_title(by: Sequence[str]) -> str:
    """Return the title of the legend."""
    return ", ".join(short_name(name) for name in by) or "strategy"


def whisker_notes(rows: pl.DataFrame, more: str = "") -> list[str]:
    """Return the notes that define the whiskers of ``rows`` (columns ``low``, ``launches``)."""
    with_interval = rows.filter(rows["low"].is_not_null())
    counts = sorted({int(count) for count in with_interval["launches"].to_list()})
    kinds = ["95 % of the median within one launch"] if counts[:1] == [1] else []
    if counts and counts[-1] > 1:
        kinds.append(f"minimum and maximum of {count_span(counts)} launches")
    return [f"whiskers: {'; '.join([*kinds, *([more] if more else [])])}"] if kinds else ["no intervals"]


def typed_frame(
    rows: Iterable[dict[str, Any]], columns: Sequence[str], numbers: Sequence[str], integers: Sequence[str] = ()
) -> pl.DataFrame:
    """``rows`` as a frame of ``columns``: ``numbers``, ``integers``, and texts; missing entries are null."""
    types = {**dict.fromkeys(columns, pl.String), **dict.fromkeys(numbers, pl.Float64)}
    return pl.DataFrame(list(rows), schema={**types, **dict.fromkeys(integers, pl.Int64)})


def join_texts(texts: Sequence[str]) -> str:
    """``texts`` one after another, as many as anybody listens to."""
    more = [f"{len(texts) - _MAX_LISTED} more"] if len(texts) > _MAX_LISTED else []
    return "; ".join([*texts[:_MAX_LISTED], *more])


def lines_alt_text(rows: pl.DataFrame, what: str, shown: Callable[[float], str], *, most: bool) -> str:
    """Alt text of lines over devices (columns ``panel, series, x, y``): who leads at the most devices, and by what.

    ``most``: the highest leads, else the lowest.
    """
    low, high = int(min(column_values(rows, "x"))), int(max(column_values(rows, "x")))
    span = f"on {pluralize(low, 'device')}" if low == high else f"over {low} to {high} devices"
    lines = rows["series"].n_unique()
    said = [f"{what[0].upper()}{what[1:]} {span}, {pluralize(lines, 'line')}."]
    panels = rows["panel"].unique(maintain_order=True).to_list()
    for panel in panels[:_MAX_PANELS_IN_ALT_TEXT]:
        inside = rows.filter(rows["panel"] == panel)
        last = inside.filter(inside["x"] == inside["x"].max()).sort("y", descending=most)
        devices = pluralize(int(last["x"][0]), "device")
        (best, value), (worst, least) = ((last["series"][end], last["y"][end]) for end in (0, -1))
        where = f"{panel}: at" if panel else "At"
        word, other = ("most", "least") if most else ("least", "most")
        text = f"{where} {devices} {best} has {shown(value)}"
        said.append(f"{text}, the {word}; {worst} {shown(least)}, the {other}." if len(last) > 1 else f"{text}.")
    if len(panels) > _MAX_PANELS_IN_ALT_TEXT:
        said.append(f"{len(panels) - _MAX_PANELS_IN_ALT_TEXT} more panels.")
    return " ".join(said)
