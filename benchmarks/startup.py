"""Start-up of ``hpcbench --help`` against a bare interpreter, in turn. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.ratios import median_interval

RUNS = 25
GOAL_RATIO = 0.10 / 0.013
"""0.10 s where a bare interpreter takes 0.013 s: JUBE, the fastest peer, takes 0.10 s there."""


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    ours = [str(Path(sys.executable).with_name("hpcbench")), "--help"]
    bare = [sys.executable, "-c", "pass"]
    for command in (ours, bare):
        seconds(command)
    pairs = [(seconds(ours), seconds(bare)) for _ in range(RUNS)]
    ratio, low, high = median_interval([one / other for one, other in pairs])
    times = [statistics.median(column) for column in zip(*pairs, strict=True)]
    measured = f"{ratio:.1f} [{low:.1f} {high:.1f}] ({times[0] * 1e3:.0f} ms over {times[1] * 1e3:.0f} ms)"
    row = {
        "figure": "hpcbench --help over python -c pass", "measured": measured,
        "goal": f"at most {GOAL_RATIO:.1f}", "met": ratio <= GOAL_RATIO,
    }  # fmt: skip
    print(json.dumps([row]))


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
