"""How step times are spread within and between launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcbench.report.groups import STEP
from hpcbench.report.plots.boxes import BOX, DOT, MOST_DOTS, Boxes, medians, summary, table, thinned
from hpcbench.report.plots.picture import Asked, Picture
from hpcbench.report.plots.points import points
from hpcbench.report.plots.rows import chosen_rows
from hpcbench.report.plots.scales import axis
from hpcbench.report.plots.words import listed, plural
from hpcbench.units import format_seconds

if TYPE_CHECKING:
    import polars

NAME, TITLE = "distribution", "Distribution of step times"
_MOST_ROWS = 16
_TENTHS = (0.1, 0.9)


def distribution(frame: polars.DataFrame, asked: Asked) -> Picture:
    """Every timed step of the slowest rank, of all launches of a configuration together.

    Steps that were found to be still warming up are left out, as they are of every figure.
    """
    found = points(frame, asked.by, STEP)
    if found.nothing:
        return Picture(NAME, TITLE, nothing=found.nothing, notes=found.notes)
    rows, notes = chosen_rows(found, asked.by, _MOST_ROWS)
    steps = _steps(rows, asked)
    made: list[dict[str, Any]] = []
    for row in rows.iter_rows(named=True):
        times = [time for one in row["run_ids"] for time in steps.get((row["cluster"], one), ())]
        if times:
            made.append({**row, "role": BOX, **summary(times, _TENTHS)})
            made += [{**row, "role": DOT, "value": time} for time in thinned(times)]
    if not made:
        return Picture(NAME, TITLE, nothing="no result holds its single steps", notes=notes)
    drawn = table(made)
    counts = [len(one) for one in steps.values()]
    told = listed([f"{name} {format_seconds(value)}" for name, value in medians(drawn)])
    alt = f"Step times of {plural(len(medians(drawn)), 'configuration')}, medians: {told}."
    more = [
        f"box: the middle half of {sum(counts)} steps of {plural(len(counts), 'launch', 'launches')}; whiskers: from "
        "10 % to 90 % of them",
        f"thin marks (of files): single steps, at most {MOST_DOTS} a row, the fastest and the slowest among them",
    ]
    return Picture(
        NAME, TITLE, found.shared, alt, Boxes(axis("step time", "s", drawn["median"]), "10 % to 90 % of the steps"),
        drawn, [*more, *notes],
    )  # fmt: skip


def _steps(rows: polars.DataFrame, asked: Asked) -> dict[tuple[str, str], list[float]]:
    """The seconds of the steps that count, of every launch that is drawn."""
    if asked.whole is None:
        return {}
    wanted = [(cluster, one) for cluster, ids in rows["cluster", "run_ids"].iter_rows() for one in ids]
    found = {}
    for one in asked.whole(wanted):
        times = one.step_times_s[one.metrics.warmup_found_steps or 0 :]
        found[one.cluster, one.run_id] = [time for time in times if 0 < time < 1e9]
    return {key: times for key, times in found.items() if times}
