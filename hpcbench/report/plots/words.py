"""What a plot shows, in words and numbers: for those who do not see it, and for the notes below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpcbench.report.names import short_of
from hpcbench.report.plots.scales import figures

if TYPE_CHECKING:
    import polars

_PANELS_TOLD = 4
_LISTED = 12


def legend_of(by: Sequence[str]) -> str:
    """What the lines are."""
    return ", ".join(short_of(name) for name in by) or "strategy"


def spreads(rows: polars.DataFrame, more: str = "") -> list[str]:
    """What the whiskers of ``rows`` (columns ``low``, ``launches``) are; nothing where there are none."""
    given = rows.filter(rows["low"].is_not_null())
    counts = sorted({int(count) for count in given["launches"].to_list()})
    kinds = ["95 % of the median within one launch"] if counts[:1] == [1] else []
    several = [count for count in counts if count > 1]
    if several:
        span = str(several[0]) if len(several) == 1 else f"{several[0]} to {several[-1]}"
        kinds.append(f"least and most of {span} launches")
    return [f"whiskers: {'; '.join([*kinds, *([more] if more else [])])}"] if kinds else ["no intervals"]


def plural(count: int, word: str, many: str = "") -> str:
    """``1 line``, ``2 lines``."""
    return f"{count} {word if count == 1 else many or f'{word}s'}"


def listed(texts: Sequence[str]) -> str:
    """``texts`` one after another, as many as anybody listens to."""
    more = [f"{len(texts) - _LISTED} more"] if len(texts) > _LISTED else []
    return "; ".join([*texts[:_LISTED], *more])


def over_devices(rows: polars.DataFrame, what: str, shown: Callable[[float], str], *, most: bool) -> str:
    """Alt text of lines over devices (columns ``panel, series, x, y``): who leads at the most devices, and by what.

    ``most``: the highest leads, else the lowest.
    """
    low, high = int(min(figures(rows, "x"))), int(max(figures(rows, "x")))
    span = f"on {plural(low, 'device')}" if low == high else f"over {low} to {high} devices"
    lines = rows["series"].n_unique()
    said = [f"{what[0].upper()}{what[1:]} {span}, {plural(lines, 'line')}."]
    panels = rows["panel"].unique(maintain_order=True).to_list()
    for panel in panels[:_PANELS_TOLD]:
        inside = rows.filter(rows["panel"] == panel)
        last = inside.filter(inside["x"] == inside["x"].max()).sort("y", descending=most)
        devices = plural(int(last["x"][0]), "device")
        (best, value), (worst, least) = ((last["series"][end], last["y"][end]) for end in (0, -1))
        where = f"{panel}: at" if panel else "At"
        word, other = ("most", "least") if most else ("least", "most")
        text = f"{where} {devices} {best} has {shown(value)}"
        said.append(f"{text}, the {word}; {worst} {shown(least)}, the {other}." if len(last) > 1 else f"{text}.")
    if len(panels) > _PANELS_TOLD:
        said.append(f"{len(panels) - _PANELS_TOLD} more panels.")
    return " ".join(said)
