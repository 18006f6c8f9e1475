"""The forms of charts, with the columns of the rows that each draws: lines, boxes, stacked bars, actions over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from hpcbench.report.plots import theme
from hpcbench.report.plots.theme import PlotAxis

_LINE_NUMBERS = ("x", "y", "low", "high")
LINE_COLUMNS = ("panel", "series", "role", *_LINE_NUMBERS, "label", "launches")
MEASURED, PREDICTED, IDEAL, CROSSOVER, BAND = "measured", "predicted", "ideal", "crossing", "band"
CHANGE = "change"
"""Roles of rows. An ideal is a thin line, a crossover a ring where two lines meet, a band the space around an ideal,
a change a vertical line from ``low`` to ``high``."""
MAX_INTEGER_TICKS = 10
"""Maximum number of different whole numbers on an axis that all are ticks."""


@dataclass(frozen=True)
class LineChart:
    """Rows of ``LINE_COLUMNS``; ``low`` and ``high`` are whiskers of measurements, a band of predictions."""

    x: PlotAxis
    y: PlotAxis
    joined: bool = True
    """Whether lines join what was measured; where something is predicted they join that."""
    from_zero: bool = True
    legend: str = "strategy"
    ideal: str = "ideal"
    """Name of the thin line."""


def line_rows(rows: pl.DataFrame, role: str) -> pl.DataFrame:
    """``rows`` with ``panel``, ``x`` and ``y`` at least, as ``LINE_COLUMNS``; a name that they lack is the role's."""
    lacking = [
        pl.lit(role).alias(name) if name in ("series", "label") else pl.lit(None).alias(name)
        for name in LINE_COLUMNS
        if name not in (*rows.columns, "role")
    ]
    return rows.with_columns(*lacking, pl.lit(role).alias("role")).select(
        *(
            pl.col(name).cast(pl.Float64 if name in _LINE_NUMBERS else pl.Int64 if name == "launches" else pl.String)
            for name in LINE_COLUMNS
        )
    )


BOX_NUMBERS = ("low", "quarter", "median", "three_quarters", "high", "value")
BOX_COLUMNS = ("panel", "series", "row", "role", *BOX_NUMBERS, "note")
BOX_ROLE, DOT_ROLE, MISSING_ROLE = "box", "dot", "lost"
"""A row's summary, one of its figures (``value``), or a row that has none but a ``note`` why."""
MAX_DOTS = 40
"""Figures drawn of a row: more are thinned evenly by size, the ends kept."""


@dataclass(frozen=True)
class BoxChart:
    """Rows of ``BOX_COLUMNS``."""

    x: PlotAxis
    whiskers: str
    """Range of the whiskers, as text."""
    bars: bool = False
    """Bars from zero to the most rather than boxes, for what adds up from nothing."""


def box_rows(
    row: dict[str, Any], values: Sequence[float], ends: tuple[float, float] = (0.0, 1.0)
) -> list[dict[str, Any]]:
    """Rows of a ``BoxChart`` for one configuration: its summary, and at most ``MAX_DOTS`` of ``values``.

    Args:
        row: ``panel``, ``series`` and ``row``.
        values: at least one figure.
        ends: the shares of figures below ``low`` and ``high``.
    """
    ordered = pl.Series(sorted(values), dtype=pl.Float64)
    shares = (ends[0], 0.25, 0.5, 0.75, ends[1])
    summary = {name: ordered.quantile(share, "linear") for name, share in zip(BOX_NUMBERS, shares, strict=False)}
    last = len(ordered) - 1
    dots = (
        [round(number * last / (MAX_DOTS - 1)) for number in range(MAX_DOTS)] if last >= MAX_DOTS else range(last + 1)
    )
    return [{**row, "role": BOX_ROLE, **summary}, *({**row, "role": DOT_ROLE, "value": ordered[dot]} for dot in dots)]


STACK_NUMBERS = ("value", "begin", "end", "total")
STACK_COLUMNS = ("panel", "series", "row", "part", *STACK_NUMBERS, "label")


class StackPart(NamedTuple):
    """One part: its colour, the colour of text on it, and its character in a terminal."""

    colour: str
    ink: str
    character: str


@dataclass(frozen=True)
class StackedBarChart:
    """Rows of ``STACK_COLUMNS``: a part from ``begin`` to ``end``; ``total``, a mark, is what they should add up to."""

    x: PlotAxis
    parts: dict[str, StackPart]
    """Parts in the order in which they are stacked."""
    total: str
    """Name of the quantity that the mark shows."""

    def used_parts(self, frame: pl.DataFrame) -> list[str]:
        """The names of ``parts`` that ``frame`` has."""
        used = set(frame["part"])
        return [name for name in self.parts if name in used]


SPAN_COLUMNS = ("panel", "source", "rank", "kind", "name", "chunk", "micro_batch", "begin_s", "end_s")
"""``panel`` is the run, ``source`` whether a span was measured or planned, ``name`` the action and its micro-batch."""


class ActionStyle(NamedTuple):
    """The label and colours of an action."""

    title: str
    colour: str
    ink: str


ACTION_STYLES = {
    "F": ActionStyle("forward", theme.SKY, "#000000"),
    "B": ActionStyle("backward", theme.BLUE, "#FFFFFF"),
    "I": ActionStyle("backward of inputs", theme.GREEN, "#000000"),
    "W": ActionStyle("backward of weights", theme.ORANGE, "#000000"),
}
OTHER_ACTION = ActionStyle("other", theme.LIGHT_GREY, "#000000")


@dataclass(frozen=True)
class GanttChart:
    """Rows of ``SPAN_COLUMNS``; every run has a time axis of its own."""

    axes: dict[str, PlotAxis]
    """Time axis of each run."""


HEAT_COLUMNS = ("panel", "row", "column", "value")


@dataclass(frozen=True)
class HeatChart:
    """Rows of ``HEAT_COLUMNS``: a cell for each value of a matrix."""

    value: PlotAxis


Chart = LineChart | BoxChart | StackedBarChart | GanttChart | HeatChart
