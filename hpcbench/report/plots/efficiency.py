"""Efficiency over devices: how much of each further device is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcbench.report.groups import HIGH, LOW
from hpcbench.report.plots.lines import IDEAL, MEASURED, Lines, rows_for
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
    rows = rows_for(
        found.frame.select(
            "panel", "series", "label", "launches", x="devices", y="efficiency",
            low=pl.col(f"speedup:{LOW}") * per_speedup, high=pl.col(f"speedup:{HIGH}") * per_speedup,
        ),
        MEASURED,
    )  # fmt: skip
    ends = rows.group_by("panel", maintain_order=True).agg(
        pl.concat_list(pl.col("x").min(), pl.col("x").max()).alias("x")
    )
    ideal = rows_for(ends.explode("x").unique(maintain_order=True).with_columns(y=pl.lit(1.0)), IDEAL)
    drawn = pl.concat([rows, ideal])
    notes = [*spreads(rows, "the baseline's own is in them"), "ideal: the baseline's rate from each of its devices"]
    return Picture(
        NAME, TITLE, found.shared, over_devices(rows, "efficiency", lambda value: f"{value:.0%}", most=True),
        Lines(counted("devices", rows["x"]), axis("efficiency", "%", rows["y"]), legend=legend_of(asked.by)), drawn,
        [*notes, *found.notes],
    )  # fmt: skip
