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
from hpcbench.submit.watcher import ArrayShape, ArraySnapshot, FailedRun, SweepSnapshot, TimedRun
from hpcbench.units import format_seconds

RATE_RUNS = 20
"""So many of the last runs make the rate."""
_MIN_RUNS_FOR_DECILES = 10
"""Of fewer durations than this the least and the most stand for their spread, of more the first and last tenth."""
_UNCHARGED_STATES = ACTIVE_STATES | {"planned", "skipped"}
"""States of runs that have used nothing that counts here, or nothing yet."""
_MIN_REMAINING_SHARE = 0.1
"""A run that has already taken longer than others did is taken to have this share of their time left."""


class RunDuration(NamedTuple):
    """How long finished runs took, in seconds."""

    median_s: float
    low_s: float
    high_s: float
    runs: int


class RemainingTime(NamedTuple):
    """Seconds until the last run ends, between ``low_s`` and ``high_s`` as finished runs varied, and what says so."""

    left_s: float
    low_s: float
    high_s: float
    basis: str


class NodeHourEstimate(NamedTuple):
    """Node-hours within runs: queueing and the launches' own time are not in them."""

    used: float
    left: float | None
    """``None`` where no run has ended to tell by."""


def run_duration(timed: Iterable[TimedRun]) -> RunDuration | None:
    """How long the ok ones took; ``None`` where there is none."""
    took = sorted(one.took_s for one in timed if one.is_ok)
    if not took:
        return None
    edge = len(took) // 10 if len(took) >= _MIN_RUNS_FOR_DECILES else 0
    return RunDuration(statistics.median(took), took[edge], took[-1 - edge], len(took))


def runs_per_hour(snapshot: SweepSnapshot) -> tuple[float, int] | None:
    """Runs that ended per hour up to now, and of how many: the last ``RATE_RUNS`` of submissions that are under way.

    ``None`` before two runs have ended.
    """
    under_way = {array.submission for array in snapshot.arrays if _active_runs(array)}
    timed = (one for array in snapshot.arrays if array.submission in under_way for one in array.timed)
    ended = sorted(timed, key=lambda one: one.ended_unix_s)
    if len(ended) < 2:
        return None
    last = ended[-RATE_RUNS:]
    before = ended[-len(last) - 1].ended_unix_s if len(ended) > len(last) else min(one.began_unix_s for one in last)
    since_s = snapshot.now_unix_s - before
    return (len(last) / since_s * 3600, len(last)) if since_s > 0 else None


def estimate_remaining_time(snapshot: SweepSnapshot) -> RemainingTime | None:
    """When the last run ends if as many run at the same time as do now and runs take as long as finished ones did.

    ``None`` where nothing runs, or no run has ended and nothing was predicted.
    """
    active = [array for array in snapshot.arrays if _active_runs(array)]
    running = sum(array.counts.get("running", 0) for array in active)
    found = [_remaining_work(array, snapshot) for array in active]
    known = [one for one in found if one is not None]
    if active and running and len(known) == len(active):
        works = [sum(one.works[place] for one in known) for place in range(3)]
        longest = max(one.longest_s for one in known)
        middle, low, high = (max(work / running, longest) for work in works)
        return RemainingTime(middle, min(low, middle), max(high, middle), _basis_text(known, running))
    if snapshot.predicted_s is not None and active:
        return RemainingTime(snapshot.predicted_s, snapshot.predicted_s, snapshot.predicted_s, "predicted")
    return None


def estimate_node_hours(snapshot: SweepSnapshot) -> NodeHourEstimate:
    """Node-hours that finished runs have used and the others are likely to, each as the newest of its array."""
    used, left = 0.0, 0.0
    unknown = False
    for array in snapshot.arrays:
        if array.shape is None:
            continue
        took = [one.took_s for one in array.timed]
        ended = sum(count for state, count in array.counts.items() if state not in _UNCHARGED_STATES)
        if took:
            used += array.shape.nodes * max(ended, len(took)) * statistics.fmean(took)
        rest = _remaining_work(array, snapshot) if _active_runs(array) else None
        if rest is not None:
            left += array.shape.nodes * rest.works[0]
        elif _active_runs(array):
            unknown = True
    return NodeHourEstimate(used / 3600, None if unknown else left / 3600)


class _RemainingWork(NamedTuple):
    """What an array has still to do."""

    works: tuple[float, float, float]
    """Seconds of runs one after another: as the median, at least, at most."""
    longest_s: float
    """What the run that began last has left."""
    runs: int
    """How many finished runs it goes by."""
    is_own: bool
    """They had the same shape."""


def _active_runs(array: ArraySnapshot) -> int:
    return sum(array.counts.get(state, 0) for state in ACTIVE_STATES)


def _remaining_work(array: ArraySnapshot, snapshot: SweepSnapshot) -> _RemainingWork | None:
    found = _similar_durations(array.shape, snapshot.arrays)
    if found is None:
        return None
    took, is_own = found
    running = array.counts.get("running", 0)
    queued = _active_runs(array) - running
    ages = [max(0.0, snapshot.now_unix_s - since) for since in array.running_since_unix_s[:running]]
    # Of runs that have left no marker nothing is known; they are taken to be half done.
    unknown = running - len(ages)
    works = [
        queued * each + sum(_remaining_of_running(each, age) for age in ages) + unknown * each / 2
        for each in (took.median_s, took.low_s, took.high_s)
    ]
    newest = min(ages, default=took.median_s / 2)
    longest = took.median_s if queued else (_remaining_of_running(took.median_s, newest) if running else 0.0)
    return _RemainingWork((works[0], works[1], works[2]), longest, took.runs, is_own)


def _remaining_of_running(took_s: float, age_s: float) -> float:
    return max(took_s - age_s, _MIN_REMAINING_SHARE * took_s)


def _similar_durations(shape: ArrayShape | None, arrays: Sequence[ArraySnapshot]) -> tuple[RunDuration, bool] | None:
    """How long runs of ``shape`` took, or, where none has ended, those of all shapes."""
    same = run_duration(one for array in arrays if array.shape == shape for one in array.timed)
    if same is not None:
        return same, True
    others = run_duration(one for array in arrays for one in array.timed)
    return (others, False) if others is not None else None


def _basis_text(known: Sequence[_RemainingWork], running: int) -> str:
    runs = min(one.runs for one in known)
    if not all(one.is_own for one in known):
        finished = "finished runs of other shapes"
    elif runs == 1:
        finished = "the finished run of the same shape"
    else:
        finished = f"the {runs} finished runs of the same shape"
    return f"if {running} run at a time and take as long as {finished}"


_STATE_ORDER = ("ok", "running", "pending", "waiting", "planned")
"""What is counted first, in this order; what did not end well comes after."""
_BAR_BLOCKS, _BAR_ASCII = "█▓▒░", "#x=."
"""Of a bar: ok, ended otherwise, running, the rest. They can be told apart without colours."""
_BAR_STYLES = ("green", "red", "yellow", "dim")
_MAX_ARRAYS = 8
_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 10, 40
_ID_DIGITS = 12
_MIN_WIDTH = 20
"""Columns; a narrower terminal shows the beginnings of lines."""


def live_screen_lines(
    snapshots: Sequence[SweepSnapshot], width: int, *, ascii_only: bool = False, most_arrays: int = _MAX_ARRAYS
) -> list[Text]:
    """The screen at ``width`` columns, without anything that changes by itself from look to look.

    Sweeps of which nothing is on its way are one line. Equal looks give equal lines, so that nothing need be drawn
    anew.
    """
    lines: list[Text] = []
    for snapshot in snapshots:
        if lines:
            lines.append(Text())
        lines += _sweep_lines(snapshot, width, ascii_only, most_arrays)
    if any(_has_active_runs(snapshot.counts) for snapshot in snapshots):
        names = {snapshot.sweep for snapshot in snapshots}
        back = f"hpcbench status {names.pop() if len(names) == 1 else ''}".strip()
        lines += [
            Text(),
            Text(printable_text(f"Ctrl-C leaves this screen, the runs go on; back: {back} --watch"), "dim"),
        ]
    for line in lines:
        line.truncate(width, overflow="crop" if ascii_only or width < _MIN_WIDTH else "ellipsis")
    return lines


def _sweep_lines(snapshot: SweepSnapshot, width: int, ascii_only: bool, most_arrays: int) -> Iterator[Text]:
    counts = snapshot.counts
    total = sum(counts.values())
    yield Text(
        printable_text(f"{snapshot.sweep} on {snapshot.cluster}: {total} run{'s' if total != 1 else ''}"), "bold"
    )
    yield from _count_lines(counts, width)
    if not _has_active_runs(counts):
        yield from _failure_lines(snapshot)
        return
    arrays = list(snapshot.arrays)
    if len(arrays) > most_arrays:
        arrays.sort(key=lambda array: not _has_active_runs(array.counts))
    shown, more = arrays[:most_arrays], arrays[most_arrays:]
    yield from _array_lines(shown, width, ascii_only)
    if more:
        runs = sum(sum(array.counts.values()) for array in more)
        yield Text(f"  and {len(more)} more arrays with {runs} runs", "dim")
    for line in _estimate_lines(snapshot):
        yield from (
            Text(f"  {part}") for part in textwrap.wrap(line, max(width, _MIN_WIDTH) - 2, subsequent_indent="  ")
        )
    if snapshot.silence:
        yield Text(printable_text(f"  {printable_excerpt(snapshot.silence)}"), "yellow")
    yield from _failure_lines(snapshot)


def _has_active_runs(counts: Mapping[str, int]) -> bool:
    return any(counts.get(state) for state in ACTIVE_STATES)


def _count_lines(counts: Mapping[str, int], width: int) -> Iterator[Text]:
    known = [state for state in _STATE_ORDER if counts.get(state)]
    others = sorted(state for state, count in counts.items() if count and state not in _STATE_ORDER)
    line = Text()
    for state in [*known, *others]:
        part = Text(f"{counts[state]} {printable_text(state)}", STATUS_STYLE.get(state, ""))
        if line and len(line) + len(part) + 2 > width:
            yield line.append(",")
            line = Text()
        line = line.append(", " if line else "  ").append_text(part)
    yield line


def _array_lines(arrays: Sequence[ArraySnapshot], width: int, ascii_only: bool) -> Iterator[Text]:
    """A row per array: what it is, a bar, done of all, what its runs take."""
    names = [_array_name(array) for array in arrays]
    ends = [_array_progress(array) for array in arrays]
    if _bar_room(names, ends, width) < _MIN_BAR_WIDTH:
        # The time that runs take is the first to go, then the end of the names.
        ends = [text.partition("  ")[0] for text in ends]
    if (lacking := _MIN_BAR_WIDTH - _bar_room(names, ends, width)) > 0:
        longest = max(max(map(len, names)) - lacking, 1)
        names = [name[:longest] for name in names]
    room = max(1, min(_bar_room(names, ends, width), _MAX_BAR_WIDTH))
    column = max(map(len, names))
    for array, name, ending in zip(arrays, names, ends, strict=True):
        line = (
            Text("  ")
            .append(name.ljust(column))
            .append("  ")
            .append_text(_progress_bar(array.counts, room, ascii_only))
        )
        yield line.append("  ").append(ending)


def _bar_room(names: Sequence[str], ends: Sequence[str], width: int) -> int:
    """What is left for the bars."""
    return width - max(map(len, names)) - max(map(len, ends)) - 6


def _array_name(array: ArraySnapshot) -> str:
    if not array.name:
        return "not submitted"
    shape = array.shape
    what = ""
    if shape is not None:
        nodes = f"{shape.nodes} node{'s' if shape.nodes > 1 else ''}"
        what = f"  {nodes}, {shape.ranks} rank{'s' if shape.ranks > 1 else ''}"
        what += f", {shape.partition}" if shape.partition else ""
    return printable_text(f"{array.name}{what}" + (f"  job {array.job_id}" if array.job_id else ""))


def _array_progress(array: ArraySnapshot) -> str:
    total = sum(array.counts.values())
    left = sum(array.counts.get(state, 0) for state in (*ACTIVE_STATES, "planned"))
    took = run_duration(array.timed)
    return f"{total - left}/{total}" + (f"  {_format_run_duration(took)}" if took else "")


def _format_run_duration(took: RunDuration) -> str:
    return f"{_format_rounded_duration(took.median_s)} a run{_format_range(took.low_s, took.high_s)}"


def _format_range(low_s: float, high_s: float) -> str:
    low, high = _format_rounded_duration(low_s), _format_rounded_duration(high_s)
    return f" ({low} to {high})" if low != high else ""


def _progress_bar(counts: Mapping[str, int], width: int, ascii_only: bool) -> Text:
    """``width`` cells shared out by state; a state that has a run has a cell where there is room."""
    total = sum(counts.values())
    good, running = counts.get("ok", 0), counts.get("running", 0)
    open_ = sum(counts.get(state, 0) for state in ("pending", "waiting", "planned"))
    parts = [good, total - good - running - open_, running, open_]
    cells = _apportion(parts, width)
    bar = Text()
    for block, style, count in zip(_BAR_ASCII if ascii_only else _BAR_BLOCKS, _BAR_STYLES, cells, strict=True):
        bar.append(block * count, style)
    return bar


def _apportion(parts: Sequence[int], width: int) -> list[int]:
    """``width`` divided like ``parts``; none that is not 0 gets nothing as long as there are enough cells."""
    total = sum(parts)
    if total == 0:
        return [0] * (len(parts) - 1) + [width]
    cells = [max(part * width // total, min(part, 1)) for part in parts]
    while sum(cells) != width:
        step = 1 if sum(cells) < width else -1
        # To, or from, the one whose cells are furthest from its share.
        off = [
            step * (part * width / total - cell) if part else -width for part, cell in zip(parts, cells, strict=True)
        ]
        cells[off.index(max(off))] += step
    return cells


def _estimate_lines(snapshot: SweepSnapshot) -> Iterator[str]:
    found = estimate_remaining_time(snapshot)
    if found is not None:
        until = _format_clock(snapshot.now_unix_s + found.left_s, found.left_s)
        interval = _format_range(found.low_s, found.high_s)
        yield f"about {_format_rounded_duration(found.left_s)} left{interval}, until {until}"
        yield f"  {found.basis}"
    elif not snapshot.counts.get("running"):
        yield "nothing runs now: when it will end cannot be told"
    else:
        yield "no run has ended yet: when the last one will cannot be told"
    rate, spent = runs_per_hour(snapshot), estimate_node_hours(snapshot)
    parts = [f"{rate[0]:.{0 if rate[0] >= 10 else 1}f} runs an hour over the last {rate[1]}"] if rate else []
    if spent.used or spent.left:
        left = f", about {_format_number(spent.left)} left" if spent.left is not None else ""
        parts.append(f"{_format_number(spent.used)} node-hours in runs{left}")
    if parts:
        yield "; ".join(parts)


def _failure_lines(snapshot: SweepSnapshot) -> Iterator[Text]:
    if not snapshot.failures:
        return
    shown = len(snapshot.failures)
    title = f"last {shown} of {snapshot.failed}" if shown < snapshot.failed else f"{shown}"
    yield Text()
    yield Text(f"  {title} that did not end well", "bold")
    for failed in snapshot.failures:
        yield from _failed_run_lines(failed)


def _failed_run_lines(failed: FailedRun) -> Iterator[Text]:
    style = STATUS_STYLE.get(failed.state, "")
    at = f"  {_format_clock(failed.ended_unix_s, 0.0)}" if failed.ended_unix_s else ""
    line = Text("  ").append(printable_text(failed.state), style).append(f"{at}  {printable_text(failed.label)}")
    yield line
    first = printable_excerpt(failed.reason.strip().partition("\n")[0])
    if first:
        yield Text(printable_text(f"    {first}"))
    yield Text(printable_text(f"    hpcbench logs {printable_text(failed.run_id[:_ID_DIGITS])}"), "dim")


def _format_rounded_duration(seconds: float) -> str:
    """A time in steps that do not change with every look."""
    for limit_s, step_s in ((10.0, 1.0), (120.0, 5.0), (3600.0, 60.0), (36000.0, 600.0)):
        if seconds < limit_s:
            rounded = max(1.0, round(seconds / step_s)) * step_s if seconds > 0 else 0.0
            break
    else:
        rounded = round(seconds / 3600.0) * 3600.0
    if rounded < 120:
        return f"{rounded:.0f} s"
    return f"{rounded / 60:.0f} min" if rounded < 3600 else format_seconds(rounded)


def _format_clock(unix_s: float, ahead_s: float) -> str:
    """The time of day here, to the minute; with the date where it is a day or more away."""
    return time.strftime("%m-%d %H:%M" if ahead_s >= 86400 else "%H:%M", time.localtime(unix_s))


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
