"""Where a step's time goes: computation, communication, the bubble of a pipeline, and the rest."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from hpcbench.report.groups import STEP
from hpcbench.report.plots import theme
from hpcbench.report.plots.picture import Asked, Picture
from hpcbench.report.plots.points import points
from hpcbench.report.plots.rows import chosen_rows
from hpcbench.report.plots.scales import axis
from hpcbench.report.plots.stacks import COLUMNS, Part, Stacks
from hpcbench.report.plots.words import plural
from hpcbench.units import format_seconds

if TYPE_CHECKING:
    import polars

NAME, TITLE = "parts", "Where a step's time goes"
COMPUTE, HIDDEN, EXPOSED, BUBBLE, REST = (
    "computation", "computation over communication", "communication", "bubble", "rest",
)  # fmt: skip
PARTS = {
    COMPUTE: Part(theme.BLUE, "#FFFFFF", "█", "#"), HIDDEN: Part(theme.SKY, "#000000", "▓", "="),
    EXPOSED: Part(theme.VERMILLION, "#000000", "▒", "+"), BUBBLE: Part(theme.LIGHT, "#000000", "░", "."),
    REST: Part("#FFFFFF", "#000000", "·", " "),
}  # fmt: skip
_TOLD = 6
_PHASES = ("compute_s", "comm_s", "exposed_comm_s", "step_s")
_MOST_SECONDS = 1e9


def parts(frame: polars.DataFrame, asked: Asked) -> Picture:
    """The parts of the profiled steps, beside the median of the timed ones: of the rank that computes longest.

    Of pipelines, whose ranks wait in turn, the mean of all ranks, as their bubble is; it is waited for with messages
    and is taken out of what else were communication.
    """
    import polars as pl

    found = points(frame, asked.by, "metrics.compute_s")
    if found.nothing:
        return Picture(NAME, TITLE, nothing=found.nothing, notes=found.notes)
    rows, notes = chosen_rows(found, asked.by)
    piped = _of_pipelines(rows, asked)
    split = [
        {**row, **one}
        for row in rows.iter_rows(named=True)
        if row[STEP]
        for one in _split({**row, **piped.get(row["row"] + row["panel"], {})})
    ]
    schema = {name: pl.Float64 if name in ("value", "begin", "end", "total") else pl.String for name in COLUMNS}
    drawn = pl.DataFrame([{name: one[name] for name in COLUMNS} for one in split], schema=schema)
    if drawn.is_empty():
        return Picture(NAME, TITLE, nothing="no run has both its parts and its step time", notes=notes)
    more = ["computation, communication: of the profiled steps, the rank's that computes longest"]
    if BUBBLE in drawn["part"].to_list():
        more.append(
            "pipelines: the mean of all ranks; the bubble is taken out of communication, where it is waited for"
        )
    if rows["launches"].max() != 1:
        more.append("of several launches the median of each part")
    return Picture(
        NAME, TITLE, found.shared, _alt(drawn), Stacks(axis("time", "s", drawn["total"]), PARTS, "step time"), drawn,
        [*more, *notes],
    )  # fmt: skip


def _of_pipelines(rows: polars.DataFrame, asked: Asked) -> dict[str, dict[str, float]]:
    """By row and panel the parts of pipelines: the means over ranks, of several launches the median."""
    piped = rows.filter(rows["metrics.bubble_fraction"].is_not_null())
    keys = {
        (cluster, one): row + panel
        for row, panel, cluster, ids in piped["row", "panel", "cluster", "run_ids"].iter_rows()
        for one in ids
    }
    launches: dict[str, list[dict[str, float]]] = {}
    for result in asked.whole(list(keys)) if asked.whole and keys else ():
        phases = [rank.get("phases") for rank in result.ranks]
        read = [one for one in map(_read, phases) if one is not None]
        if read and len(read) == len(phases):
            means = {name: statistics.fmean(one[name] for one in read) for name in _PHASES}
            launches.setdefault(keys[result.cluster, result.run_id], []).append(means)
    return {
        key: {f"metrics.{name}": statistics.median(one[name] for one in found) for name in _PHASES}
        for key, found in launches.items()
    }


def _read(phases: Any) -> dict[str, float] | None:
    """What a rank's profile says, in seconds; ``None`` where somebody has written something else."""
    if not isinstance(phases, dict):
        return None
    values = {name: phases.get(name, 0.0) for name in _PHASES}
    if not all(isinstance(one, (int, float)) and 0 <= one < _MOST_SECONDS for one in values.values()):
        return None
    return values if values["step_s"] else None


def _split(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of one configuration, one after another; what is not there is left out."""
    compute, exposed = row["metrics.compute_s"], row["metrics.exposed_comm_s"] or 0.0
    # With the profiler a step takes longer than without; the bubble is a share of the one that the parts are of.
    step = row.get("metrics.step_s") or row[STEP]
    waiting = max(0.0, step - compute)
    bubble = min((row["metrics.bubble_fraction"] or 0.0) * step, waiting)
    hidden = min(max(0.0, (row["metrics.comm_s"] or 0.0) - exposed), compute)
    exposed = max(0.0, exposed - bubble)
    rest = max(0.0, waiting - bubble - exposed)
    found, begin = [], 0.0
    for part, value in zip(PARTS, (compute - hidden, hidden, exposed, bubble, rest), strict=True):
        if value > 0:
            found.append({"part": part, "value": value, "begin": begin, "end": begin + value, "total": row[STEP]})
            begin += value
    return found


def _alt(drawn: polars.DataFrame) -> str:
    said = []
    groups = list(drawn.group_by(["panel", "row"], maintain_order=True))
    for (panel, row), inside in groups[-_TOLD:]:
        whole = inside["end"][-1]
        shares = [f"{value / whole:.0%} {part}" for part, value in inside["part", "value"].iter_rows()]
        where = f"{panel}, " if panel else ""
        said.append(f"{where}{row}: {format_seconds(inside['total'][0])}, {', '.join(shares)}.")
    more = f" {len(groups) - _TOLD} more." if len(groups) > _TOLD else ""
    return f"Parts of a step of {plural(len(groups), 'configuration')}. {' '.join(said)}{more}"
