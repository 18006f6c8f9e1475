"""What every rank of a pipeline did in one step, beside what its schedule planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcbench.report.plots.picture import Asked, Picture
from hpcbench.report.plots.points import name_of, points
from hpcbench.report.plots.rows import chosen_rows
from hpcbench.report.plots.scales import axis
from hpcbench.report.plots.spans import COLUMNS, Spans
from hpcbench.report.plots.words import plural
from hpcbench.results.schema import RunResult, Timeline, TimelineSpan
from hpcbench.units import format_seconds

if TYPE_CHECKING:
    import polars

NAME, TITLE = "timeline", "Timeline of a pipeline's step"
_MOST_RUNS = 4
_MOST_SPANS = 3000
"""A step of more actions than anybody can tell apart is cut after so many."""
_MOST_SECONDS, _MOST_COUNT = 1e9, 10**9
"""Beyond them somebody has written what nobody measured."""
_BUBBLE = "metrics.bubble_fraction"


def timeline(frame: polars.DataFrame, asked: Asked) -> Picture:
    """The untimed step whose actions were noted, of one launch of up to four configurations each."""
    found = points(frame, asked.by, _BUBBLE)
    if found.nothing:
        nothing = found.nothing.replace("none has it measured", "none is a pipeline whose step was noted")
        return Picture(NAME, TITLE, nothing=nothing, notes=found.notes)
    rows, notes = chosen_rows(found, asked.by, _MOST_RUNS)
    wanted = [(cluster, ids[0]) for cluster, ids in rows["cluster", "run_ids"].iter_rows()]
    read = {(one.cluster, one.run_id): one for one in asked.whole(wanted)} if asked.whole else {}
    drawn: dict[str, list[dict[str, Any]]] = {}
    said = []
    for key, row in zip(wanted, rows.iter_rows(named=True), strict=True):
        result = read.get(key)
        if result is None or result.timeline is None or not result.timeline.ranks:
            continue
        run = ", ".join(filter(None, [row["row"], row["panel"], _micro_batches(result)]))
        spans = [{"panel": run, **one} for one in _spans(result.timeline)]
        if len(spans) > _MOST_SPANS:
            notes = [*notes, f"{run}: the first {_MOST_SPANS} of {len(spans)} actions"]
        if spans:
            drawn[run] = spans[:_MOST_SPANS]
            said.append(_told(run, result.timeline))
    if not drawn:
        return Picture(NAME, TITLE, nothing="no result holds a timeline", notes=notes)
    axes = {run: axis("time", "s", [span["end_s"] for span in spans]) for run, spans in drawn.items()}
    more = [
        "measured: one untimed step of the first replica; planned: the same schedule, every action as long as the "
        "median of its kind, messages at no cost",
        *said,
    ]
    subtitle = next(iter(drawn)) + (f", {found.shared}" if found.shared else "") if len(drawn) == 1 else found.shared
    alt = f"Timelines of {plural(len(drawn), 'pipeline')}. {'. '.join(said)}."
    return Picture(NAME, TITLE, subtitle, alt, Spans(axes), _table(drawn), [*more, *notes])


def _micro_batches(result: RunResult) -> str:
    return plural(result.spec.micro_batches, "micro-batch", "micro-batches")


def _spans(timeline_: Timeline) -> list[dict[str, Any]]:
    """The measured spans first, then the planned ones, rank by rank."""
    return [
        {**_span(one), "source": source, "rank": rank.rank}
        for source in ("measured", "planned")
        for rank in sorted(timeline_.ranks, key=lambda one: one.rank)
        for one in getattr(rank, source)
        if 0 <= one.begin_s <= one.end_s < _MOST_SECONDS
        and max(abs(value) for value in (rank.rank, one.chunk, one.micro_batch)) < _MOST_COUNT
    ]


def _span(one: TimelineSpan) -> dict[str, Any]:
    kind = name_of(one.kind)[:1]
    return {
        "kind": kind, "name": f"{kind}{one.micro_batch}", "chunk": one.chunk, "micro_batch": one.micro_batch,
        "begin_s": one.begin_s, "end_s": one.end_s,
    }  # fmt: skip


def _told(run: str, timeline_: Timeline) -> str:
    pairs = (
        ("measured", timeline_.measured_s, timeline_.bubble_fraction),
        ("planned", timeline_.planned_s, timeline_.planned_bubble_fraction),
    )
    told = [
        f"{source} {format_seconds(seconds)}, bubble {bubble:.0%}"
        for source, seconds, bubble in pairs
        if seconds is not None and bubble is not None
    ]
    return f"{run}: {'; '.join(told)}" if told else run


def _table(drawn: dict[str, list[dict[str, Any]]]) -> polars.DataFrame:
    import polars as pl

    whole = ("rank", "chunk", "micro_batch")
    schema = {name: pl.Float64 if name.endswith("_s") else pl.Int64 if name in whole else pl.String for name in COLUMNS}
    return pl.DataFrame(
        [{name: one[name] for name in COLUMNS} for spans in drawn.values() for one in spans], schema=schema
    )
