"""A pipeline's step as it was measured, over the same step as it was planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from hpcbench.parallel.schedule import Action, Layout, actions
from hpcbench.parallel.walk import Span, Walk, walk


def planned(schedule: str, layout: Layout, micro_batches: int, measured: Mapping[int, Sequence[Span]]) -> Walk:
    """The schedule with every action as long as its chunk's measured ones of that kind (the median), and transfers
    that cost nothing: what the measured step lacks to it was waited for messages, or for a slower moment."""
    times: dict[tuple[str, int], list[float]] = {}
    for spans in measured.values():
        for span in spans:
            times.setdefault((span.action.kind, span.action.chunk), []).append(span.end - span.begin)
    typical = {key: median(found) for key, found in times.items()}

    def duration(action: Action) -> float:
        return typical.get((action.kind, action.chunk), 0.0)

    return walk(actions(schedule, layout, micro_batches), layout, duration)


def bubble_fraction(ranks: Sequence[Sequence[Span]]) -> float | None:
    """Share of the ranks' time, from the first action of any to the last's end, in which they compute nothing."""
    spans = [span for own in ranks for span in own]
    if not spans:
        return None
    length = max(span.end for span in spans) - min(span.begin for span in spans)
    busy = sum(span.end - span.begin for span in spans)
    return 1.0 - busy / (len(ranks) * length) if length else None
