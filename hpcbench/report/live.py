"""The live screen of ``run`` and ``status --watch``: one look at sweeps as lines of text. Draws nothing itself."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from hpcbench.fileio import brief, printable
from hpcbench.report.estimates import Duration, cost, duration, end, runs_per_hour
from hpcbench.report.styles import STATUS_STYLE
from hpcbench.submit.state import ACTIVE
from hpcbench.submit.watch import ArrayLook, FailedRun, Snapshot
from hpcbench.units import format_seconds

_STATES = ("ok", "running", "pending", "waiting", "planned")
"""What is counted first, in this order; what did not end well comes after."""
_BLOCKS, _ASCII = "█▓▒░", "#x=."
"""Of a bar: ok, ended otherwise, running, the rest. They can be told apart without colours."""
_STYLES = ("green", "red", "yellow", "dim")
_MOST_ARRAYS = 8
_NARROWEST_BAR, _WIDEST_BAR = 10, 40
_ID_DIGITS = 12
_NARROWEST = 20
"""Columns; a narrower terminal shows the beginnings of lines."""


def live_lines(
    snapshots: Sequence[Snapshot], width: int, *, ascii_only: bool = False, most_arrays: int = _MOST_ARRAYS
) -> list[Text]:
    """The screen at ``width`` columns, without anything that changes by itself from look to look.

    Sweeps of which nothing is on its way are one line. Equal looks give equal lines, so that nothing need be drawn
    anew.
    """
    lines: list[Text] = []
    for snapshot in snapshots:
        if lines:
            lines.append(Text())
        lines += _sweep(snapshot, width, ascii_only, most_arrays)
    if any(_is_active(snapshot.counts) for snapshot in snapshots):
        names = {snapshot.sweep for snapshot in snapshots}
        back = f"hpcbench status {names.pop() if len(names) == 1 else ''}".strip()
        lines += [Text(), Text(printable(f"Ctrl-C leaves this screen, the runs go on; back: {back} --watch"), "dim")]
    for line in lines:
        line.truncate(width, overflow="crop" if ascii_only or width < _NARROWEST else "ellipsis")
    return lines


def _sweep(snapshot: Snapshot, width: int, ascii_only: bool, most_arrays: int) -> Iterator[Text]:
    counts = snapshot.counts
    total = sum(counts.values())
    yield Text(printable(f"{snapshot.sweep} on {snapshot.cluster}: {total} run{'s' if total != 1 else ''}"), "bold")
    yield from _counted(counts, width)
    if not _is_active(counts):
        yield from _failures(snapshot)
        return
    arrays = list(snapshot.arrays)
    if len(arrays) > most_arrays:
        arrays.sort(key=lambda array: not _is_active(array.counts))
    shown, more = arrays[:most_arrays], arrays[most_arrays:]
    yield from _arrays(shown, width, ascii_only)
    if more:
        runs = sum(sum(array.counts.values()) for array in more)
        yield Text(f"  and {len(more)} more arrays with {runs} runs", "dim")
    for line in _figures(snapshot):
        yield from (
            Text(f"  {part}") for part in textwrap.wrap(line, max(width, _NARROWEST) - 2, subsequent_indent="  ")
        )
    if snapshot.silence:
        yield Text(printable(f"  {brief(snapshot.silence)}"), "yellow")
    yield from _failures(snapshot)


def _is_active(counts: Mapping[str, int]) -> bool:
    return any(counts.get(state) for state in ACTIVE)


def _counted(counts: Mapping[str, int], width: int) -> Iterator[Text]:
    known = [state for state in _STATES if counts.get(state)]
    others = sorted(state for state, count in counts.items() if count and state not in _STATES)
    line = Text()
    for state in [*known, *others]:
        part = Text(f"{counts[state]} {printable(state)}", STATUS_STYLE.get(state, ""))
        if line and len(line) + len(part) + 2 > width:
            yield line.append(",")
            line = Text()
        line = line.append(", " if line else "  ").append_text(part)
    yield line


def _arrays(arrays: Sequence[ArrayLook], width: int, ascii_only: bool) -> Iterator[Text]:
    """A row per array: what it is, a bar, done of all, what its runs take."""
    names = [_name(array) for array in arrays]
    ends = [_ending(array) for array in arrays]
    if _room(names, ends, width) < _NARROWEST_BAR:
        # The time that runs take is the first to go, then the end of the names.
        ends = [text.partition("  ")[0] for text in ends]
    if (lacking := _NARROWEST_BAR - _room(names, ends, width)) > 0:
        longest = max(max(map(len, names)) - lacking, 1)
        names = [name[:longest] for name in names]
    room = max(1, min(_room(names, ends, width), _WIDEST_BAR))
    column = max(map(len, names))
    for array, name, ending in zip(arrays, names, ends, strict=True):
        line = Text("  ").append(name.ljust(column)).append("  ").append_text(_bar(array.counts, room, ascii_only))
        yield line.append("  ").append(ending)


def _room(names: Sequence[str], ends: Sequence[str], width: int) -> int:
    """What is left for the bars."""
    return width - max(map(len, names)) - max(map(len, ends)) - 6


def _name(array: ArrayLook) -> str:
    if not array.name:
        return "not submitted"
    shape = array.shape
    what = ""
    if shape is not None:
        nodes = f"{shape.nodes} node{'s' if shape.nodes > 1 else ''}"
        what = f"  {nodes}, {shape.ranks} rank{'s' if shape.ranks > 1 else ''}"
        what += f", {shape.partition}" if shape.partition else ""
    return printable(f"{array.name}{what}" + (f"  job {array.job_id}" if array.job_id else ""))


def _ending(array: ArrayLook) -> str:
    total = sum(array.counts.values())
    left = sum(array.counts.get(state, 0) for state in (*ACTIVE, "planned"))
    took = duration(array.timed)
    return f"{total - left}/{total}" + (f"  {_took(took)}" if took else "")


def _took(took: Duration) -> str:
    return f"{_calm(took.median_s)} a run{_between(took.low_s, took.high_s)}"


def _between(low_s: float, high_s: float) -> str:
    low, high = _calm(low_s), _calm(high_s)
    return f" ({low} to {high})" if low != high else ""


def _bar(counts: Mapping[str, int], width: int, ascii_only: bool) -> Text:
    """``width`` cells shared out by state; a state that has a run has a cell where there is room."""
    total = sum(counts.values())
    good, running = counts.get("ok", 0), counts.get("running", 0)
    open_ = sum(counts.get(state, 0) for state in ("pending", "waiting", "planned"))
    parts = [good, total - good - running - open_, running, open_]
    cells = _shared_out(parts, width)
    bar = Text()
    for block, style, count in zip(_ASCII if ascii_only else _BLOCKS, _STYLES, cells, strict=True):
        bar.append(block * count, style)
    return bar


def _shared_out(parts: Sequence[int], width: int) -> list[int]:
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


def _figures(snapshot: Snapshot) -> Iterator[str]:
    found = end(snapshot)
    if found is not None:
        until = _clock(snapshot.now_unix_s + found.left_s, found.left_s)
        yield f"about {_calm(found.left_s)} left{_between(found.low_s, found.high_s)}, until {until}"
        yield f"  {found.basis}"
    elif not snapshot.counts.get("running"):
        yield "nothing runs now: when it will end cannot be told"
    else:
        yield "no run has ended yet: when the last one will cannot be told"
    rate, spent = runs_per_hour(snapshot), cost(snapshot)
    parts = [f"{rate[0]:.{0 if rate[0] >= 10 else 1}f} runs an hour over the last {rate[1]}"] if rate else []
    if spent.used or spent.left:
        left = f", about {_number(spent.left)} left" if spent.left is not None else ""
        parts.append(f"{_number(spent.used)} node-hours in runs{left}")
    if parts:
        yield "; ".join(parts)


def _failures(snapshot: Snapshot) -> Iterator[Text]:
    if not snapshot.failures:
        return
    shown = len(snapshot.failures)
    title = f"last {shown} of {snapshot.failed}" if shown < snapshot.failed else f"{shown}"
    yield Text()
    yield Text(f"  {title} that did not end well", "bold")
    for failed in snapshot.failures:
        yield from _failed(failed)


def _failed(failed: FailedRun) -> Iterator[Text]:
    style = STATUS_STYLE.get(failed.state, "")
    at = f"  {_clock(failed.ended_unix_s, 0.0)}" if failed.ended_unix_s else ""
    line = Text("  ").append(printable(failed.state), style).append(f"{at}  {printable(failed.label)}")
    yield line
    first = brief(failed.reason.strip().partition("\n")[0])
    if first:
        yield Text(printable(f"    {first}"))
    yield Text(printable(f"    hpcbench logs {printable(failed.run_id[:_ID_DIGITS])}"), "dim")


def _calm(seconds: float) -> str:
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


def _clock(unix_s: float, ahead_s: float) -> str:
    """The time of day here, to the minute; with the date where it is a day or more away."""
    return time.strftime("%m-%d %H:%M" if ahead_s >= 86400 else "%H:%M", time.localtime(unix_s))


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
