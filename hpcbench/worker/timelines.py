"""The timeline of a pipeline's result, from what its ranks recorded. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.mesh import Mesh
from hpcbench.parallel.schedule import Action
from hpcbench.parallel.strategies.pipeline import STRATEGIES, layout_of
from hpcbench.parallel.timeline import bubble_fraction, planned
from hpcbench.parallel.walk import Span
from hpcbench.results.schema import RankResult, RankTimeline, Timeline, TimelineSpan


def timeline_of(spec: RunSpec, ranks: Mapping[int, RankResult]) -> Timeline | None:
    """The first replica's ranks; ``None`` where the run is no pipeline of one step, or a rank recorded nothing."""
    group = Mesh.of(spec).group(0, "pp")
    if spec.strategy not in STRATEGIES or not all(rank in ranks and ranks[rank].timeline for rank in group):
        return None
    measured = {place: [_span(one) for one in ranks[rank].timeline] for place, rank in enumerate(group)}
    walked = planned(spec.strategy, layout_of(spec), spec.micro_batches, measured)
    begin = min(spans[0].begin for spans in measured.values())
    return Timeline(
        bubble_fraction=bubble_fraction(list(measured.values())),
        planned_bubble_fraction=walked.bubble_fraction,
        measured_s=max(spans[-1].end for spans in measured.values()) - begin,
        planned_s=walked.end,
        ranks=[
            RankTimeline(
                rank=rank,
                planned=[TimelineSpan(*span.action, span.begin, span.end) for span in walked.ranks[place]],
                measured=[TimelineSpan(*one.action, one.begin - begin, one.end - begin) for one in measured[place]],
            )
            for place, rank in enumerate(group)
        ],
    )


def _span(one: TimelineSpan) -> Span:
    return Span(Action(one.kind, one.chunk, one.micro_batch), one.begin_s, one.end_s)
