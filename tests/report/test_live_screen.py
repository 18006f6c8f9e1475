"""The live screen as text, at the widths of terminals, and what it says where little is known."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcbench.report.live_screen import live_screen_lines
from hpcbench.submit.watcher import ArrayShape, ArraySnapshot, FailedRun, SweepSnapshot, TimedRun

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def timed(runs: int, took_s: float, last_unix_s: float) -> tuple[TimedRun, ...]:
    """One ended every minute; every third took four seconds longer, the last one failed."""
    ends = [(last_unix_s - 60 * back, back) for back in reversed(range(runs))]
    return tuple(TimedRun(end - took_s - 4 * (back % 3 == 1), end, back != 0) for end, back in ends)


def busy() -> SweepSnapshot:
    gpu = ArrayShape(2, 8, "gpu")
    return SweepSnapshot(
        sweep="box",
        cluster="slurmbox",
        now_unix_s=NOW,
        arrays=(
            ArraySnapshot(
                name="box-0001/0", job_id="4711", shape=ArrayShape(1, 1), counts={"ok": 12}, timed=timed(12, 70, NOW - 1800)
            ),
            ArraySnapshot(
                name="box-0001/1",
                job_id="4712",
                shape=gpu,
                counts={"ok": 20, "failed": 3, "oom": 1, "running": 4, "pending": 32},
                timed=timed(24, 95, NOW - 20),
                running_since_unix_s=(NOW - 10, NOW - 30, NOW - 50, NOW - 80),
            ),
            ArraySnapshot(name="box-0001/2", shape=gpu, counts={"waiting": 60}),
            ArraySnapshot(counts={"planned": 6}),
        ),
        failures=(
            FailedRun(
                "8ed186a7785cdcbe", "failed", "ddp on 8 ranks, resnet18, batch 64",
                "CUDA error: an illegal memory access was encountered\nsecond line", NOW - 300,
            ),
            FailedRun(
                "9ed186a7785cdcbe", "oom", "zero1 on 8 ranks, resnet18, batch 4096",
                "out of memory: wanted 12 GiB of 11 GiB on rank 3 while the others had almost nothing", NOW - 100,
            ),
        ),
        failed=4,
        silence="the scheduler does not answer: squeue: Socket timed out",
    )  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_is_the_golden_one(width: int) -> None:
    text = "".join(f"{line.plain}\n" for line in live_screen_lines([busy()], width))
    path = GOLDEN / f"live-{width}.txt"
    if os.environ.get("HPCBENCH_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [200, 80, 40, 20, 5, 1])
def test_no_line_is_wider_than_the_terminal_and_ascii_is_ascii(width: int) -> None:
    lines = [line.plain for line in live_screen_lines([busy()], width, ascii_only=True)]
    assert max(map(len, lines)) <= width
    assert "".join(lines).isascii()


def test_equal_snapshots_are_equal_lines_also_a_second_later() -> None:
    def moved(seconds: float) -> SweepSnapshot:
        look = busy()
        return SweepSnapshot(
            sweep=look.sweep, cluster=look.cluster, now_unix_s=NOW + seconds, arrays=look.arrays,
            failures=look.failures, failed=look.failed,
        )  # fmt: skip

    assert live_screen_lines([moved(0)], 80) == live_screen_lines([moved(0)], 80)
    differing = [
        (one.plain, other.plain)
        for one, other in zip(live_screen_lines([moved(0)], 80), live_screen_lines([moved(1)], 80), strict=True)
        if one != other
    ]
    assert [words for words in differing if "runs an hour" not in words[0]] == []


def lines_of(*arrays: ArraySnapshot, **fields: object) -> list[str]:
    look = SweepSnapshot(sweep="s", cluster="c", now_unix_s=NOW, arrays=arrays, **fields)  # type: ignore[arg-type]
    return [line.plain for line in live_screen_lines([look], 80)]


def test_an_unknown_end_gives_no_estimate() -> None:
    queued = lines_of(ArraySnapshot(name="s-0001/0", shape=ArrayShape(1, 2), counts={"pending": 3}))
    assert "  nothing runs now: the end is unknown" in queued
    begun = lines_of(ArraySnapshot(name="s-0001/0", shape=ArrayShape(1, 2), counts={"running": 1, "pending": 3}))
    assert "  no run has ended yet: the end is unknown" in begun
    assert not any("left" in line or "hour" in line for line in [*queued, *begun])


def test_a_prediction_from_outside_is_used_until_runs_have_ended() -> None:
    queued = ArraySnapshot(name="s-0001/0", shape=ArrayShape(1, 2), counts={"pending": 3})
    found = lines_of(queued, predicted_s=1800.0)
    assert ("  about 30 min left, until 08:30" in found, "    predicted" in found) == (True, True)


def test_a_sweep_that_has_ended_is_its_counts_and_its_failures() -> None:
    failed = FailedRun("8ed186a7785cdcbe", "failed", "", "", None)
    done = ArraySnapshot(name="s-0001/0", shape=ArrayShape(1, 2), counts={"ok": 2, "failed": 1})
    assert lines_of(done, failures=(failed,), failed=1) == [
        "s on c: 3 runs",
        "  2 ok, 1 failed",
        "",
        "  1 that did not end well",
        "  failed  ",
        "    hpcbench logs 8ed186a7785c",
    ]


def test_few_arrays_stay_in_their_order_and_of_many_the_active_ones_come_first() -> None:
    done = [ArraySnapshot(name=f"s-0001/{number}", shape=ArrayShape(1, 1), counts={"ok": 1}) for number in range(12)]
    active = ArraySnapshot(name="s-0002/0", shape=ArrayShape(1, 1), counts={"running": 1})
    few = [line.split()[0] for line in lines_of(*done[:3], active)[2:6]]
    assert few == ["s-0001/0", "s-0001/1", "s-0001/2", "s-0002/0"]
    found = lines_of(*done, active)
    assert found[2].startswith("  s-0002/0  1 node, 1 rank")
    assert "  and 5 more arrays with 5 runs" in found


def test_hostile_names_are_shown_without_escape_codes() -> None:
    failed = FailedRun("8ed186a7785cdcbe", "failed", "[red]x[/] \x1b[2J on 2 ranks", "\x1b]0;title\x07 no", NOW)
    array = ArraySnapshot(name="s-0001/0", shape=ArrayShape(1, 1, "\x1b[31mgpu"), counts={"running": 1, "failed": 1})
    text = "\n".join(lines_of(array, failures=(failed,), failed=1))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]x[/]" in text
