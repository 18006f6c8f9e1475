"""What ``plan`` shows: the jobs, what is done, what is dropped and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hpcbench.config.spec import strategy_label
from hpcbench.fileio import brief, printable
from hpcbench.parallel.strategies.pipeline import STRATEGIES as PIPELINES
from hpcbench.parallel.strategies.pipeline import layout_of
from hpcbench.report.schedule import schedule_picture
from hpcbench.report.tables import split_parameters
from hpcbench.submit.outlook import Outlook
from hpcbench.submit.packing import JobGroup
from hpcbench.submit.plan import Plan
from hpcbench.units import format_seconds

MOST_PICTURES, MOST_STAGES = 3, 16


def plan_tables(plan: Plan, ahead: Outlook | None = None) -> list[RenderableType]:
    """Headlines, a table of the arrays that submit would send, and the dropped points by reason.

    ``ahead`` is what the oracle says of them.
    """
    missing = plan.missing
    groups = plan.jobs(missing)
    headline = (
        f"{plan.sweep.name} on {plan.profile.name}: {len(plan.runs)} runs, {len(missing)} to submit in "
        f"{counted(sum(group.jobs for group in groups), 'job')} of {counted(len(groups), 'array')}, "
        f"at most {plan.node_hours(missing):.2f} node-hours"
    )
    expected = ahead.node_hours(missing) if ahead else None
    if expected is not None and ahead is not None:
        depths = ", ".join(dict.fromkeys(machine.depth for machine in ahead.forecast.machines()))
        headline += f", predicted {_hours(expected)} ({depths} numbers)"
    _, shared = split_parameters(list(plan.runs.values()))
    parts: list[RenderableType] = [
        Text(printable(headline), style="bold"),
        Text(printable(f"all runs: {shared}"), style="dim"),
        *(Text(printable(note)) for note in _notes(plan, groups)),
    ]
    if ahead is not None and missing:
        parts += [Text(printable(line), style="yellow") for line in ahead.warnings(missing)]
    if missing:
        parts.append(_arrays(plan, groups, ahead))
    parts += [Text(printable(line), style="dim") for line in _schedules(plan)]
    if plan.dropped:
        parts.append(_dropped(plan))
    return parts


def counted(number: int, word: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def _notes(plan: Plan, groups: list[JobGroup]) -> Iterator[str]:
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


def _hours(node_hours: float) -> str:
    return f"{node_hours:.2f}" if node_hours >= 0.1 else f"{node_hours:.2g}"


def _arrays(plan: Plan, groups: list[JobGroup], ahead: Outlook | None) -> Table:
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
            *([_hours(hours) if hours is not None else ""] if predicted else []),
            Text(printable(group.shape.partition or "default")),
            Text(printable(_listed(strategies))),
        )
    return table


def _listed(strategies: Counter[str]) -> str:
    """Each with its number of runs, which stays on its line; many are only counted."""
    if len(strategies) > 4:
        return f"{len(strategies)} of them"
    return ", ".join(f"{count}\u00a0{name}" for name, count in strategies.items())


def _schedules(plan: Plan) -> Iterator[str]:
    """Pictures of the pipelines' schedules, of the smallest ones where there are many."""
    kinds = {
        (spec.strategy, layout_of(spec), spec.micro_batches)
        for spec in plan.missing.values()
        if spec.strategy in PIPELINES and 1 < spec.pp_degree <= MOST_STAGES
    }
    shown = sorted(kinds, key=lambda kind: (kind[1].ranks * kind[2], kind[0]))[:MOST_PICTURES]
    for schedule, layout, micro_batches in shown:
        yield ""
        yield from schedule_picture(schedule, layout, micro_batches)
    if len(kinds) > len(shown):
        yield f"{len(kinds) - len(shown)} more schedules are not drawn"


def _dropped(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("dropped", justify="right")
    table.add_column("because")
    for reason, count in Counter(point.reason for point in plan.dropped).most_common():
        table.add_row(str(count), Text(brief(reason)))
    return table
