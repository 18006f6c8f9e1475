"""Plots that have a row for each configuration: which ones, in which order, and how they are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hpcbench.report.plots.points import Points

if TYPE_CHECKING:
    import polars

MOST_ROWS = 24
STEP_PX = 24
"""Height of a row in a picture."""


def chosen_rows(found: Points, by: Sequence[str], most: int = MOST_ROWS) -> tuple[polars.DataFrame, list[str]]:
    """The points of the most devices as rows, few devices first, with ``row`` their name; and what is to be said.

    Points are named by strategy and degrees, or by what ``by`` tells apart.
    """
    import polars as pl

    rows, notes = found.frame, found.notes
    if len(rows) > most:
        notes = [*notes, f"the {most} rows with most devices of {len(rows)}; others can be chosen with --where"]
        rows = rows.sort("devices", descending=True, maintain_order=True).head(most)
    panels = {panel: place for place, panel in enumerate(found.frame["panel"].unique(maintain_order=True))}
    order = pl.col("panel").replace_strict(panels, return_dtype=pl.Int64)
    return rows.with_columns(row_name(by)).sort(order, "devices", "series", maintain_order=True), notes


def row_name(by: Sequence[str]) -> polars.Expr:
    """``row``: ``ddp, 4 devices``."""
    import polars as pl

    unit = pl.when(pl.col("devices") == 1).then(pl.lit("device")).otherwise(pl.lit("devices"))
    return pl.format("{}, {} {}", "series" if by else "label", "devices", unit).alias("row")


def row_axis(names: list[str]) -> dict[str, Any]:
    """The vertical axis of rows, from above in the order of ``names``."""
    return {
        "field": "row", "type": "nominal", "sort": list(dict.fromkeys(names)), "title": None,
        "axis": {"grid": False, "domain": False, "ticks": False, "labelPadding": 8},
    }  # fmt: skip


def row_panels(values: list[dict[str, Any]], unit: dict[str, Any], panels: list[str], width: int) -> dict[str, Any]:
    """``unit`` once, or in panels below each other that have rows of their own and one common scale."""
    size = {"width": width, "height": {"step": STEP_PX}}
    if len(panels) < 2:
        return {"data": {"values": values}, **size, **unit}
    return {
        "data": {"values": values}, "facet": {"field": "panel", "type": "nominal", "sort": panels, "title": None},
        "columns": 1, "spec": {**size, **unit}, "resolve": {"scale": {"y": "independent"}},
    }  # fmt: skip


def margin(names: Iterable[str], width: int) -> int:
    """Characters for rows' names in a terminal of ``width``: half of it at most."""
    from rich.cells import cell_len

    return min(max(map(cell_len, names)), width // 2 - 1)
