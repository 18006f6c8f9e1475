"""Efficiency over devices: how much of each further device is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcbench.report.groups import HIGH, LOW
from hpcbench.report.plots.lines import IDEAL, MEASURED, Lines
from hpcbench.report.plots.picture import Asked, Picture
from hpcbench.report.plots.points import points
from hpcbench.report.plots.scales import axis, counted
from hpcbench.report.plots.words import legend_of, over_devices, spreads

if TYPE_CHECKING:
    import polars

NAME, TITLE = "efficiency", "Efficiency over devices"


def efficiency(frame: polars.DataFrame, asked: Asked) -> Picture:
    """The speed-up over one device with the same workload, per device, as tables compute it; 100 % is the ideal."""
    import polars as pl

    found = points(frame, asked.by, "efficiency")
    if found.nothing:
        return Picture(NAME, TITLE, nothing=found.nothing, notes=found.notes)
    per_speedup = pl.col("efficiency") / pl.col("speedup")
    rows = found.frame.select(
        "panel", "series", pl.lit(MEASURED).alias("role"), pl.col("devices").cast(pl.Float64).alias("x"),
        pl.col("efficiency").alias("y"), (pl.col(f"speedup:{LOW}") * per_speedup).alias("low"),
        (pl.col(f"speedup:{HIGH}") * per_speedup).alias("high"), "label", "spread",
    )  # fmt: skip
    ends = rows.group_by("panel", maintain_order=True).agg(
        pl.concat_list(pl.col("x").min(), pl.col("x").max()).alias("x")
    )
    empty = pl.lit(None, dtype=pl.Float64)
    ideal = ends.explode("x").unique(maintain_order=True).select(
        "panel", pl.lit("ideal").alias("series"), pl.lit(IDEAL).alias("role"), "x", pl.lit(1.0).alias("y"),
        empty.alias("low"), empty.alias("high"), pl.lit("ideal").alias("label"), pl.lit("").alias("spread"),
    )  # fmt: skip
    drawn = pl.concat([rows, ideal])
    dotted = "dotted: the ideal, 100 % of the baseline's rate per device"
    notes = [*spreads(rows, "the baseline's own is in them"), dotted]
    return Picture(
        NAME, TITLE, found.shared, over_devices(rows, "efficiency", lambda value: f"{value:.0%}", most=True),
        Lines(counted("devices", rows["x"]), axis("efficiency", "%", rows["y"]), legend=legend_of(asked.by)), drawn,
        [*notes, *found.notes],
    )  # fmt: skip
