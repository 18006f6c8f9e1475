"""Draw the live screen of a synthetic sweep. Run by ``make reference``."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console, Group

from hpcbench.report.live_screen import live_screen_lines
from hpcbench.submit.watcher import ArrayShape, ArraySnapshot, FailedRun, SweepSnapshot, TimedRun

PICTURE = Path(__file__).resolve().parent / "pictures" / "live.svg"
NOW_UNIX_S = 1_800_000_000.0
WIDTH = 88


def under_way() -> SweepSnapshot:
    """A sweep over 1, 2 and 4 nodes in the middle of its second array."""
    shapes = [ArrayShape(nodes, 4 * nodes, "gpu") for nodes in (1, 2, 4)]
    first = ArraySnapshot(
        name="scaling-0001/0",
        job_id="81234",
        shape=shapes[0],
        counts={"ok": 24},
        timed=timed(24, 110, NOW_UNIX_S - 900),
    )
    second = ArraySnapshot(
        name="scaling-0001/1",
        job_id="81235",
        shape=shapes[1],
        counts={"ok": 10, "oom": 1, "running": 3, "pending": 10},
        timed=timed(11, 130, NOW_UNIX_S - 20),
        running_since_unix_s=tuple(NOW_UNIX_S - age_s for age_s in (20, 60, 110)),
    )
    third = ArraySnapshot(name="scaling-0001/2", job_id="81236", shape=shapes[2], counts={"pending": 24})
    reason = "rank 3 asked for 2.0 GiB of 40 GiB, 38.9 GiB were in use"
    failed = FailedRun("8ed186a7785cdcbe", "oom", "ddp on 8 ranks, vgg16, batch 512", reason, NOW_UNIX_S - 480)
    return SweepSnapshot(
        sweep="scaling",
        cluster="my-cluster",
        now_unix_s=NOW_UNIX_S,
        arrays=(first, second, third),
        failures=(failed,),
        failed=1,
    )


def timed(runs: int, took_s: float, last_s: float) -> tuple[TimedRun, ...]:
    """Runs that ended every 75 s, of slightly different length."""
    ends = [last_s - 75.0 * back for back in reversed(range(runs))]
    return tuple(TimedRun(end_s - took_s - 6 * (number % 4), end_s) for number, end_s in enumerate(ends))


def main() -> None:
    """Write ``docs/pictures/live.svg``, without the fonts that it would fetch."""
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, highlight=False, markup=False)
    console.print(Group(*live_screen_lines([under_way()], WIDTH)))
    drawn = console.export_svg(title="hpcbench status --watch", unique_id="live")
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
