"""Terminal view of a plan: arrays to submit, finished runs, infeasible points, and diagrams of pipeline schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hpcbench.config.run_spec import strategy_label
from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.forecast.forecast import PlanForecast
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.pipeline.schedule_simulator import ScheduleTimeline, simulate_schedule
from hpcbench.parallel.pipeline.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineLayout,
    schedule_actions,
)
from hpcbench.parallel.strategies.pipeline import pipeline_layout
from hpcbench.report.results_table import split_parameters
from hpcbench.submit.plan import JobGroup, SweepPlan
from hpcbench.units import format_seconds

ACTION_UNITS = {FORWARD: 1, BACKWARD: 2, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1}
"""A backward pass as long as two forward passes, its halves as one each."""

DIAGRAM_WIDTH = 80


def schedule_diagram(
    schedule: str, layout: PipelineLayout, micro_batches: int, width: int = DIAGRAM_WIDTH
) -> list[str]:
    """Lines of at most ``width`` characters, folded where the step is longer.

    Every cell is a unit of time: the kind of the action and its micro-batch (``F3``), with the number of the rank's
    chunk before it where it has several (``2F3``), dots where the action goes on, blanks where the rank waits.
    """
    walked = simulate_schedule(
        schedule_actions(schedule, layout, micro_batches), layout, lambda action: ACTION_UNITS.get(action.kind, 0)
    )
    names = [_stage_name(layout, rank) for rank in range(layout.ranks)]
    cell = len(str(micro_batches - 1)) + 2 + (layout.virtual_stages > 1)
    rows = [_rank_row(walked, rank, layout, cell) for rank in range(layout.ranks)]
    start = max(len(name) for name in names) + 1
    fold = max((width - start - 1) // cell, 1) * cell
    total = int(walked.end) * cell
    lines = [f"{schedule}, {micro_batches} micro-batches: bubble {walked.bubble_fraction:.1%} of equal stages"]
    for first in range(0, total, fold):
        cut = [row[first : first + fold].rstrip() for row in rows]
        lines += [f"{name:<{start}}|{row}" for name, row in zip(names, cut, strict=True)]
        lines += [""] if first + fold < total else []
    return lines


def _stage_name(layout: PipelineLayout, rank: int) -> str:
    """With the letter of the replica where the stage has several."""
    stage = layout.stage_of(rank)
    ranks = layout.ranks_of(stage)
    return f"stage {stage}{chr(ord('a') + rank - ranks.start) if 1 < len(ranks) <= 26 else ''} "


def _rank_row(walked: ScheduleTimeline, rank: int, layout: PipelineLayout, cell: int) -> str:
    cells = [" " * cell] * int(walked.end)
    for action, begin, end in walked.ranks[rank]:
        for place in range(int(begin), int(end)):
            cells[place] = (_action_name(action, layout) if place == begin else "..").ljust(cell)
    return "".join(cells)


def _action_name(action: Action, layout: PipelineLayout) -> str:
    chunk = str(action.chunk // layout.stages) if layout.virtual_stages > 1 else ""
    return f"{chunk}{action.kind}{action.micro_batch}"


MAX_SCHEDULES_DRAWN, MAX_STAGES_DRAWN = 3, 16


def plan_renderables(plan: SweepPlan, ahead: PlanForecast | None = None) -> list[RenderableType]:
    """Headlines, a table of the arrays that submit would send, and the dropped points by reason.

    ``ahead`` is what the oracle says of them.
    """
    missing = plan.missing
    groups = plan.jobs(missing)
    headline = (
        f"{plan.sweep.name} on {plan.profile.name}: {len(plan.runs)} runs, {len(missing)} to submit in "
        f"{pluralize(sum(group.jobs for group in groups), 'job')} of {pluralize(len(groups), 'array')}, "
        f"at most {plan.node_hours(missing):.2f} node-hours"
    )
    expected = ahead.node_hours(missing) if ahead else None
    if expected is not None and ahead is not None:
        depths = ", ".join(dict.fromkeys(machine.depth for machine in ahead.forecast.machines()))
        headline += f", predicted {_format_node_hours(expected)} ({depths} numbers)"
    _, shared = split_parameters(list(plan.runs.values()))
    parts: list[RenderableType] = [
        Text(printable_text(headline), style="bold"),
        Text(printable_text(f"all runs: {shared}"), style="dim"),
        *(Text(printable_text(note)) for note in _plan_notes(plan, groups)),
    ]
    if ahead is not None and missing:
        parts += [Text(printable_text(line), style="yellow") for line in ahead.warnings(missing)]
    if missing:
        parts.append(_arrays_table(plan, groups, ahead))
    parts += [Text(printable_text(line), style="dim") for line in _schedule_lines(plan)]
    if plan.dropped:
        parts.append(_dropped_table(plan))
    return parts


def pluralize(number: int, word: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def _plan_notes(plan: SweepPlan, groups: list[JobGroup]) -> Iterator[str]:
    """What there is to know before submitting: places in the queue, budget, what is done."""
    packed, unpacked = sum(group.jobs for group in groups), sum(len(group.run_ids) for group in groups)
    if packed != unpacked:
        yield f"packed: {packed} places in the queue, {unpacked} without packing"
    limit = plan.profile.scheduler.max_submitted_jobs
    if limit is not None and packed > limit:
        yield f"{plan.profile.name} takes {limit} jobs at once: {packed - limit} wait in the submission's folder"
    cost = plan.node_hours(plan.missing)
    if plan.budget is not None:
        budget, owner = plan.budget
        yield f"budget of {owner}: {budget:g} node-hours" + (" - submit wants --yes" if cost > budget else "")
    done = Counter(plan.finished.values())
    if done:
        yield "have a result: " + ", ".join(f"{count} {status}" for status, count in sorted(done.items()))
    if plan.stopped:
        yield f"stopped: {len(plan.stopped)} for one that is smaller, such as: {next(iter(plan.stopped.values()))}"
    if plan.elsewhere:
        yield f"of these {len(plan.elsewhere)} ok in another environment: submit --remeasure runs them again"


def _format_node_hours(node_hours: float) -> str:
    return f"{node_hours:.2f}" if node_hours >= 0.1 else f"{node_hours:.2g}"


def _arrays_table(plan: SweepPlan, groups: list[JobGroup], ahead: PlanForecast | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    predicted = ("pred.",) if ahead is not None and ahead.found else ()
    for heading in ("runs", "jobs", "nodes", "ranks", "run\nlimit", "job\nlimit", "node-h", *predicted):
        table.add_column(heading, justify="right")
    table.add_column("parti-\ntion")
    table.add_column("strategies")
    for group in groups:
        strategies = Counter(strategy_label(plan.runs[key]) for key in group.run_ids)
        hours = ahead.node_hours({key: plan.runs[key] for key in group.run_ids}) if ahead is not None else None
        table.add_row(
            str(len(group.run_ids)),
            str(group.jobs),
            str(group.shape.nodes),
            str(group.shape.ranks),
            format_seconds(group.shape.time_limit_s),
            format_seconds(group.limit_s),
            f"{group.node_hours:.2f}",
            *([_format_node_hours(hours) if hours is not None else ""] if predicted else []),
            Text(printable_text(group.shape.partition or "default")),
            Text(printable_text(_strategy_counts(strategies))),
        )
    return table


def _strategy_counts(strategies: Counter[str]) -> str:
    """Each with its number of runs, which stays on its line; many are only counted."""
    if len(strategies) > 4:
        return f"{len(strategies)} of them"
    return ", ".join(f"{count}\u00a0{name}" for name, count in strategies.items())


def _schedule_lines(plan: SweepPlan) -> Iterator[str]:
    """Pictures of the pipelines' schedules, of the smallest ones where there are many."""
    kinds = {
        (spec.strategy, pipeline_layout(spec), spec.micro_batches)
        for spec in plan.missing.values()
        if get_strategy(spec.strategy).records_timeline and 1 < spec.pp_degree <= MAX_STAGES_DRAWN
    }
    shown = sorted(kinds, key=lambda kind: (kind[1].ranks * kind[2], kind[0]))[:MAX_SCHEDULES_DRAWN]
    for schedule, layout, micro_batches in shown:
        yield ""
        yield from schedule_diagram(schedule, layout, micro_batches)
    if len(kinds) > len(shown):
        yield f"{len(kinds) - len(shown)} more schedules are not drawn"


def _dropped_table(plan: SweepPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("dropped", justify="right")
    table.add_column("because")
    for reason, count in Counter(point.reason for point in plan.dropped).most_common():
        table.add_row(str(count), Text(printable_excerpt(reason)))
    return table
