"""Memory of every rank at its peak: who fits, and how evenly it is shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcbench.report.plots.boxes import BOX, DOT, LOST, Boxes, summary, table, thinned
from hpcbench.report.plots.picture import Asked, Picture
from hpcbench.report.plots.points import labelled, name_of, points
from hpcbench.report.plots.rows import chosen_rows, row_name
from hpcbench.report.plots.scales import axis
from hpcbench.report.plots.words import listed, plural
from hpcbench.units import format_bytes

if TYPE_CHECKING:
    import polars

NAME, TITLE = "memory", "Peak memory per rank"
_PEAK = "metrics.peak_memory_bytes"
_OOM = "oom"
_MOST_LOST = 8


def memory(frame: polars.DataFrame, asked: Asked) -> Picture:
    """The peak of each rank, the most of its launches; below them what ran out of memory."""
    found = points(frame, asked.by, _PEAK)
    if found.nothing:
        return Picture(NAME, TITLE, nothing=found.nothing, notes=found.notes)
    rows, notes = chosen_rows(found, asked.by)
    ranks = _ranks(rows, asked)
    made: list[dict[str, Any]] = []
    for row in rows.iter_rows(named=True):
        peaks = _of_row(row, ranks) or [row[_PEAK]]
        made.append({**row, "role": BOX, **summary(peaks)})
        made += [{**row, "role": DOT, "value": value} for value in thinned(peaks)]
    lost = _lost(frame, asked, {row["panel"] for row in made})
    drawn = table([*made, *lost[:_MOST_LOST]])
    boxes = drawn.filter(drawn["role"] == BOX)
    told = listed([
        f"{f'{panel}, ' if panel else ''}{row} {format_bytes(high)}"
        for panel, row, high in boxes["panel", "row", "high"].iter_rows()
    ])  # fmt: skip
    alt = f"Peak memory of {plural(len(boxes), 'configuration')}, the fullest rank: {told}."
    if lost:
        alt += f" Out of memory: {listed([row['row'] for row in lost])}."
        notes = [*notes, f"out of memory: {plural(len(lost), 'configuration')}"]
    unread = [] if ranks else ["the fullest rank alone: single ranks were not read"]
    return Picture(
        NAME, TITLE, found.shared, alt,
        Boxes(axis("peak memory", "B", drawn["high"]), "from the emptiest rank to the fullest", bars=True), drawn,
        ["bar: the fullest rank; thin marks (of files): single ranks", *unread, *notes],
    )  # fmt: skip


def _ranks(rows: polars.DataFrame, asked: Asked) -> dict[tuple[str, str], dict[int, float]]:
    """Of every launch that is drawn the peaks of its ranks, in bytes."""
    if asked.whole is None:
        return {}
    wanted = [(cluster, one) for cluster, ids in rows["cluster", "run_ids"].iter_rows() for one in ids]
    return {(one.cluster, one.run_id): _peaks(one.ranks) for one in asked.whole(wanted)}


def _peaks(ranks: list[dict[str, Any]]) -> dict[int, float]:
    """What somebody else wrote into a result need not be numbers."""
    found = {}
    for one in ranks:
        rank, peak = one.get("rank"), one.get("peak_memory_bytes")
        if isinstance(rank, int) and isinstance(peak, (int, float)) and 0 < peak < 1e18:
            found[rank] = float(peak)
    return found


def _of_row(row: dict[str, Any], ranks: dict[tuple[str, str], dict[int, float]]) -> list[float]:
    most: dict[int, float] = {}
    for one in row["run_ids"]:
        for rank, peak in ranks.get((row["cluster"], one), {}).items():
            most[rank] = max(peak, most.get(rank, 0.0))
    return list(most.values())


def _lost(frame: polars.DataFrame, asked: Asked, panels: set[str]) -> list[dict[str, Any]]:
    """Rows of what ran out of memory, in the panels that are drawn."""
    import polars as pl

    oom = frame.filter(pl.col("status") == _OOM)
    if oom.is_empty():
        return []
    rows = labelled(oom, asked.by)
    rows = rows.with_columns(row_name(asked.by)).sort("devices", maintain_order=True)
    different = rows.unique(["cluster", "spec.model", "row", "spec.batch_size"], keep="first", maintain_order=True)
    panel = next(iter(panels)) if len(panels) == 1 else "out of memory"
    return [
        {
            "panel": panel, "series": row["series"], "role": LOST, "note": "out of memory",
            "row": f"{row['row']}, batch {row['spec.batch_size']}"
            + ("" if len(panels) == 1 else f", {name_of(row['spec.model'])} on {name_of(row['cluster'])}"),
        }
        for row in different.iter_rows(named=True)
    ]  # fmt: skip
