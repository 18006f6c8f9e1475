"""Where a step's time goes: computation, communication, the bubble of a pipeline, and the rest."""

from __future__ import annotations

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


def parts(frame: polars.DataFrame, asked: Asked) -> Picture:
    """The parts of the profiled steps of the rank that computes longest, beside the median of the timed steps.

    A pipeline's bubble is waited for with its messages: it is taken out of what else were communication.
    """
    import polars as pl

    found = points(frame, asked.by, "metrics.compute_s")
    if found.nothing:
        return Picture(NAME, TITLE, nothing=found.nothing, notes=found.notes)
    rows, notes = chosen_rows(found, asked.by)
    split = [{**row, **one} for row in rows.iter_rows(named=True) if row[STEP] for one in _split(row)]
    schema = {name: pl.Float64 if name in ("value", "begin", "end", "total") else pl.String for name in COLUMNS}
    drawn = pl.DataFrame([{name: one[name] for name in COLUMNS} for one in split], schema=schema)
    if drawn.is_empty():
        return Picture(NAME, TITLE, nothing="no run has both its parts and its step time", notes=notes)
    more = ["computation, communication: of the profiled steps, the rank's that computes longest"]
    if BUBBLE in drawn["part"].to_list():
        more.append("bubble: all ranks' share of the step; it is taken out of communication, where it is waited for")
    if rows["launches"].max() != 1:
        more.append("of several launches the median of each part")
    return Picture(
        NAME, TITLE, found.shared, _alt(drawn), Stacks(axis("time", "s", drawn["total"]), PARTS, "step time"), drawn,
        [*more, *notes],
    )  # fmt: skip


def _split(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of one configuration, one after another; what is not there is left out."""
    step, compute = row[STEP], row["metrics.compute_s"]
    exposed = row["metrics.exposed_comm_s"] or 0.0
    waiting = max(0.0, step - compute)
    bubble = min((row["metrics.bubble_fraction"] or 0.0) * step, waiting)
    hidden = min(max(0.0, (row["metrics.comm_s"] or 0.0) - exposed), compute)
    exposed = max(0.0, exposed - bubble)
    rest = max(0.0, waiting - bubble - exposed)
    found, begin = [], 0.0
    for part, value in zip(PARTS, (compute - hidden, hidden, exposed, bubble, rest), strict=True):
        if value > 0:
            found.append({"part": part, "value": value, "begin": begin, "end": begin + value, "total": step})
            begin += value
    return found


def _alt(drawn: polars.DataFrame) -> str:
    said = []
    groups = list(drawn.group_by(["panel", "row"], maintain_order=True))
    for (panel, row), inside in groups[-_TOLD:]:
        shares = [f"{value / total:.0%} {part}" for part, value, total in inside["part", "value", "total"].iter_rows()]
        where = f"{panel}, " if panel else ""
        said.append(f"{where}{row}: {format_seconds(inside['total'][0])}, {', '.join(shares)}.")
    more = f" {len(groups) - _TOLD} more." if len(groups) > _TOLD else ""
    return f"Parts of a step of {plural(len(groups), 'configuration')}. {' '.join(said)}{more}"
