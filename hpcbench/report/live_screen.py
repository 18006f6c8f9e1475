"""The live screen of sweeps in progress: progress bars per array, remaining time, cost and recent failures."""

from __future__ import annotations

import statistics
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.text import Text

from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.report.status_text import STATUS_STYLE
from hpcbench.submit.run_state import ACTIVE_STATES
from hpcbench.submit.watcher import ArraySnapshot, SweepSnapshot, TimedRun
from hpcbench.units import format_seconds, pluralize, three_digits

RATE_RUNS = 20
"""The rate is that of the last so many runs."""
_MIN_RUNS_FOR_DECILES = 10
"""Number of durations from which their spread is the first and last decile; with fewer it is min and max."""
_UNCHARGED_STATES = ACTIVE_STATES | {"planned", "skipped"}
"""States of runs that have used no node-hours, or none yet."""
_MIN_REMAINING_SHARE = 0.1
"""A run that has taken longer than finished ones is assumed to need this share of their time."""


class RunDuration(NamedTuple):
    """Duration of finished runs in seconds."""

    median_s: float
    low_s: float
    high_s: float
    runs: int


class RemainingTime(NamedTuple):
    """Seconds until the last run ends, their range as finished runs varied, and the basis of the estimate."""

    left_s: float
    low_s: float
    high_s: float
    basis: str


class NodeHourEstimate(NamedTuple):
    """Node-hours within runs, without queueing and the overhead of launches."""

    used: float
    left: float | None
    """``None`` if no run has ended."""


def run_duration(timed: Iterable[TimedRun]) -> RunDuration | None:
    """Return the duration of the runs that are ok; ``None`` without any."""
    durations = sorted(run.took_s for run in timed if run.is_ok)
    if not durations:
        return None
    edge = len(durations) // 10 if len(durations) >= _MIN_RUNS_FOR_DECILES else 0
    return RunDuration(statistics.median(durations), durations[edge], durations[-1 - edge], len(durations))


def runs_per_hour(snapshot: SweepSnapshot) -> tuple[float, int] | None:
    """Return the ended runs per hour until now, and the number of runs that this is based on.

    The last ``RATE_RUNS`` of submissions with active runs; ``None`` before two runs have ended.
    """
    active = {array.submission for array in snapshot.arrays if _active_runs(array)}
    timed = (run for array in snapshot.arrays if array.submission in active for run in array.timed)
    ended = sorted(timed, key=lambda run: run.ended_unix_s)
    if len(ended) < 2:
        return None
    last = ended[-RATE_RUNS:]
    start = ended[-len(last) - 1].ended_unix_s if len(ended) > len(last) else min(run.began_unix_s for run in last)
    elapsed_s = snapshot.now_unix_s - start
    return (len(last) / elapsed_s * 3600, len(last)) if elapsed_s > 0 else None


def estimate_remaining_time(snapshot: SweepSnapshot) -> RemainingTime | None:
    """Estimate the end of the last run from the number of running runs and the duration of finished ones.

    ``None`` if nothing runs, or no run has ended and nothing was predicted.
    """
    active = [array for array in snapshot.arrays if _active_runs(array)]
    running = sum(array.counts.get("running", 0) for array in active)
    works = [work for array in active if (work := _remaining_work(array, snapshot)) is not None]
    if active and running and len(works) == len(active):
        longest = max(work.longest_s for work in works)
        totals = (sum(seconds) for seconds in zip(*(work.seconds for work in works), strict=True))
        median, low, high = (max(total / running, longest) for total in totals)
        return RemainingTime(median, min(low, median), max(high, median), _basis_text(works, running))
    if snapshot.predicted_s is not None and active:
        return RemainingTime(snapshot.predicted_s, snapshot.predicted_s, snapshot.predicted_s, "predicted")
    return None


def estimate_node_hours(snapshot: SweepSnapshot) -> NodeHourEstimate:
    """Estimate the node-hours that finished runs have used and the others will use."""
    used, left = 0.0, 0.0
    is_unknown = False
    for array in snapshot.arrays:
        if array.shape is None:
            continue
        durations = [run.took_s for run in array.timed]
        ended = sum(count for state, count in array.counts.items() if state not in _UNCHARGED_STATES)
        if durations:
            used += array.shape.nodes * max(ended, len(durations)) * statistics.fmean(durations)
        if _active_runs(array):
            work = _remaining_work(array, snapshot)
            is_unknown |= work is None
            left += array.shape.nodes * work.seconds[0] if work is not None else 0.0
    return NodeHourEstimate(used / 3600, None if is_unknown else left / 3600)


class _RemainingWork(NamedTuple):
    """The unfinished runs of an array."""

    seconds: tuple[float, float, float]
    """Their total duration: median, min, max."""
    longest_s: float
    """The remaining time of the run that ends last."""
    runs: int
    """Number of finished runs behind the estimate."""
    is_same_shape: bool


def _active_runs(part: ArraySnapshot | SweepSnapshot) -> int:
    return sum(part.counts.get(state, 0) for state in ACTIVE_STATES)


def _remaining_work(array: ArraySnapshot, snapshot: SweepSnapshot) -> _RemainingWork | None:
    """Based on finished runs of the same shape, or of all shapes if there is none; ``None`` without any."""
    same = run_duration(run for other in snapshot.arrays if other.shape == array.shape for run in other.timed)
    duration = same or run_duration(run for other in snapshot.arrays for run in other.timed)
    if duration is None:
        return None
    running = array.counts.get("running", 0)
    queued = _active_runs(array) - running
    ages = [max(0.0, snapshot.now_unix_s - since) for since in array.running_since_unix_s[:running]]
    # Runs without a start marker are assumed to be half done.
    unmarked = running - len(ages)
    median, low, high = (
        queued * each + sum(_remaining_of_running(each, age) for age in ages) + unmarked * each / 2
        for each in duration[:3]
    )
    longest = duration.median_s if queued else 0.0
    if running and not queued:
        longest = _remaining_of_running(duration.median_s, min(ages, default=duration.median_s / 2))
    return _RemainingWork((median, low, high), longest, duration.runs, same is not None)


def _remaining_of_running(duration_s: float, age_s: float) -> float:
    return max(duration_s - age_s, _MIN_REMAINING_SHARE * duration_s)


def _basis_text(works: Sequence[_RemainingWork], running: int) -> str:
    runs = min(work.runs for work in works)
    finished = "the finished run of the same shape" if runs == 1 else f"the {runs} finished runs of the same shape"
    if not all(work.is_same_shape for work in works):
        finished = "finished runs of other shapes"
    return f"if {running} run at a time and take as long as {finished}"


_STATE_ORDER = ("ok", "running", "pending", "waiting", "planned")
"""Order of the counts; states of runs that did not end well follow."""
_BAR_BLOCKS, _BAR_ASCII = "█▓▒░", "#x=."
"""Segments of a bar: ok, other ends, running, not started; distinguishable without colours."""
_BAR_STYLES = ("green", "red", "yellow", "dim")
_MAX_ARRAYS = 8
_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 10, 40
_ID_DIGITS = 12
_MIN_WIDTH = 20
"""Columns; a narrower terminal shows the beginnings of lines."""


def live_screen_lines(snapshots: Sequence[SweepSnapshot], width: int, *, ascii_only: bool = False) -> list[Text]:
    """Return the lines of the screen at ``width`` columns; equal snapshots give equal lines.

    Sweeps without active runs are a line of counts and their failures. Times are rounded so that most lines stay the
    same from snapshot to snapshot.
    """
    lines: list[Text] = []
    for snapshot in snapshots:
        lines += [Text()] if lines else []
        lines += _sweep_lines(snapshot, width, ascii_only)
    if any(map(_active_runs, snapshots)):
        names = {snapshot.sweep for snapshot in snapshots}
        command = f"hpcbench status {names.pop() if len(names) == 1 else ''}".strip()
        hint = f"Ctrl-C leaves this screen, the runs go on; back: {command} --watch"
        lines += [Text(), Text(printable_text(hint), "dim")]
    for line in lines:
        line.truncate(width, overflow="crop" if ascii_only or width < _MIN_WIDTH else "ellipsis")
    return lines


def _sweep_lines(snapshot: SweepSnapshot, width: int, ascii_only: bool) -> Iterator[Text]:
    counts = snapshot.counts
    title = f"{snapshot.sweep} on {snapshot.cluster}: {pluralize(sum(counts.values()), 'run')}"
    yield Text(printable_text(title), "bold")
    yield from _count_lines(counts, width)
    if _active_runs(snapshot):
        arrays = list(snapshot.arrays)
        if len(arrays) > _MAX_ARRAYS:
            arrays.sort(key=lambda array: not _active_runs(array))
        yield from _array_lines(arrays[:_MAX_ARRAYS], width, ascii_only)
        hidden = arrays[_MAX_ARRAYS:]
        if hidden:
            runs = sum(sum(array.counts.values()) for array in hidden)
            yield Text(f"  and {len(hidden)} more arrays with {runs} runs", "dim")
        for line in _estimate_lines(snapshot):
            for part in textwrap.wrap(line, max(width, _MIN_WIDTH) - 2, subsequent_indent="  "):
                yield Text(f"  {part}")
        if snapshot.silence:
            yield Text(printable_text(f"  {printable_excerpt(snapshot.silence)}"), "yellow")
    yield from _failure_lines(snapshot)


def _count_lines(counts: Mapping[str, int], width: int) -> Iterator[Text]:
    """``12 ok, 4 running, 3 failed``, in as many lines as needed."""
    line = Text()
    for state in filter(counts.get, dict.fromkeys([*_STATE_ORDER, *sorted(counts)])):
        part = Text(f"{counts[state]} {printable_text(state)}", STATUS_STYLE.get(state, ""))
        if line and len(line) + len(part) + 2 > width:
            yield line.append(",")
            line = Text()
        line = line.append(", " if line else "  ").append_text(part)
    yield line


def _array_lines(arrays: Sequence[ArraySnapshot], width: int, ascii_only: bool) -> Iterator[Text]:
    """One line per array: name and shape, bar, ended of all runs, duration of a run.

    box-0001/1  2 nodes, 8 ranks, gpu  job 4712  ████▓▒▒░░░░  24/60  95 s a run
    """
    names = [_array_name(array) for array in arrays]
    ends = [_array_progress(array) for array in arrays]
    name_width = max(map(len, names))
    if width - name_width - max(map(len, ends)) - 6 < _MIN_BAR_WIDTH:
        # The duration of runs is dropped first, then the ends of the names.
        ends = [text.partition("  ")[0] for text in ends]
    room = width - max(map(len, ends)) - 6
    name_width = max(1, min(name_width, room - _MIN_BAR_WIDTH))
    cells = max(1, min(room - name_width, _MAX_BAR_WIDTH))
    for array, name, ending in zip(arrays, names, ends, strict=True):
        bar = _progress_bar(array.counts, cells, ascii_only)
        yield Text(f"  {name[:name_width]:<{name_width}}  ").append_text(bar).append(f"  {ending}")


def _array_name(array: ArraySnapshot) -> str:
    if not array.name:
        return "not submitted"
    name = array.name
    if array.shape is not None:
        name += f"  {pluralize(array.shape.nodes, 'node')}, {pluralize(array.shape.ranks, 'rank')}"
        name += f", {array.shape.partition}" if array.shape.partition else ""
    return printable_text(name + (f"  job {array.job_id}" if array.job_id else ""))


def _array_progress(array: ArraySnapshot) -> str:
    total = sum(array.counts.values())
    left = _active_runs(array) + array.counts.get("planned", 0)
    duration = run_duration(array.timed)
    if duration is None:
        return f"{total - left}/{total}"
    each = f"{_format_rounded_duration(duration.median_s)} a run{_format_range(duration.low_s, duration.high_s)}"
    return f"{total - left}/{total}  {each}"


def _format_range(low_s: float, high_s: float) -> str:
    low, high = _format_rounded_duration(low_s), _format_rounded_duration(high_s)
    return f" ({low} to {high})" if low != high else ""


def _progress_bar(counts: Mapping[str, int], width: int, ascii_only: bool) -> Text:
    """A bar of ``width`` cells by state; a state with any run has a cell if there are enough."""
    total = sum(counts.values())
    ok, running = counts.get("ok", 0), counts.get("running", 0)
    not_started = sum(counts.get(state, 0) for state in ("pending", "waiting", "planned"))
    cells = _apportion([ok, total - ok - running - not_started, running, not_started], width)
    blocks = zip(_BAR_ASCII if ascii_only else _BAR_BLOCKS, _BAR_STYLES, cells, strict=True)
    return Text.assemble(*((block * count, style) for block, style, count in blocks))


def _apportion(parts: Sequence[int], width: int) -> list[int]:
    """Divide ``width`` in proportion to ``parts``; each that is not 0 gets a cell as long as there are enough."""
    total = sum(parts)
    if total == 0:
        return [0] * (len(parts) - 1) + [width]
    cells = [max(part * width // total, min(part, 1)) for part in parts]
    while sum(cells) != width:
        step = 1 if sum(cells) < width else -1
        # Change the part whose cells differ most from its share.
        shares = [part * width / total for part in parts]
        errors = [step * (share - cell) if share else -width for share, cell in zip(shares, cells, strict=True)]
        cells[errors.index(max(errors))] += step
    return cells


def _estimate_lines(snapshot: SweepSnapshot) -> Iterator[str]:
    remaining = estimate_remaining_time(snapshot)
    if remaining is not None:
        until = _format_clock(snapshot.now_unix_s + remaining.left_s, remaining.left_s)
        interval = _format_range(remaining.low_s, remaining.high_s)
        yield f"about {_format_rounded_duration(remaining.left_s)} left{interval}, until {until}"
        yield f"  {remaining.basis}"
    elif not snapshot.counts.get("running"):
        yield "nothing runs now: the end is unknown"
    else:
        yield "no run has ended yet: the end is unknown"
    rate, node_hours = runs_per_hour(snapshot), estimate_node_hours(snapshot)
    parts = [f"{rate[0]:.{0 if rate[0] >= 10 else 1}f} runs an hour over the last {rate[1]}"] if rate else []
    if node_hours.used or node_hours.left:
        left = f", about {three_digits(node_hours.left)} left" if node_hours.left is not None else ""
        parts.append(f"{three_digits(node_hours.used)} node-hours in runs{left}")
    if parts:
        yield "; ".join(parts)


def _failure_lines(snapshot: SweepSnapshot) -> Iterator[Text]:
    if not snapshot.failures:
        return
    count = len(snapshot.failures)
    yield Text()
    title = f"last {count} of {snapshot.failed}" if count < snapshot.failed else f"{count}"
    yield Text(f"  {title} that did not end well", "bold")
    for failure in snapshot.failures:
        ended = f"  {_format_clock(failure.ended_unix_s, 0.0)}" if failure.ended_unix_s else ""
        style = STATUS_STYLE.get(failure.state, "")
        line = Text("  ").append(printable_text(failure.state), style)
        yield line.append(f"{ended}  {printable_text(failure.label)}")
        reason = printable_excerpt(failure.reason.strip().partition("\n")[0])
        if reason:
            yield Text(printable_text(f"    {reason}"))
        yield Text(f"    hpcbench logs {printable_text(failure.run_id[:_ID_DIGITS])}", "dim")


def _format_rounded_duration(seconds: float) -> str:
    """A time in steps that rarely change from snapshot to snapshot."""
    steps = ((10.0, 1.0), (120.0, 5.0), (3600.0, 60.0), (36000.0, 600.0))
    step_s = next((step_s for limit_s, step_s in steps if seconds < limit_s), 3600.0)
    rounded = round(seconds / step_s) * step_s
    if seconds > 0:
        rounded = max(rounded, step_s)
    if rounded < 120:
        return f"{rounded:.0f} s"
    return f"{rounded / 60:.0f} min" if rounded < 3600 else format_seconds(rounded)


def _format_clock(unix_s: float, ahead_s: float) -> str:
    """The local time to the minute; with the date if it is a day or more ahead."""
    return time.strftime("%m-%d %H:%M" if ahead_s >= 86400 else "%H:%M", time.localtime(unix_s))
