"""Step time over devices, measured and predicted, and where one strategy overtakes another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcbench.report.groups import HIGH, LOW, STEP
from hpcbench.report.plots.crossings import crossings
from hpcbench.report.plots.lines import CROSSING, MEASURED, PREDICTED, Lines, rows_for
from hpcbench.report.plots.picture import Asked, Picture
from hpcbench.report.plots.points import name_of, points
from hpcbench.report.plots.scales import axis, counted
from hpcbench.report.plots.words import legend_of, over_devices, spreads
from hpcbench.units import format_seconds

if TYPE_CHECKING:
    import polars

NAME, TITLE = "scaling", "Step time over devices"
_TOLD = 5


def scaling(frame: polars.DataFrame, asked: Asked) -> Picture:
    """The median step time; points over predicted lines where ``asked.predicted`` has some.

    Its columns: ``strategy, devices, step_time_s, step_time_low_s, step_time_high_s``, and ``panel`` (as the measured
    rows have it) where there are several. Without measurements it is drawn alone.
    """
    import polars as pl

    found = points(frame, asked.by, STEP)
    rows = rows_for(_measured(found.frame), MEASURED) if not found.nothing else None
    predicted, notes = _predicted(asked.predicted, rows)
    if rows is None and predicted is None:
        return Picture(NAME, TITLE, nothing=found.nothing, notes=found.notes)
    drawn = pl.concat([one for one in (rows, predicted) if one is not None])
    crossed = _crossings(predicted if predicted is not None else drawn)
    x = counted("devices", drawn["x"])
    y = axis("step time", "s", drawn["y"], log=bool(x.log))
    alt = over_devices(drawn, "step time", format_seconds, most=False)
    told = [_told(row) for row in crossed.head(_TOLD).iter_rows(named=True)]
    if rows is not None:
        notes = [*spreads(rows), *notes, *_unequal(found.frame)]
    if predicted is not None:
        notes.insert(0, "lines: predicted, with their interval; points: measured")
    if told:
        notes.append(f"lines cross ({'predicted' if predicted is not None else 'between medians'}): {'; '.join(told)}")
    return Picture(
        NAME, TITLE, found.shared, f"{alt} Lines cross: {'; '.join(told)}." if told else alt,
        Lines(x, y, from_zero=False, legend=legend_of(asked.by)), pl.concat([drawn, crossed]), [*notes, *found.notes],
    )  # fmt: skip


def _measured(rows: polars.DataFrame) -> polars.DataFrame:
    return rows.select(
        "panel", "series", "label", "launches", x="devices", y=STEP, low=f"{STEP}:{LOW}", high=f"{STEP}:{HIGH}"
    )


def _predicted(
    given: polars.DataFrame | None, measured: polars.DataFrame | None
) -> tuple[polars.DataFrame | None, list[str]]:
    """The predicted rows and what is to be said of them."""
    import polars as pl

    if given is None or given.is_empty():
        return None, []
    panels = measured["panel"].unique().to_list() if measured is not None else [""]
    if "panel" not in given.columns:
        if len(panels) > 1:
            return None, ["predictions are not drawn: they do not say which panel they are for"]
        given = given.with_columns(pl.lit(panels[0]).alias("panel"))
    names = given["strategy"].unique().to_list()
    shown = pl.col("strategy").replace_strict(names, [name_of(one) for one in names], return_dtype=pl.String)
    rows = given.filter(pl.col("step_time_s") > 0).select(
        "panel", shown.alias("series"), shown.alias("label"), x="devices", y="step_time_s", low="step_time_low_s",
        high="step_time_high_s",
    )  # fmt: skip
    return rows_for(rows.sort("panel", "series", "x"), PREDICTED), []


def _crossings(rows: polars.DataFrame) -> polars.DataFrame:
    """A row for each crossing of lines: ``series`` overtakes ``label``."""
    import polars as pl

    found = []
    for (panel,), inside in rows.group_by(["panel"], maintain_order=True):
        lines = {
            str(name): list(part.select("x", "y").iter_rows())
            for (name,), part in inside.group_by(["series"], maintain_order=True)
        }
        found += [
            {"panel": panel, "series": one.below, "label": one.above, "x": one.x, "y": one.y}
            for one in crossings(lines)
        ]
    schema = {"panel": pl.String, "series": pl.String, "label": pl.String, "x": pl.Float64, "y": pl.Float64}
    return rows_for(pl.DataFrame(found, schema=schema), CROSSING)


def _told(row: dict[str, object]) -> str:
    where = f" ({row['panel']})" if row["panel"] else ""
    return f"{row['series']} is below {row['label']} from {row['x']:.3g} devices on{where}"


def _unequal(rows: polars.DataFrame) -> list[str]:
    """Lines whose steps take different batches are no race."""
    import polars as pl

    batches = rows.group_by("panel", "devices").agg(pl.col("global_batch_size").n_unique().alias("count"))
    if not (batches["count"] > 1).any():
        return []
    return ["lines differ in their global batch on as many devices: throughput compares them"]
