"""Plain-text state of sweeps: counts, runs that need attention, and one line per finished run.

The module uses click instead of rich because importing rich takes longer than the scheduler's answer."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import click

from hpcbench.config.run_spec import RunSpec, run_label, strategy_label
from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.report.table_output import STATUS_STYLE
from hpcbench.submit.lock import SILENCE_S
from hpcbench.submit.run_state import ACTIVE_STATES, RunState, count_states, suspect_nodes
from hpcbench.submit.watcher import RunDetails
from hpcbench.units import format_seconds, pluralize

_UNLISTED_STATES = frozenset({"ok", "planned"})
_PENDING_RANKS = {"running": 1, "pending": 2, "waiting": 3}
"""Listed last, in this order: they need no attention."""
_MAX_ROWS = 20
_MIN_REASON_WIDTH = 20


class _StatusRow(NamedTuple):
    run: str
    state: str
    job: str
    reason: str

    configuration: str = ""
    elapsed: str = ""


_HEADINGS = _StatusRow("run", "state", "job", "reason", "configuration", "elapsed")
_DETAIL_ORDER = ("run", "configuration", "state", "elapsed", "job")
RunGroup = list[tuple[str, RunState]]
"""Runs that share a row."""


def suspect_nodes_text(failed_on: Iterable[str | None], profile: str) -> str:
    """A line for each node on which runs fail again and again, with the line of the profile that excludes it."""
    return "\n".join(
        f"{pluralize(count, 'run')} failed on node {printable_text(node)} and left no reason; this keeps jobs from it, "
        f'in the table [request] of the profile {profile}: exclude_nodes = ["{printable_text(node)}"]'
        for node, count in suspect_nodes(failed_on).items()
    )


def status_text(
    sweep: str, cluster: str, states: Mapping[str, RunState], width: int | None = None,
    details: Callable[[str, RunState], RunDetails] | None = None, *, lists_all: bool = False,
) -> str:  # fmt: skip
    """Return a line of counts, and a table of the runs that are neither ok nor planned with their reasons.

    Many runs with the same state and reason are one row. Reasons are wrapped if there is a ``width``. With ``details``
    the table has the configuration and the elapsed time of each run; ``lists_all`` gives every run a row.
    """
    counted = ", ".join(f"{number} {state}" for state, number in count_states(states).items())
    runs = pluralize(len(states), "run")
    headline = click.style(printable_text(f"{sweep} on {cluster}: {runs}: {counted or 'none'}"), bold=True)
    if lists_all:
        groups = [[run] for run in states.items()]
    else:
        groups = _group_runs((run_id, state) for run_id, state in states.items() if state.state not in _UNLISTED_STATES)
    if not groups:
        return headline
    shown = groups if lists_all else groups[:_MAX_ROWS]
    rows = [_status_row(group, details) for group in shown]
    hidden = sum(len(group) for group in groups[len(shown) :])
    last = [click.style(f"and {hidden} more: --all or --json lists them", dim=True)] if hidden else []
    filled = {name for name in _DETAIL_ORDER if name == "job" or any(getattr(row, name) for row in rows)}
    columns = [name for name in _DETAIL_ORDER if name in filled]
    widths = {name: max(len(getattr(row, name)) for row in (_HEADINGS, *rows)) for name in columns}
    indent = sum(widths.values()) + 2 * len(widths)
    room = max(width - indent - 1, _MIN_REASON_WIDTH) if width else None
    lines = [click.style(_status_line(_HEADINGS, widths).rstrip(), dim=True)]
    for row in rows:
        first, *others = (textwrap.wrap(row.reason, room) if room else [row.reason]) or [""]
        lines.append(_status_line(row._replace(reason=first), widths, STATUS_STYLE.get(row.state)).rstrip())
        lines += [" " * indent + line for line in others]
    return "\n".join([headline, "", *lines, *last])


def _group_runs(runs: Iterable[tuple[str, RunState]]) -> list[RunGroup]:
    """Runs of one state and reason together, or each by itself where there is room; pending states last."""
    by_reason: dict[tuple[str, str], RunGroup] = {}
    for run_id, state in runs:
        # The reason may contain the job id: that does not make it another reason.
        reason = state.reason.replace(state.job_id, "") if state.job_id else state.reason
        by_reason.setdefault((state.state, reason), []).append((run_id, state))
    groups = sorted(by_reason.values(), key=lambda group: _PENDING_RANKS.get(group[0][1].state, 0))
    room = _MAX_ROWS - len(groups)
    separate = set()
    for group in sorted(groups, key=len):
        room -= len(group) - 1
        if room < 0:
            break
        separate.add(id(group))
    return [part for group in groups for part in ([[run] for run in group] if id(group) in separate else [group])]


def _status_row(group: RunGroup, details: Callable[[str, RunState], RunDetails] | None) -> _StatusRow:
    run, state = group[0]
    job = state.job_id or ""
    if len(group) > 1:
        run, job = f"{len(group)} runs", f"{job} ..." if job else ""
    reason = " ".join(printable_excerpt(state.reason).split())
    run_details = details(*group[0]) if details is not None and len(group) == 1 else RunDetails()
    return _StatusRow(
        printable_text(run), printable_text(state.state), printable_excerpt(job), reason,
        printable_excerpt(_configuration(run_details.spec)) if run_details.spec is not None else "",
        format_seconds(run_details.elapsed_s) if run_details.elapsed_s is not None else "",
    )  # fmt: skip


def _configuration(spec: RunSpec) -> str:
    """``resnet18 ddp 2x4 b16``: model, strategy, nodes x ranks on each, batch size, and the repeat."""
    words = [spec.model, strategy_label(spec), f"{spec.nodes}x{spec.tasks_per_node}", f"b{spec.batch_size}"]
    return " ".join([*words, f"r{spec.repeat}"] if spec.repeat else words)


def _status_line(row: _StatusRow, widths: Mapping[str, int], colour: str | None = None) -> str:
    cells = {name: getattr(row, name).ljust(width) for name, width in widths.items()}
    if colour:
        cells["state"] = click.style(cells["state"], fg=colour)
    return "  ".join([*cells.values(), row.reason])


class EndedRunLog:
    """Prints a line for every run that ends and was not in ``done_before``, once."""

    def __init__(
        self, print_line: Callable[[str], None], runs: Mapping[str, RunSpec], done_before: Collection[str]
    ) -> None:
        self._print_line = print_line
        self._runs = runs
        self._reported = set(done_before)
        self._waiting: tuple[str, float] | None = None

    def update(self, states: Mapping[str, RunState]) -> None:
        """Print the runs that have ended since the last call, and why none runs if that lasts."""
        for run_id, state in states.items():
            if state.state not in ACTIVE_STATES and run_id not in self._reported:
                self._reported.add(run_id)
                reason = f": {state.reason}" if state.reason else ""
                label = run_label(self._runs[run_id])
                self._print_line(printable_excerpt(f"{state.state:9} {label} ({run_id}){reason}"))
        self._update_waiting(states)

    def _update_waiting(self, states: Mapping[str, RunState]) -> None:
        active = [state for state in states.values() if state.state in ACTIVE_STATES]
        if not active or any(state.state == "running" for state in active):
            self._waiting = None
            return
        reason, now_s = active[0].reason, time.monotonic()
        if self._waiting is None or self._waiting[0] != reason:
            self._waiting = (reason, now_s)
        elif reason and now_s - self._waiting[1] > SILENCE_S:
            self._print_line(printable_excerpt(f"{active[0].state:9} {reason}"))
            self._waiting = (reason, math.inf)
