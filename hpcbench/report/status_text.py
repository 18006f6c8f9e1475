"""Plain-text state of sweeps: counts, runs that need attention, and one line per finished run.

The module uses click instead of rich because importing rich takes longer than the scheduler's answer."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import click

from hpcbench.config.run_spec import RunSpec, run_label
from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.submit.run_state import ACTIVE_STATES, RunState, count_states

STATUS_STYLE = {
    "ok": "green",
    "lost": "red",
    "failed": "red",
    "timeout": "yellow",
    "cancelled": "yellow",
    "oom": "magenta",
}


_UNLISTED_STATES = frozenset({"ok", "planned"})
_PENDING_STATES = ("running", "pending", "waiting")
"""Shown last, in this order: nobody has to do anything about them."""
_MAX_ROWS = 20
_MIN_REASON_WIDTH = 20


class _StatusRow(NamedTuple):
    run: str
    state: str
    job: str
    reason: str


_HEADINGS = _StatusRow("run", "state", "job", "reason")
ListedRuns = list[tuple[str, RunState]]


def status_text(sweep: str, cluster: str, states: Mapping[str, RunState], width: int | None = None) -> str:
    """One line of counts, then the runs that are neither done nor merely planned, with the reason.

    Many runs of the same state and reason are one row. Reasons are broken into lines where there is a ``width``.
    """
    counted = ", ".join(f"{number} {state}" for state, number in count_states(states).items())
    headline = click.style(printable_text(f"{sweep} on {cluster}: {len(states)} runs: {counted or 'none'}"), bold=True)
    groups = _group_runs((key, state) for key, state in states.items() if state.state not in _UNLISTED_STATES)
    if not groups:
        return headline
    rows = [_status_row(group) for group in groups[:_MAX_ROWS]]
    more = sum(len(group) for group in groups[_MAX_ROWS:])
    last = [click.style(f"and {more} more: --json lists them all", dim=True)] if more else []
    return "\n".join([headline, "", *_status_table(rows, width), *last])


def _group_runs(loud: Iterable[tuple[str, RunState]]) -> list[ListedRuns]:
    """Runs of one row each: those of one state and reason together, or each by itself where there is room."""
    same: dict[tuple[str, str], ListedRuns] = {}
    for run in loud:
        same.setdefault((run[1].state, run[1].reason), []).append(run)
    alike: dict[tuple[str, str], ListedRuns] = {}
    for (name, reason), group in same.items():
        # The reason may name the job: that makes it no other reason.
        job_id = group[0][1].job_id
        alike.setdefault((name, reason.replace(job_id, "") if job_id else reason), []).extend(group)
    groups = sorted(alike.values(), key=lambda group: _state_rank(group[0][1].state))
    room = _MAX_ROWS - len(groups)
    apart = set()
    for group in sorted(groups, key=len):
        room -= len(group) - 1
        if room < 0:
            break
        apart.add(id(group))
    return [part for group in groups for part in ([[run] for run in group] if id(group) in apart else [group])]


def _state_rank(state: str) -> int:
    return _PENDING_STATES.index(state) if state in _PENDING_STATES else -1


def _status_row(group: ListedRuns) -> _StatusRow:
    key, state = group[0]
    job = state.job_id or ""
    if len(group) > 1:
        key, job = f"{len(group)} runs", f"{job} ..." if job else ""
    return _StatusRow(
        printable_text(key),
        printable_text(state.state),
        printable_excerpt(job),
        " ".join(printable_excerpt(state.reason).split()),
    )


def _status_table(rows: list[_StatusRow], width: int | None) -> list[str]:
    widths = [max(len(row[column]) for row in (_HEADINGS, *rows)) for column in range(3)]
    indent = sum(widths) + 2 * len(widths)
    room = max(width - indent - 1, _MIN_REASON_WIDTH) if width else None
    lines = [click.style(_status_line(_HEADINGS, widths).rstrip(), dim=True)]
    for row in rows:
        first, *more = (textwrap.wrap(row.reason, room) if room else [row.reason]) or [""]
        lines.append(_status_line(row._replace(reason=first), widths, STATUS_STYLE.get(row.state)).rstrip())
        lines += [" " * indent + line for line in more]
    return lines


def _status_line(row: _StatusRow, widths: list[int], colour: str | None = None) -> str:
    run, state, job = (text.ljust(width) for text, width in zip(row[:3], widths, strict=True))
    return "  ".join((run, click.style(state, fg=colour) if colour else state, job, row.reason))


class EndedRunLog:
    """Tells of every run that ends and was not in ``done_before``, once."""

    def __init__(self, tell: Callable[[str], None], runs: Mapping[str, RunSpec], done_before: Collection[str]) -> None:
        self._tell = tell
        self._runs = runs
        self._told = set(done_before)

    def update(self, states: Mapping[str, RunState]) -> None:
        """A new look at all runs."""
        for key, state in states.items():
            if state.state not in ACTIVE_STATES and key not in self._told:
                self._told.add(key)
                reason = f": {state.reason}" if state.reason else ""
                self._tell(printable_excerpt(f"{state.state:9} {run_label(self._runs[key])} ({key}){reason}"))
