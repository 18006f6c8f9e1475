"""The plot model: plotted rows, a chart of them, notes, alternative text and panels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from hpcbench.report.configurations import STEP_TIME
from hpcbench.report.plots.charts import Chart, whisker_text
from hpcbench.report.plots.theme import column_values
from hpcbench.report.table_model import short_name
from hpcbench.results.schema import RunResult
from hpcbench.units import pluralize

DEVICES = "devices"
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
    x: str = DEVICES
    """Column of the x axis of plots over devices."""

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
    text = whisker_text(rows)
    return [f"whiskers: {'; '.join(filter(None, [text, more]))}"] if text else ["no intervals"]


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


def lines_alt_text(
    rows: pl.DataFrame, x: str, what: str, shown: Callable[[float], str], *, most: bool, names: str = "series"
) -> str:
    """Alt text of lines or bars (columns ``panel, x, y`` and ``names``): who leads at the largest x, and by what.

    ``x`` is the name of the axis, or empty for bars; ``most``: the highest leads, else the lowest.
    """

    def place(*values: float) -> str:
        numbers = " to ".join(f"{value:.10g}" for value in dict.fromkeys(values))
        if x != DEVICES:
            return f"{x} {numbers}"
        return f"{numbers} devices" if len(set(values)) > 1 else pluralize(int(values[0]), "device")

    count = rows[names].n_unique()
    span = f" over {place(*(edge(column_values(rows, 'x')) for edge in (min, max)))}" if x else ""
    lines = pluralize(count, "line" if x else "bar")
    said = [f"{what[0].upper()}{what[1:]}{span}, {lines}."]
    panels = rows["panel"].unique(maintain_order=True).to_list()
    for panel in panels[:_MAX_PANELS_IN_ALT_TEXT]:
        inside = rows.filter(rows["panel"] == panel)
        last = inside.filter(inside["x"].eq_missing(inside["x"].max())) if x else inside
        last = last.sort("y", descending=most)
        (best, value), (worst, least) = ((last[names][end], last["y"][end]) for end in (0, -1))
        where = f"{panel}: " if panel else ""
        where += f"{'at' if panel else 'At'} {place(last['x'][0])} " if x else ""
        word, other = ("most", "least") if most else ("least", "most")
        text = f"{where}{best} has {shown(value)}"
        said.append(f"{text}, the {word}; {worst} {shown(least)}, the {other}." if len(last) > 1 else f"{text}.")
    if len(panels) > _MAX_PANELS_IN_ALT_TEXT:
        said.append(f"{len(panels) - _MAX_PANELS_IN_ALT_TEXT} more panels.")
    return " ".join(said)
