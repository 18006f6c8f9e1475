"""The report of a day: what ran for the first time, what failed, predictions against measurements by term."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_day.loops import LoopFigures
from benchmarks.gpu_day.machines import device_key
from benchmarks.gpu_day.outputs import REPORT, DayFiles, read_day
from benchmarks.gpu_day.parts import day_parts
from benchmarks.gpu_day.predictions import Expectation, read_predictions
from benchmarks.gpu_day.preflight import machine_lines
from benchmarks.gpu_day.status import status_lines
from hpcbench.config.run_spec import config_id, run_label
from hpcbench.fileio import printable_text, write_atomic
from hpcbench.results.schema import STATUS_OK, RunResult
from hpcbench.units import format_bytes, format_percent, format_seconds

MAX_LOOP_RATIO = 1.01
"""Goal of the ratio of hpcbench's step to that of a plain loop."""
_MAX_MESSAGE = 300


def write_report(folder: Path) -> None:
    """Write ``report.md`` from the other files of ``folder``."""
    day = read_day(folder)
    write_atomic(folder / REPORT, ("\n".join(report_lines(day)) + "\n").encode())


def report_lines(day: DayFiles) -> Iterator[str]:
    """Return the lines of the report, in Markdown."""
    expected = read_predictions().get(device_key(day.device) or "", {})
    yield f"# A day on {cell(day.device)}"
    yield ""
    for line in machine_lines(day.machine):
        yield f"- {cell(line)}"
    yield from ["", "## Runs", "", *_run_lines(day)]
    yield from ["", "## What failed", "", *(_failure_lines(day) or ["Nothing."])]
    yield from ["", "## What ran for the first time", "", *status_lines([day])]
    yield from ["", "## Predictions against measurements", "", *_step_lines(day, expected)]
    yield from ["", "## Training loops", "", *_loop_lines(day.loops)]
    yield from ["", "## One real rank among ranks that do not exist", "", *_shard_lines(day, expected)]


def cell(text: str) -> str:
    """Return ``text`` for a cell of a table: one line, nothing that Markdown or a terminal would obey."""
    plain = printable_text(" ".join(text.split()))
    for character in "\\|<>`*_[]":
        plain = plain.replace(character, "\\" + character)
    return plain if len(plain) <= _MAX_MESSAGE else plain[:_MAX_MESSAGE] + "..."


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table; without rows a sentence."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ["None."]
    return ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings), *lines]


def _run_lines(day: DayFiles) -> list[str]:
    rows = []
    for part in day_parts(day.machine.size, large_memory=False):
        results = day.of_part(part.name)
        counts = Counter(result.status for result in results)
        verified = sum(result.verification is not None and result.verification.passed for result in results)
        other = ", ".join(f"{count} {status}" for status, count in counts.items() if status != STATUS_OK)
        rows.append([
            part.name, part.title, str(len(part.points)), str(counts[STATUS_OK]), str(verified), other or "-",
            str(max(0, len(part.points) - len(results))),
        ])  # fmt: skip
    return table(("part", "", "runs", "ok", "verified", "else", "not reached"), rows)


def _failure_lines(day: DayFiles) -> list[str]:
    """Return a line for each reason, with the runs that ended by it."""
    runs: dict[str, list[str]] = {}
    for result in day.results:
        if result.status != STATUS_OK:
            error = result.error
            why = f"{error.type}: {error.message}" if error is not None else "no reason"
            # Which rank and host failed first is chance.
            why = re.sub(r"rank \d+ on [\w.-]+: ", "", why)
            runs.setdefault(f"{result.status}: {cell(why)}", []).append(
                f"{result.sweep.removeprefix('gpu-day-')}: {_label(result)}"
            )
    lines = [f"- {why}: {'; '.join(labels)}" for why, labels in runs.items()]
    lines += [f"- unreadable: {cell(problem)}" for problem in day.problems]
    lines += [f"- loops: {cell(run_label(each.spec))}: {cell(each.error)}" for each in day.loops if each.error]
    lines += [f"- shards: {cell(run_label(shard.spec))}: {cell(shard.error)}" for shard in day.shards if shard.error]
    return lines


def _label(result: RunResult) -> str:
    spec = result.spec
    more: list[str] = [spec.precision]
    more += [name for name in ("compile", "channels_last") if getattr(spec, name)]
    return cell(f"{run_label(spec)}, {', '.join(more)}")


def _step_lines(day: DayFiles, expected: dict[str, Expectation]) -> list[str]:
    """Return each configuration's step and its terms beside their predictions."""
    rows, errors, held = [], [], 0
    for result in day.of_part("singles"):
        metrics, entry = result.metrics, expected.get(config_id(result.spec))
        step = metrics.step_time_s
        if step is None:
            continue
        syncs: dict[str, Any] = next((rank["host_syncs"] for rank in result.ranks if rank.get("host_syncs")), {})
        prediction = entry.step if entry is not None else None
        predicted = "-"
        if prediction is not None:
            interval = prediction.interval
            errors.append(abs(step.median / prediction.step_time_s - 1))
            held += interval.low <= step.median <= interval.high
            predicted = (
                f"{format_seconds(prediction.step_time_s)} "
                f"[{format_seconds(interval.low)}, {format_seconds(interval.high)}]"
            )
        peak = metrics.steady_peak_memory_bytes or metrics.peak_memory_bytes
        rows.append([
            _label(result), predicted, format_seconds(step.median),
            _pair(prediction.compute_s if prediction else None, metrics.compute_s, format_seconds),
            _pair(prediction.peak_memory_bytes if prediction else None, peak, format_bytes),
            format_bytes(entry.dry_run_bytes) if entry is not None and entry.dry_run_bytes else "-",
            _pair(entry.dry_run_operators if entry else None, syncs.get("launches"), str),
            str(syncs.get("per_step", "-")),
            prediction.bound_by if prediction is not None else "-",
            format_percent(metrics.mfu, 1) if metrics.mfu is not None else "-",
        ])  # fmt: skip
    headings = (
        "configuration", "step predicted [90 %]", "measured", "compute: predicted, measured",
        "memory: predicted, measured", "dry run", "operators: dry run, launches", "host waits",
        "bound by, predicted", "MFU",
    )  # fmt: skip
    lines = table(headings, rows)
    if errors:
        lines += [
            "",
            f"Median error of the step {format_percent(median(errors))}; {held} of {len(errors)} intervals held.",
        ]
    return lines


def _pair(predicted: float | None, measured: float | None, write: Callable[[Any], str]) -> str:
    return ", ".join("-" if value is None else write(value) for value in (predicted, measured))


def _loop_lines(configurations: Iterable[LoopFigures]) -> list[str]:
    rows = []
    for figures in configurations:
        loops = {loop.loop: loop for loop in figures.loops}
        own = loops.pop("hpcbench", None)
        for loop in loops.values() if own is not None else []:
            assert own is not None, "checked above"
            ratio = own.seconds / loop.seconds
            verdict = "within the goal" if ratio <= MAX_LOOP_RATIO else f"above the goal of {MAX_LOOP_RATIO:g}"
            rows.append([
                cell(run_label(figures.spec)), f"{loop.loop} ({cell(loop.model)})", format_seconds(own.seconds),
                format_seconds(loop.seconds), f"{ratio:.3f}", verdict,
            ])  # fmt: skip
    return table(("run", "other loop", "hpcbench", "other", "ratio", ""), rows)


def _shard_lines(day: DayFiles, expected: dict[str, Expectation]) -> list[str]:
    rows = []
    for shard in day.shards:
        entry = expected.get(config_id(shard.spec))
        rows.append([
            cell(f"{run_label(shard.spec)}, rank {shard.rank}"),
            _pair(entry.dry_run_bytes if entry else None, shard.peak_bytes, format_bytes),
            _pair(None, shard.reserved_bytes, format_bytes).removeprefix("-, "),
            _pair(entry.dry_run_operators if entry else None, shard.launches, str),
            "-" if shard.host_syncs is None else str(shard.host_syncs),
        ])  # fmt: skip
    return table(("run", "peak: dry run, measured", "reserved", "operators: dry run, launches", "waits"), rows)
