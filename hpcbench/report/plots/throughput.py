"""Samples per second over devices: which strategy is fastest at which scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcbench.report.groups import HIGH, LOW, RATE
from hpcbench.report.plots.lines import IDEAL, MEASURED, Lines, rows_for
from hpcbench.report.plots.picture import Asked, Picture
from hpcbench.report.plots.points import points
from hpcbench.report.plots.scales import axis, counted
from hpcbench.report.plots.words import legend_of, over_devices, spreads

if TYPE_CHECKING:
    import polars

NAME, TITLE = "throughput", "Throughput over devices"


def throughput(frame: polars.DataFrame, asked: Asked) -> Picture:
    """Samples/s of all ranks, the median of launches; the ideal is a baseline's rate times its devices' number."""
    import polars as pl

    found = points(frame, asked.by)
    if found.nothing:
        return Picture(NAME, TITLE, nothing=found.nothing, notes=found.notes)
    rows = rows_for(
        found.frame.select(
            "panel", "series", "label", "launches", x="devices", y=RATE, low=f"{RATE}:{LOW}", high=f"{RATE}:{HIGH}"
        ),
        MEASURED,
    )
    ideal = _ideal(found.frame)
    x = counted("devices", rows["x"])
    y = axis("{}samples/s", "/s", rows["y"], log=bool(x.log))
    drawn = pl.concat([rows, ideal])
    notes = [*spreads(rows), *(["ideal: as many times one device's rate as there are devices"] if len(ideal) else [])]
    return Picture(
        NAME, TITLE, found.shared, over_devices(rows, "throughput", lambda value: f"{value:.4g} samples/s", most=True),
        Lines(x, y, legend=legend_of(asked.by)), drawn, [*notes, *found.notes],
    )  # fmt: skip


def _ideal(rows: polars.DataFrame) -> polars.DataFrame:
    """In each panel where there is a baseline, its rate per device times the fewest and the most devices."""
    import polars as pl

    known = rows.filter(pl.col("efficiency") > 0).with_columns(
        (pl.col(RATE) / pl.col("efficiency") / pl.col("devices")).alias("_each")
    )
    ends = known.group_by("panel", maintain_order=True).agg(
        pl.col("_each").first(), pl.concat_list(pl.col("devices").min(), pl.col("devices").max()).alias("x")
    )
    ends = ends.explode("x").unique(maintain_order=True)
    return rows_for(ends.with_columns((pl.col("_each") * pl.col("x")).alias("y")), IDEAL)
