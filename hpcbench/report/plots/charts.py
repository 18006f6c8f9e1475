"""The forms of charts, with the columns of the rows that each draws: lines, boxes, stacked bars, actions over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import polars as pl

from hpcbench.report.plots import theme
from hpcbench.report.plots.theme import PlotAxis
from hpcbench.units import count_span

_LINE_NUMBERS = ("x", "y", "low", "high")
LINE_COLUMNS = ("panel", "series", "role", *_LINE_NUMBERS, "label", "launches")
MEASURED, PREDICTED, IDEAL, CROSSOVER, BAND = "measured", "predicted", "ideal", "crossing", "band"
CHANGE = "change"
"""Roles of rows. An ideal is a thin line, a crossover a ring where two lines meet, a band the space around an ideal,
a change a vertical line from ``low`` to ``high``."""
MAX_INTEGER_TICKS = 10
"""Maximum number of different whole numbers on an axis that all are ticks."""


_OWN_SCALES_RATIO = 3.0
"""Panels have scales of their own if the highest value of one is so many times that of another."""


def has_own_scales(frame: pl.DataFrame, column: str) -> bool:
    """Whether the panels of ``frame`` differ so much in ``column`` that one scale would flatten some."""
    tops = frame.group_by("panel").agg(pl.col(column).max())[column].drop_nulls().to_list()
    return len(tops) > 1 and max(tops) > _OWN_SCALES_RATIO * min(tops)


def unit_values(frame: pl.DataFrame, column: str = "y") -> list[float]:
    """The values that decide the unit: all, or those of the lowest panel if each panel has its own scale."""
    if not has_own_scales(frame, column):
        return theme.column_values(frame, column)
    panels = frame.filter(pl.col(column).is_not_null()).partition_by("panel")
    return min((theme.column_values(panel, column) for panel in panels), key=max)


class Mark(NamedTuple):
    """A mark of the legend: its character in a terminal, the name of its shape in a file (either may be empty), and
    its meaning."""

    character: str
    shape: str
    meaning: str


@dataclass(frozen=True)
class LineChart:
    """Rows of ``LINE_COLUMNS``; ``low`` and ``high`` are whiskers of measurements, a band of predictions."""

    value: ClassVar[str] = "y"
    """Column that the scale is of."""

    x: PlotAxis
    y: PlotAxis
    joined: bool = True
    """Whether lines join what was measured; where something is predicted they join that."""
    from_zero: bool = True
    legend: str = "strategy"
    ideal: str = "ideal"
    """Name of the thin line."""
    band: str = ""
    """Meaning of the band around it."""
    own_scales: bool = False
    """Whether each panel has a scale of its own."""

    def marks(self, frame: pl.DataFrame) -> list[Mark]:
        """The marks of ``frame`` that the lines' legend does not name."""
        marks = {
            IDEAL: Mark("╌", "dotted line", self.ideal), BAND: Mark("", "grey band", self.band),
            CROSSOVER: Mark("X", "ring", "lines cross"),
            CHANGE: Mark("╎", "dashed vertical line", "the environment changed"),
            PREDICTED: Mark("·", "lines in a band", "predicted"),
        }  # fmt: skip
        roles = set(frame["role"])
        return [mark for role, mark in marks.items() if role in roles] + _whisker_marks(frame)


@dataclass(frozen=True)
class BarChart:
    """Rows of ``LINE_COLUMNS``: a bar called ``label`` from zero to ``y``, with whiskers; an ideal is a line across."""

    value: ClassVar[str] = "y"
    x: PlotAxis
    legend: str = "strategy"
    own_scales: bool = False

    def marks(self, frame: pl.DataFrame) -> list[Mark]:
        """The marks of ``frame``."""
        whiskers = [mark._replace(character="▒") for mark in _whisker_marks(frame)]
        ideal = [Mark("╎", "dotted line", "ideal")] if IDEAL in frame["role"] else []
        return [Mark("number:", "bar", "median"), *ideal, *whiskers]


def whisker_text(rows: pl.DataFrame) -> str:
    """The meaning of the whiskers of ``rows`` (columns ``low``, ``launches``); empty without any."""
    counts = sorted(set(rows.filter(rows["low"].is_not_null())["launches"].drop_nulls().to_list()))
    kinds = ["95 % of the median within one launch"] if counts[:1] == [1] else []
    if counts and counts[-1] > 1:
        kinds.append(f"minimum and maximum of {count_span(counts)} launches")
    return "; ".join(kinds)


def _whisker_marks(frame: pl.DataFrame) -> list[Mark]:
    text = whisker_text(frame.filter(frame["role"] == MEASURED))
    return [Mark("", "whiskers", text)] if text else []


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

    value: ClassVar[str] = "high"
    x: PlotAxis
    whiskers: str
    """Range of the whiskers, as text."""
    dots: str
    """Meaning of the thin marks."""
    bars: bool = False
    """Bars from zero to the most rather than boxes, for what adds up from nothing."""
    own_scales: bool = False

    def marks(self, frame: pl.DataFrame) -> list[Mark]:
        """The marks of ``frame``."""
        dots = [Mark("", "thin marks", self.dots)] if DOT_ROLE in frame["role"] else []
        if self.bars:
            return [Mark("█", "", "up to the least"), Mark("▒", "", self.whiskers), Mark("", "bar", "the most"), *dots]
        box = [Mark("─", "line", self.whiskers), Mark("▒", "box", "middle half"), Mark("█", "thick mark", "median")]
        return [*box, *dots]


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

    value: ClassVar[str] = "end"
    x: PlotAxis
    parts: dict[str, StackPart]
    """Parts in the order in which they are stacked."""
    total: str
    """Name of the quantity that the mark shows."""
    beyond: str = ""
    """Why a bar is longer than its mark; empty if none is."""
    own_scales: bool = False

    def marks(self, _: pl.DataFrame) -> list[Mark]:
        """The marks beside the parts."""
        beyond = [Mark("", "bar longer than its mark", self.beyond)] if self.beyond else []
        return [Mark("number:", "black mark", self.total), *beyond]

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

    def marks(self, _: pl.DataFrame) -> list[Mark]:
        """The meaning of the names in the bars."""
        return [Mark("", "F0", "forward of micro-batch 0")]


HEAT_COLUMNS = ("panel", "row", "column", "value")


@dataclass(frozen=True)
class HeatChart:
    """Rows of ``HEAT_COLUMNS``: a cell for each value of a matrix."""

    value: PlotAxis

    def marks(self, _: pl.DataFrame) -> list[Mark]:
        """None: cells contain their values."""
        return []


ScaledChart = LineChart | BarChart | BoxChart | StackedBarChart
Chart = LineChart | BarChart | BoxChart | StackedBarChart | GanttChart | HeatChart
