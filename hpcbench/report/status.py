"""What ``status`` shows: how many runs are in which state, and those that need a person."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcbench.fileio import brief, printable
from hpcbench.report.tables import STATUS_STYLE
from hpcbench.submit.state import RunState, counts

_QUIET = frozenset({"ok", "planned"})
_MOST_LINES = 20


def status_tables(sweep: str, cluster: str, states: dict[str, RunState]) -> RenderableType:
    """One line of counts, then the runs that are neither done nor merely planned, with the reason."""
    counted = ", ".join(f"{number} {state}" for state, number in counts(states).items())
    headline = Text(printable(f"{sweep} on {cluster}: {len(states)} runs: {counted or 'none'}"), style="bold")
    loud = {key: state for key, state in states.items() if state.state not in _QUIET}
    if not loud:
        return headline
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("run", "state", "job", "reason"):
        table.add_column(heading, overflow="fold")
    for key, state in list(loud.items())[:_MOST_LINES]:
        style = STATUS_STYLE.get(state.state, "")
        state_cell = Text(printable(state.state), style=style)
        table.add_row(Text(printable(key)), state_cell, Text(brief(state.job_id or "")), Text(brief(state.reason)))
    parts: list[RenderableType] = [headline, table]
    if len(loud) > _MOST_LINES:
        parts.append(Text(f"and {len(loud) - _MOST_LINES} more: --json lists them all", style="dim"))
    return Group(*parts)
