"""Vega-Lite specifications of the charts, built and validated by altair (extra ``report``)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import msgspec
import polars

from hpcbench.report.plots import theme
from hpcbench.report.plots.charts import (
    ACTION_STYLES,
    BAND,
    BOX_NUMBERS,
    BOX_ROLE,
    CHANGE,
    CROSSOVER,
    DOT_ROLE,
    IDEAL,
    MAX_INTEGER_TICKS,
    MEASURED,
    MISSING_ROLE,
    OTHER_ACTION,
    PREDICTED,
    BarChart,
    BoxChart,
    GanttChart,
    HeatChart,
    LineChart,
    StackedBarChart,
)
from hpcbench.report.plots.plot_model import Plot
from hpcbench.report.plots.theme import PlotAxis, column_values, log_ticks
from hpcbench.units import format_percent

Rows = list[dict[str, Any]]

_SUBTITLE_WIDTH = 90
_PADDING_PX = {"left": 24, "right": 40, "top": 8, "bottom": 8}
"""A browser's sans-serif may be a seventh wider than the font that vl-convert measures with: labels would be cut."""
_LINE_WIDTH_PX, _LINE_HEIGHT_PX = 560, 340
_BAR_WIDTH_PX = 480
_GANTT_WIDTH_PX = 620
_ROW_HEIGHT_PX = 24
_CELL_WIDTH_PX = 44
_CHARACTER_WIDTH_PX = 7.0
"""A bar shows its name if it has this width for each character."""
_PREDICTED_POINT_AREA = 24
"""Area of the points that distinguish predicted lines in print."""
_PANELS_PER_ROW = 2
_PANEL_SCALE = 0.62
_MIN_LABELLED_SHARE = 0.07
"""A part shows its percentage if its bar is this share of the longest bar or more."""
_ROWS = alt.NamedData(name="rows")
"""Takes the place of the rows while altair validates the chart: validating every row takes seconds."""


def plot_specification(plot: Plot) -> dict[str, Any]:
    """The Vega-Lite specification of ``plot`` with its rows inside; nothing in it is fetched.

    Empty where there is nothing to draw.
    """
    if plot.drawing is None or plot.frame is None:
        return {}
    chart, data = _CHART_BUILDERS[type(plot.drawing)](plot.drawing, plot.frame)
    title = alt.TitleParams(plot.title)
    marks = "; ".join(f"{mark.shape}: {mark.meaning}" for mark in plot.drawing.marks(plot.frame) if mark.shape)
    title.subtitle = [
        line
        for text in (plot.subtitle, marks)
        for line in textwrap.wrap(text, _SUBTITLE_WIDTH, max_lines=3, placeholder=" ...")
    ]
    specification: dict[str, Any] = chart.properties(title=title, description=plot.alt, padding=_PADDING_PX).to_dict()
    specification["config"] = msgspec.json.decode(Path(__file__).with_name("vega_config.json").read_bytes())
    for part, rows in zip(specification.get("vconcat", [specification]), data, strict=True):
        part["data"] = {"values": rows}
    return specification


def _line_chart(chart: LineChart, frame: polars.DataFrame) -> tuple[Any, list[Rows]]:
    roles = set(frame["role"])
    series = frame.filter(frame["role"].is_in([MEASURED, PREDICTED]))["series"].unique(maintain_order=True).to_list()
    styles = theme.series_styles(series)

    def channel(kind: Any, attribute: str, **options: Any) -> Any:
        scale = alt.Scale(domain=list(styles), range=[getattr(style, attribute) for style in styles.values()])
        return kind("series:N", title=options.pop("title", "strategy"), scale=scale, sort=None, **options)

    base = alt.Chart().encode(x=_line_x(chart, frame), y=_line_y(chart, frame), tooltip=_line_tooltip(chart))
    colour = channel(alt.Color, "colour", title=chart.legend)
    shape = channel(alt.Shape, "shape", title=chart.legend)
    # The legend shows the shape; dashes around a small symbol would only spoil it.
    dash = channel(alt.StrokeDash, "dash", legend=None)
    ends = {"y": alt.Y("low:Q", title=chart.y.heading), "y2": alt.Y2("high")}

    def rows_of(role: str) -> Any:
        return base.transform_filter(alt.FieldEqualPredicate(field="role", equal=role))

    layers = []
    if BAND in roles:
        layers.append(rows_of(BAND).mark_area(opacity=0.5, color=theme.LIGHT_GREY).encode(**ends))
    if CHANGE in roles:
        layers.append(rows_of(CHANGE).mark_rule(color=theme.GREY, strokeDash=[5, 4]).encode(**ends))
    if IDEAL in roles:
        ideal = rows_of(IDEAL).mark_line(color=theme.GREY, strokeWidth=1.2, strokeDash=[3, 3])
        layers.append(ideal.encode(detail="series:N"))
    if PREDICTED in roles:
        predicted = rows_of(PREDICTED).encode(color=colour)
        layers.append(predicted.mark_area(opacity=0.15).encode(**ends))
        layers.append(predicted.mark_line().encode(strokeDash=dash))
        layers.append(predicted.mark_point(filled=True, size=_PREDICTED_POINT_AREA).encode(shape=shape))
    measured = rows_of(MEASURED).encode(color=colour)
    if chart.joined and PREDICTED not in roles:
        layers.append(measured.mark_line().encode(strokeDash=dash))
    layers.append(measured.mark_rule(strokeWidth=1.5).encode(**ends))
    layers.append(measured.mark_point(filled=True).encode(shape=shape))
    if CROSSOVER in roles:
        layers.append(rows_of(CROSSOVER).mark_point(shape="circle", size=260, filled=False, color="#000000"))
    layered = alt.layer(*layers).resolve_legend(strokeDash="independent")
    rows = _rows_in_units(frame, x=chart.x, y=chart.y, low=chart.y, high=chart.y)
    panels = frame["panel"].unique(maintain_order=True).to_list()
    if len(panels) < 2:
        return layered.properties(width=_LINE_WIDTH_PX, height=_LINE_HEIGHT_PX, data=_ROWS), [rows]
    sized = layered.properties(width=round(_LINE_WIDTH_PX * _PANEL_SCALE), height=round(_LINE_HEIGHT_PX * _PANEL_SCALE))
    faceted = sized.facet(alt.Facet("panel:N", sort=panels, title=None), columns=_PANELS_PER_ROW, data=_ROWS)
    return (faceted.resolve_scale(y="independent") if chart.own_scales else faceted), [rows]


def _line_x(chart: LineChart, frame: polars.DataFrame) -> alt.X:
    """The horizontal axis: every value is a tick where there are few whole numbers."""
    values = sorted({each / chart.x.factor for each in column_values(frame.filter(frame["role"] != CROSSOVER), "x")})
    if chart.x.log:
        scale = alt.Scale(type="log", base=chart.x.log, padding=14, nice=False)
    else:
        scale = alt.Scale(padding=14, nice=False, zero=False)
    if len(values) <= MAX_INTEGER_TICKS and all(value == int(value) for value in values):
        axis = alt.Axis(values=values, format="d")
    elif chart.x.log:
        axis = alt.Axis(values=log_ticks(values[0], values[-1]), format="~g")
    else:
        axis = alt.Axis(format="~g")
    return alt.X("x:Q", title=chart.x.heading, scale=scale, axis=axis)


def _line_y(chart: LineChart, frame: polars.DataFrame) -> alt.Y:
    if not chart.y.log:
        return alt.Y("y:Q", title=chart.y.heading, scale=alt.Scale(zero=chart.from_zero))
    if chart.own_scales:
        scale = alt.Scale(type="log", padding=10, nice=False)
        return alt.Y("y:Q", title=chart.y.heading, scale=scale, axis=alt.Axis(tickCount=5, format="~g"))
    positive = [value for name in ("y", "low", "high") for value in column_values(frame, name) if value > 0]
    ticks = log_ticks(min(positive) / chart.y.factor, max(positive) / chart.y.factor)
    scale = alt.Scale(type="log", padding=10, nice=False)
    return alt.Y("y:Q", title=chart.y.heading, scale=scale, axis=alt.Axis(values=ticks, format="~g"))


def _line_tooltip(chart: LineChart) -> list[alt.Tooltip]:
    numbers = {"x": chart.x.heading, "y": chart.y.heading, "low": "low", "high": "high"}
    return [
        alt.Tooltip("label:N", title="run"),
        alt.Tooltip("role:N", title="role"),
        *(alt.Tooltip(f"{field}:Q", title=title, format="~g") for field, title in numbers.items()),
        alt.Tooltip("launches:Q", title="launches"),
    ]


def _bar_chart(chart: BarChart, frame: polars.DataFrame) -> tuple[Any, list[Rows]]:
    measured = frame.filter(frame["role"] == MEASURED)
    styles = theme.series_styles(measured["series"].unique(maintain_order=True).to_list())
    scale = alt.Scale(domain=list(styles), range=[style.colour for style in styles.values()])
    bars, ideals = (
        alt.Chart().transform_filter(alt.FieldEqualPredicate(field="role", equal=role)) for role in (MEASURED, IDEAL)
    )
    row = _row_axis(measured, "label")
    # Names at the bars take the place of a legend.
    body = bars.mark_bar(height=alt.RelativeBandSize(band=0.6), fillOpacity=0.75, strokeWidth=1).encode(
        x=alt.X("y:Q", title=chart.x.heading), y=row, color=alt.Color("series:N", legend=None, scale=scale),
        tooltip=_line_tooltip(LineChart(PlotAxis(""), chart.x))[:2]
        + [alt.Tooltip(f"{name}:Q", format="~g") for name in ("y", "low", "high", "launches")],
    )  # fmt: skip
    whiskers = bars.mark_rule(strokeWidth=1.5, color=theme.BLACK).encode(x="low:Q", x2="high:Q", y=row)
    ideal = ideals.mark_rule(strokeWidth=1.5, strokeDash=[3, 3], color=theme.GREY).encode(x="y:Q")
    layers = [body, whiskers, *([ideal] if IDEAL in frame["role"] else [])]
    rows = _rows_in_units(frame, y=chart.x, low=chart.x, high=chart.x)
    return _row_panels(alt.layer(*layers), frame, own=chart.own_scales), [rows]


def _box_chart(chart: BoxChart, frame: polars.DataFrame) -> tuple[Any, list[Rows]]:
    styles = theme.series_styles(frame["series"].unique(maintain_order=True).to_list())
    scale = alt.Scale(domain=list(styles), range=[style.colour for style in styles.values()])
    colour = alt.Color("series:N", legend=None, scale=scale)
    tooltip = [alt.Tooltip("row:N", title="run")]
    tooltip += [alt.Tooltip(f"{name}:Q", title=name.replace("_", " "), format="~g") for name in BOX_NUMBERS[:5]]
    filled = {"color": colour, "stroke": alt.Stroke("series:N", legend=None, scale=scale), "tooltip": tooltip}

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", title=chart.x.heading, scale=alt.Scale(zero=chart.bars))

    base = alt.Chart().encode(y=_row_axis(frame))
    boxes, dots, missing = (
        base.transform_filter(alt.FieldEqualPredicate(field="role", equal=role))
        for role in (BOX_ROLE, DOT_ROLE, MISSING_ROLE)
    )
    body = boxes.mark_bar(height=alt.RelativeBandSize(band=0.6), fillOpacity=0.3, strokeWidth=1.5)
    dot = {"thickness": 1, "opacity": 0.7, "height": alt.RelativeBandSize(band=0.35), "color": "#000000"}
    layers = []
    if not chart.bars:
        layers.append(boxes.mark_rule(aria=False).encode(x=x("low"), x2="high", color=colour))
        layers.append(body.encode(x=x("quarter"), x2="three_quarters", **filled))
    else:
        layers.append(body.encode(x=x("high"), x2=alt.datum(0), **filled))
    layers.append(dots.mark_tick(aria=False, **dot).encode(x=x("value")))
    if not chart.bars:
        median = boxes.mark_tick(aria=False, thickness=3, height=alt.RelativeBandSize(band=0.75))
        layers.append(median.encode(x=x("median"), color=colour))
    note = missing.mark_text(align="left", fontSize=12, x=4)
    layers.append(note.encode(text="note:N", color=alt.value("#000000")))
    rows = _rows_in_units(frame, **dict.fromkeys(BOX_NUMBERS, chart.x))
    roles = set(frame["role"])
    used = [layer for layer in layers if layer.transform[0].filter.equal in roles]
    return _row_panels(alt.layer(*used), frame, own=chart.own_scales), [rows]


def _stacked_bar_chart(chart: StackedBarChart, frame: polars.DataFrame) -> tuple[Any, list[Rows]]:
    parts = chart.used_parts(frame)
    colour = alt.Color(
        "part:N", title=None, scale=alt.Scale(domain=parts, range=[chart.parts[name].colour for name in parts])
    )

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", title=chart.x.heading)

    tooltip = [alt.Tooltip(f"{name}:N", title=name) for name in ("row", "part", "share")]
    tooltip.append(alt.Tooltip("value:Q", title=chart.x.heading, format="~g"))
    tooltip.append(alt.Tooltip("total:Q", title=chart.total, format="~g"))
    base = alt.Chart().encode(y=_row_axis(frame))
    bar = base.mark_bar(stroke="#000000", strokeWidth=0.6, height=alt.RelativeBandSize(band=0.72))
    share = base.mark_text(fontSize=11, aria=False)
    total = base.mark_tick(thickness=2.5, color="#000000", height=alt.RelativeBandSize(band=1), aria=False)
    layered = alt.layer(
        bar.encode(x=x("begin"), x2="end", color=colour, tooltip=tooltip),
        share.encode(x=x("middle"), text="share:N", fill=alt.Fill("ink:N", scale=None)),
        total.encode(x=x("total")),
    )
    longest = max(column_values(frame, "end"))
    ends = {(panel, row): end for panel, row, end in frame["panel", "row", "end"].iter_rows()}
    rows = []
    for row in frame.iter_rows(named=True):
        is_labelled = row["value"] >= _MIN_LABELLED_SHARE * longest
        rows.append(
            {
                **{name: row[name] for name in ("panel", "row", "part", "label")},
                **{name: chart.x.shown(row[name]) for name in ("value", "begin", "end", "total")},
                "ink": chart.parts[row["part"]].ink,
                "middle": chart.x.shown((row["begin"] + row["end"]) / 2),
                "share": format_percent(row["value"] / ends[row["panel"], row["row"]]) if is_labelled else "",
            }
        )
    return _row_panels(layered, frame, own=chart.own_scales), [rows]


def _gantt_chart(chart: GanttChart, frame: polars.DataFrame) -> tuple[Any, list[Rows]]:
    kinds = set(frame["kind"])
    # The same styles for all runs: their colour scales become one.
    styles = [style for kind, style in ACTION_STYLES.items() if kind in kinds]
    styles += [OTHER_ACTION] if kinds - set(ACTION_STYLES) else []
    scale = alt.Scale(domain=[style.title for style in styles], range=[style.colour for style in styles])
    runs, data = [], []
    for run, axis in chart.axes.items():
        rows = _gantt_rows(frame.filter(frame["panel"] == run), axis)
        ranks = list(dict.fromkeys(row["rank"] for row in sorted(rows, key=lambda row: int(row["rank"][5:]))))
        base = alt.Chart().encode(y=alt.Y("rank:N", sort=ranks, title=None, axis=alt.Axis(grid=False)))
        tooltip = [alt.Tooltip(f"{name}:N") for name in ("rank", "action", "chunk", "micro_batch")]
        tooltip += [alt.Tooltip(f"{name}:Q", format="~g") for name in ("begin", "end")]
        bar = base.mark_bar(stroke="#000000", strokeWidth=0.5, height=alt.RelativeBandSize(band=0.85), aria=False)
        layered = alt.layer(
            bar.encode(
                x=alt.X("begin:Q", title=axis.heading), x2="end", tooltip=tooltip,
                color=alt.Color("action:N", title=None, scale=scale),
            ),
            base.mark_text(fontSize=10, aria=False).encode(
                x=alt.X("middle:Q", title=axis.heading), text="name:N", fill=alt.Fill("ink:N", scale=None)
            ),
        )  # fmt: skip
        sized = layered.properties(width=_GANTT_WIDTH_PX, height=alt.Step(_ROW_HEIGHT_PX))
        faceted = sized.facet(row=alt.Row("source:N", sort=["measured", "planned"], title=None), data=_ROWS)
        if len(chart.axes) > 1:
            faceted = faceted.properties(title=alt.TitleParams(run, fontSize=13, anchor="start"))
        runs.append(faceted)
        data.append(rows)
    return (runs[0] if len(runs) == 1 else alt.vconcat(*runs)), data


def _gantt_rows(frame: polars.DataFrame, axis: PlotAxis) -> Rows:
    longest = max(column_values(frame, "end_s"))
    rows = []
    for row in frame.iter_rows(named=True):
        style = ACTION_STYLES.get(row["kind"], OTHER_ACTION)
        width_px = (row["end_s"] - row["begin_s"]) / longest * _GANTT_WIDTH_PX
        rows.append(
            {
                "source": row["source"], "rank": f"rank {row['rank']}", "action": style.title, "ink": style.ink,
                "chunk": row["chunk"], "micro_batch": row["micro_batch"],
                "begin": axis.shown(row["begin_s"]), "end": axis.shown(row["end_s"]),
                "middle": axis.shown((row["begin_s"] + row["end_s"]) / 2),
                "name": row["name"] if width_px >= _CHARACTER_WIDTH_PX * len(row["name"]) else "",
            }
        )  # fmt: skip
    return rows


def _heat_chart(chart: HeatChart, frame: polars.DataFrame) -> tuple[Any, list[Rows]]:
    scale = alt.Scale(range=[theme.WHITE, theme.BLUE], zero=True, interpolate="rgb")
    limit = max(column_values(frame, "value")) / chart.value.factor
    base = alt.Chart().encode(x=alt.X("column:N", title=None), y=alt.Y("row:N", title=None))
    cells = base.mark_rect().encode(
        color=alt.Color("value:Q", title=chart.value.heading, scale=scale),
        tooltip=["row:N", "column:N", alt.Tooltip("value:Q", title=chart.value.heading, format=".4~g")],
    )
    ink = alt.condition(alt.datum.value > limit / 2, alt.value(theme.WHITE), alt.value(theme.BLACK))
    texts = base.mark_text(fontSize=11).encode(text=alt.Text("value:Q", format=".3~g"), color=ink)
    sized = alt.layer(cells, texts).properties(width=alt.Step(_CELL_WIDTH_PX), height=alt.Step(_ROW_HEIGHT_PX))
    rows = _rows_in_units(frame, value=chart.value)
    if frame["panel"].n_unique() < 2:
        return sized.properties(data=_ROWS), [rows]
    return sized.facet(alt.Facet("panel:N", title=None), columns=1, data=_ROWS), [rows]


def _row_axis(frame: polars.DataFrame, column: str = "row") -> alt.Y:
    """The vertical axis of rows, top to bottom in the order of ``frame``."""
    names = frame[column].unique(maintain_order=True).to_list()
    return alt.Y(
        f"{column}:N", sort=names, title=None, axis=alt.Axis(grid=False, domain=False, ticks=False, labelPadding=8)
    )


def _row_panels(layered: Any, frame: polars.DataFrame, *, own: bool) -> Any:
    """``layered`` once, or in panels one below the other that have rows of their own; ``own``: and a scale."""
    panels = frame["panel"].unique(maintain_order=True).to_list()
    sized = layered.properties(width=_BAR_WIDTH_PX, height=alt.Step(_ROW_HEIGHT_PX))
    if len(panels) < 2:
        return sized.properties(data=_ROWS)
    faceted = sized.facet(alt.Facet("panel:N", sort=panels, title=None), columns=1, data=_ROWS)
    return faceted.resolve_scale(y="independent", x="independent" if own else "shared")


def _rows_in_units(frame: polars.DataFrame, **axes: PlotAxis) -> Rows:
    """The rows of ``frame`` without nulls, the columns named in ``axes`` in the unit of their axis."""
    rows = [row | {name: axis.shown(row[name]) for name, axis in axes.items()} for row in frame.iter_rows(named=True)]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


_CHART_BUILDERS: dict[type, Callable[[Any, polars.DataFrame], tuple[Any, list[Rows]]]] = {
    LineChart: _line_chart, BarChart: _bar_chart, BoxChart: _box_chart, StackedBarChart: _stacked_bar_chart,
    GanttChart: _gantt_chart, HeatChart: _heat_chart,
}  # fmt: skip
"""Functions by the kind of a chart: each returns the altair chart of a frame, and the rows of each of its data sources
in the axes' units."""
