"""What ``plan`` shows: the jobs, what is done, what is dropped and why."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hpcbench.fileio import printable
from hpcbench.report.tables import split_parameters
from hpcbench.submit.plan import Plan
from hpcbench.units import format_seconds


def plan_tables(plan: Plan) -> list[RenderableType]:
    """A headline, a table of the arrays that submit would send, and the dropped points by reason."""
    missing = plan.missing
    done = Counter(plan.finished.values())
    headline = (
        f"{plan.sweep.name} on {plan.profile.name}: {len(plan.runs)} runs, {len(missing)} to submit in "
        f"{len(plan.groups(missing))} arrays, at most {plan.node_hours(missing):.2f} node-hours"
    )
    _, shared = split_parameters(list(plan.runs.values()))
    parts: list[RenderableType] = [
        Text(printable(headline), style="bold"),
        Text(f"all runs: {shared}", style="dim"),
    ]
    if done:
        parts.append(Text("have a result: " + ", ".join(f"{count} {status}" for status, count in sorted(done.items()))))
    if missing:
        parts.append(_arrays(plan))
    if plan.dropped:
        parts.append(_dropped(plan))
    return parts


def _arrays(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("runs", "nodes", "ranks", "time limit"):
        table.add_column(heading, justify="right")
    table.add_column("partition")
    table.add_column("strategies")
    for shape, keys in plan.groups(plan.missing).items():
        strategies = Counter(plan.runs[key].strategy for key in keys)
        table.add_row(
            str(len(keys)),
            str(shape.nodes),
            str(shape.ranks),
            format_seconds(shape.time_limit_s),
            shape.partition or "the scheduler's default",
            ", ".join(f"{count} {name}" for name, count in strategies.items()),
        )
    return table


def _dropped(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("dropped", justify="right")
    table.add_column("because")
    for reason, count in Counter(point.reason for point in plan.dropped).most_common():
        table.add_row(str(count), Text(printable(reason)))
    return table
