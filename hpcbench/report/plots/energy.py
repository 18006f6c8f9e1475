"""Energy per sample over devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcbench.report.groups import HIGH, LOW, RATE
from hpcbench.report.plots.lines import MEASURED, Lines, rows_for
from hpcbench.report.plots.picture import Asked, Picture
from hpcbench.report.plots.points import name_of, points
from hpcbench.report.plots.scales import axis, counted
from hpcbench.report.plots.words import legend_of, over_devices, spreads

if TYPE_CHECKING:
    import polars

NAME, TITLE = "energy", "Energy per sample over devices"
_EACH = "metrics.energy_per_sample_j"


def energy(frame: polars.DataFrame, asked: Asked) -> Picture:
    """The devices' energy over the timed steps, over the samples in them: mean step time x steps x samples/s."""
    import polars as pl

    samples = pl.col("metrics.step_time_s.mean") * pl.col("spec.steps") * pl.col(RATE)
    # Of every launch by itself: a slow one may well have drawn less power.
    found = points(frame.with_columns((pl.col("metrics.energy_j") / samples).alias(_EACH)), asked.by, _EACH)
    if found.nothing:
        return Picture(NAME, TITLE, nothing=found.nothing.replace("energy_per_sample_j", NAME), notes=found.notes)
    rows = rows_for(
        found.frame.select(
            "panel", "series", "label", "launches", x="devices", y=_EACH, low=f"{_EACH}:{LOW}", high=f"{_EACH}:{HIGH}"
        ),
        MEASURED,
    )
    sources = [name_of(one) for one in found.frame["metrics.energy_source"].drop_nulls().unique().sort().to_list()]
    y = axis("energy per sample", "J", rows["y"])
    alt = over_devices(rows, "energy per sample", lambda value: f"{y.shown(value)} {y.unit}", most=False)
    notes = [*spreads(rows), *([f"read from: {'; '.join(sources)}"] if sources else [])]
    lines = Lines(counted("devices", rows["x"]), y, legend=legend_of(asked.by))
    return Picture(NAME, TITLE, found.shared, alt, lines, rows, [*notes, *found.notes])
