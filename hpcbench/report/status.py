"""What ``status`` shows: how many runs are in which state, and those that need a person or are on their way.

Plain text, because rich takes longer to import than the scheduler takes to answer.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import click

from hpcbench.fileio import brief, printable
from hpcbench.report.styles import STATUS_STYLE
from hpcbench.submit.state import RunState, counts

_QUIET = frozenset({"ok", "planned"})
_ON_THEIR_WAY = ("running", "pending", "waiting")
"""Shown last, in this order: nobody has to do anything about them."""
_MOST_ROWS = 20
_NARROWEST_REASON = 20


class _Row(NamedTuple):
    run: str
    state: str
    job: str
    reason: str


_HEADINGS = _Row("run", "state", "job", "reason")
Loud = list[tuple[str, RunState]]


def status_text(sweep: str, cluster: str, states: Mapping[str, RunState], width: int | None = None) -> str:
    """One line of counts, then the runs that are neither done nor merely planned, with the reason.

    Many runs of the same state and reason are one row. Reasons are broken into lines where there is a ``width``.
    """
    counted = ", ".join(f"{number} {state}" for state, number in counts(states).items())
    headline = click.style(printable(f"{sweep} on {cluster}: {len(states)} runs: {counted or 'none'}"), bold=True)
    groups = _groups((key, state) for key, state in states.items() if state.state not in _QUIET)
    if not groups:
        return headline
    rows = [_row(group) for group in groups[:_MOST_ROWS]]
    more = sum(len(group) for group in groups[_MOST_ROWS:])
    last = [click.style(f"and {more} more: --json lists them all", dim=True)] if more else []
    return "\n".join([headline, "", *_table(rows, width), *last])


def _groups(loud: Iterable[tuple[str, RunState]]) -> list[Loud]:
    """Runs of one row each: those of one state and reason together, or each by itself where there is room."""
    same: dict[tuple[str, str], Loud] = {}
    for run in loud:
        same.setdefault((run[1].state, run[1].reason), []).append(run)
    alike: dict[tuple[str, str], Loud] = {}
    for (name, reason), group in same.items():
        # The reason may name the job: that makes it no other reason.
        job_id = group[0][1].job_id
        alike.setdefault((name, reason.replace(job_id, "") if job_id else reason), []).extend(group)
    groups = sorted(alike.values(), key=lambda group: _rank(group[0][1].state))
    room = _MOST_ROWS - len(groups)
    apart = set()
    for group in sorted(groups, key=len):
        room -= len(group) - 1
        if room < 0:
            break
        apart.add(id(group))
    return [part for group in groups for part in ([[run] for run in group] if id(group) in apart else [group])]


def _rank(state: str) -> int:
    return _ON_THEIR_WAY.index(state) if state in _ON_THEIR_WAY else -1


def _row(group: Loud) -> _Row:
    key, state = group[0]
    job = state.job_id or ""
    if len(group) > 1:
        key, job = f"{len(group)} runs", f"{job} ..." if job else ""
    return _Row(printable(key), printable(state.state), brief(job), " ".join(brief(state.reason).split()))


def _table(rows: list[_Row], width: int | None) -> list[str]:
    widths = [max(len(row[column]) for row in (_HEADINGS, *rows)) for column in range(3)]
    indent = sum(widths) + 2 * len(widths)
    room = max(width - indent - 1, _NARROWEST_REASON) if width else None
    lines = [click.style(_line(_HEADINGS, widths).rstrip(), dim=True)]
    for row in rows:
        first, *more = (textwrap.wrap(row.reason, room) if room else [row.reason]) or [""]
        lines.append(_line(row._replace(reason=first), widths, STATUS_STYLE.get(row.state)).rstrip())
        lines += [" " * indent + line for line in more]
    return lines


def _line(row: _Row, widths: list[int], colour: str | None = None) -> str:
    run, state, job = (text.ljust(width) for text, width in zip(row[:3], widths, strict=True))
    return "  ".join((run, click.style(state, fg=colour) if colour else state, job, row.reason))
