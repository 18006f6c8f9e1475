"""Terminal view of a plan: arrays to submit, finished runs, infeasible points, and diagrams of pipeline schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from rich.console import RenderableType
from rich.text import Text

from hpcbench.config.run_spec import strategy_label
from hpcbench.fileio import printable_text
from hpcbench.predict.forecast import PlanForecast
from hpcbench.predict.prediction import count_bases
from hpcbench.report.results_table import split_parameters
from hpcbench.report.table_model import Column, View, text_column
from hpcbench.report.table_output import PrintedView
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.pipeline.entry import pipeline_layout
from hpcbench.strategies.pipeline.schedule_simulator import ScheduleTimeline, simulate_schedule
from hpcbench.strategies.pipeline.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineLayout,
    schedule_actions,
)
from hpcbench.submit.batches import split_arrays
from hpcbench.submit.plan import MAX_JOBS, JobGroup, SweepPlan
from hpcbench.units import format_percent, pluralize

ACTION_UNITS = {FORWARD: 1, BACKWARD: 2, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1}
"""A backward pass as long as two forward passes, its halves as one each."""

DIAGRAM_WIDTH = 80


def schedule_diagram(schedule: str, layout: PipelineLayout, micro_batches: int) -> list[str]:
    """Return lines of at most ``DIAGRAM_WIDTH`` characters, folded if the step is longer.

    Every cell is a unit of time: the kind of the action and its micro-batch (``F3``), before it the number of the
    rank's chunk if it has several (``2F3``), dots while the action continues, blanks while the rank waits:

        stage 0  |F0 F1 B0 ..B1 ..
        stage 1  |   F0 B0 ..F1 B1 ..
    """
    timeline = simulate_schedule(
        schedule_actions(schedule, layout, micro_batches), layout, lambda action: ACTION_UNITS.get(action.kind, 0)
    )
    names = [_stage_name(layout, rank) for rank in range(layout.ranks)]
    cell = len(str(micro_batches - 1)) + 2 + (layout.virtual_stages > 1)
    rows = [_rank_row(timeline, rank, layout, cell) for rank in range(layout.ranks)]
    start = max(len(name) for name in names) + 1
    fold = max((DIAGRAM_WIDTH - start - 1) // cell, 1) * cell
    total = int(timeline.end) * cell
    count = pluralize(micro_batches, "micro-batch", "micro-batches")
    lines = [f"{schedule}, {count}: bubble {format_percent(timeline.bubble_fraction, 1)} of equal stages"]
    for first in range(0, total, fold):
        parts = [row[first : first + fold].rstrip() for row in rows]
        lines += [f"{name:<{start}}|{part}" for name, part in zip(names, parts, strict=True)]
        lines += [""] if first + fold < total else []
    return lines


def _stage_name(layout: PipelineLayout, rank: int) -> str:
    """``stage 1 ``, with the letter of the replica if the stage has several: ``stage 1b ``."""
    stage = layout.stage_of(rank)
    ranks = layout.ranks_of(stage)
    return f"stage {stage}{chr(ord('a') + rank - ranks.start) if 1 < len(ranks) <= 26 else ''} "


def _rank_row(timeline: ScheduleTimeline, rank: int, layout: PipelineLayout, cell: int) -> str:
    cells = [" " * cell] * int(timeline.end)
    for action, begin, end in timeline.ranks[rank]:
        for unit in range(int(begin), int(end)):
            cells[unit] = (_action_name(action, layout) if unit == begin else "..").ljust(cell)
    return "".join(cells)


def _action_name(action: Action, layout: PipelineLayout) -> str:
    chunk = str(action.chunk // layout.stages) if layout.virtual_stages > 1 else ""
    return f"{chunk}{action.kind}{action.micro_batch}"


MAX_SCHEDULES_DRAWN, MAX_STAGES_DRAWN = 3, 16


def plan_renderables(plan: SweepPlan, plan_forecast: PlanForecast | None = None) -> list[RenderableType]:
    """Headline and notes, the table of arrays to submit, diagrams of schedules, and infeasible points by reason.

    ``plan_forecast`` holds the predictions of the plan's runs.
    """
    missing = plan.missing
    groups = plan.jobs(missing)
    headline = f"{plan.sweep.name} on {plan.profile.name}: {pluralize(len(plan.runs), 'run')}, "
    if missing:
        most = f"at most {plan.node_hours(missing):,.2f} node-hours"
        headline += f"{len(missing):,} to submit as {_jobs_text(plan)}, {most}"
    else:
        headline += "none to submit"
    if missing and plan_forecast and (node_hours := plan_forecast.node_hours(missing)) is not None:
        bases = count_bases(prediction.rests_on for prediction in plan_forecast.predictions.values())
        headline += f", predicted {_format_node_hours(node_hours)} ({bases})"
    _, shared = split_parameters(list(plan.runs.values()))
    parts: list[RenderableType] = [
        Text(printable_text(headline), style="bold"),
        *([Text(printable_text(f"all runs: {shared}"))] if shared else []),
        *(Text(printable_text(note)) for note in _plan_notes(plan, groups)),
        *(Text(printable_text(warning)) for warning in plan.node_warnings()),
    ]
    if plan_forecast is not None and missing:
        parts += [Text(printable_text(line)) for line in plan_forecast.warnings(missing)]
    if missing:
        parts.append(PrintedView(_arrays_view(plan, groups, plan_forecast)))
    parts += [Text(printable_text(line)) for line in _schedule_lines(plan)]
    if plan.dropped:
        reasons = Counter(point.reason for point in plan.dropped)
        columns = [Column("dropped", "infeasible", reasons.get), text_column("because", str, wraps=True)]
        parts.append(PrintedView(View.from_rows("", columns, [reason for reason, _ in reasons.most_common()])))
    return parts


def _jobs_text(plan: SweepPlan) -> str:
    """``6 jobs in 2 arrays``: the arrays that submit sends, if no limit but the profile's divides them."""
    jobs = [group.jobs for group in plan.arrays(plan.missing)]
    arrays = split_arrays(jobs, plan.profile.scheduler.max_array_size or max(jobs))
    return f"{pluralize(sum(jobs), 'job')} in {pluralize(len(arrays), 'array')}"


def _plan_notes(plan: SweepPlan, groups: list[JobGroup]) -> Iterator[str]:
    """Facts to know before submitting: entries in the queue, budget, finished runs."""
    packed, unpacked = sum(group.jobs for group in groups), sum(len(group.run_ids) for group in groups)
    if packed != unpacked:
        yield f"packed: {packed} places in the queue, {unpacked} without packing"
    if plan.order_seed is not None and groups:
        yield f"order: shuffled (seed {plan.order_seed})"
    limit = plan.profile.scheduler.max_submitted_jobs
    if limit is not None and packed > limit:
        yield f"{plan.profile.name} takes {limit} jobs at once: {packed - limit} wait in the submission's folder"
    if packed > MAX_JOBS:
        yield f"more than {MAX_JOBS:,} jobs: set pack or pack_minutes in [submit]; submit requires --yes"
    cost = plan.node_hours(plan.missing)
    if plan.budget is not None:
        budget, owner = plan.budget
        yield f"budget of {owner}: {budget:g} node-hours" + (" - submit requires --yes" if cost > budget else "")
    if finished := Counter(plan.finished.values()):
        yield "have a result: " + ", ".join(f"{count} {status}" for status, count in sorted(finished.items()))
    if plan.stopped:
        yield f"stopped: {len(plan.stopped)} for one that is smaller, such as: {next(iter(plan.stopped.values()))}"
    if plan.elsewhere:
        yield f"of these {len(plan.elsewhere)} ok in another environment: submit --remeasure runs them again"


def _format_node_hours(node_hours: float) -> str:
    return f"{node_hours:.2f}" if node_hours >= 0.1 else f"{node_hours:.2g}"


def _arrays_view(plan: SweepPlan, groups: list[JobGroup], plan_forecast: PlanForecast | None) -> View:
    def predicted_text(group: JobGroup) -> str:
        hours = plan_forecast.node_hours({key: plan.runs[key] for key in group.run_ids}) if plan_forecast else None
        return _format_node_hours(hours) if hours is not None else ""

    columns = [
        Column("runs", "runs", lambda group: len(group.run_ids)),
        Column("jobs", "jobs", attrgetter("jobs")),
        Column("nodes", "nodes", attrgetter("shape.nodes")),
        Column("ranks", "ranks", lambda group: group.shape.nodes * plan.runs[group.run_ids[0]].ranks_per_node),
        Column("time_limit_s", "run limit", attrgetter("shape.time_limit_s"), compact_heading="run\nlimit"),
        Column("limit_s", "job limit", attrgetter("limit_s"), compact_heading="job\nlimit"),
        Column("node_hours", "node-h", lambda group: group.node_hours, lambda group: f"{group.node_hours:.2f}"),
        text_column("partition", lambda group: group.shape.partition.key or "default"),
        text_column("strategies", lambda group: _strategy_counts(plan, group), wraps=True),
    ]
    if plan_forecast is not None and plan_forecast.predictions:
        columns.insert(7, text_column("predicted", predicted_text, heading="pred.", is_number=True))
    return View.from_rows("", columns, groups)


def _strategy_counts(plan: SweepPlan, group: JobGroup) -> str:
    """Each strategy with its number of runs on one line; more than four are only counted."""
    counts = Counter(strategy_label(plan.runs[key]) for key in group.run_ids)
    names = ", ".join(f"{count}\u00a0{name}" for name, count in counts.items())
    return names if len(counts) <= 4 else f"{len(counts)} of them"


def _schedule_lines(plan: SweepPlan) -> Iterator[str]:
    """Diagrams of the pipelines' schedules, of the smallest if there are many."""
    schedules = {
        (spec.strategy, pipeline_layout(spec), spec.micro_batches)
        for spec in plan.missing.values()
        if get_strategy(spec.strategy).pipeline.records_timeline and 1 < spec.pp_degree <= MAX_STAGES_DRAWN
    }
    drawn = sorted(schedules, key=lambda entry: (entry[1].ranks * entry[2], entry[0]))[:MAX_SCHEDULES_DRAWN]
    for schedule, layout, micro_batches in drawn:
        yield ""
        yield from schedule_diagram(schedule, layout, micro_batches)
    if any(micro_batches == 1 for _, _, micro_batches in schedules):
        yield "with one micro-batch the stages of a pipeline work one after another: set micro_batches, such as 8"
    if len(schedules) > len(drawn):
        yield f"{len(schedules) - len(drawn)} more schedules are not drawn"
