"""A tree of 100,000 results: read without an index, through it, and after a few were added, against a bare walk.

Every command is a process of its own, as a user starts it; the files are in the page cache for all of them. Prints one
line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import Measured, timed
from benchmarks.ratios import median_interval
from benchmarks.results_tree import write_results
from hpcbench.results.index import INDEX_FILE_NAME

RESULTS = 100_000
ADDED = 100
ROUNDS = 5
GOAL_COLD = 1.5
GOAL_WARM = 0.3
GOAL_ADDED = 0.1
"""Of the floor. The results are 0.001 of it; but a hundred lie in about 80 of the 256 folders, and of every other run
there one asks whether its result is still the same."""
GOAL_MB = 500


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "made-up"
        write_results(tree, count)
        measured = [_round(tree, count + number * ADDED) for number in range(rounds)]
    print(json.dumps(_rows(measured, count)))


def _round(tree: Path, first: int) -> dict[str, Measured]:
    table = [sys.executable, "-m", "hpcbench", "table", str(tree), "--by", "strategy", "--pivot", "nodes"]
    (tree / INDEX_FILE_NAME).unlink(missing_ok=True)
    found = {"floor": timed([sys.executable, "-m", "benchmarks.results_floor", str(tree)])}
    found["cold"] = timed(table)
    timed(table)
    found["warm"] = timed(table)
    write_results(tree, ADDED, first)
    found["added"] = timed(table)
    return found


def _rows(measured: list[dict[str, Measured]], count: int) -> list[dict[str, object]]:
    floors = [one["floor"] for one in measured]
    added = [
        (one["added"].seconds - one["warm"].seconds) / floor.seconds
        for one, floor in zip(measured, floors, strict=True)
    ]
    peak_mb = max(one[name].peak_mib for one in measured for name in ("cold", "warm", "added")) * 1.048576
    what = f"{count:,} results over a bare walk and msgspec's decoding"
    return [
        _ratio(measured, "cold", f"a grouped table of {what}, without an index", GOAL_COLD),
        _ratio(measured, "warm", f"a grouped table of {what}, through the index", GOAL_WARM),
        _row(f"what {ADDED} new results add to that, over the floor", added, "", GOAL_ADDED),
        {
            "figure": f"peak memory at {count:,} results",
            "measured": f"{peak_mb:.0f} MB", "goal": f"under {GOAL_MB} MB", "met": peak_mb < GOAL_MB,
        },
    ]  # fmt: skip


def _ratio(measured: list[dict[str, Measured]], name: str, figure: str, goal: float) -> dict[str, object]:
    ratios = [one[name].seconds / one["floor"].seconds for one in measured]
    seconds, floor_s, cpu_s, floor_cpu_s = (
        statistics.median(values)
        for values in (
            [one[name].seconds for one in measured], [one["floor"].seconds for one in measured],
            [one[name].cpu_s for one in measured], [one["floor"].cpu_s for one in measured],
        )
    )  # fmt: skip
    more = f" ({seconds:.2f} s over {floor_s:.2f} s; processor time {cpu_s:.2f} s over {floor_cpu_s:.2f} s)"
    return _row(figure, ratios, more, goal)


def _row(figure: str, ratios: list[float], more: str, goal: float) -> dict[str, object]:
    ratio, low, high = median_interval(ratios)
    return {
        "figure": figure, "measured": f"{ratio:.2f} [{low:.2f} {high:.2f}]{more}", "goal": f"at most {goal}",
        "met": ratio <= goal,
    }  # fmt: skip


if __name__ == "__main__":
    main()
