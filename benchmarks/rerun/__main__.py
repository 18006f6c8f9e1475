"""``make rerun-ddlbench``, ``make rerun-paradl``: a paper's matrix on the SLURM box, from calibration to pages.

    python -m benchmarks.rerun ddlbench          measure it and score the oracle on it, check it, write its pages
    python -m benchmarks.rerun ddlbench check    only look at what is there
    python -m benchmarks.rerun ddlbench pages    only write build/reruns/ and the tables of the pages

Needs the SLURM box, so root. The first is ``python -m benchmarks.oracle.score ddlbench`` with all its steps, whose
predictions are then in no commit before the runs; calling its steps one by one registers them. What is done stays.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.oracle import figures, score
from benchmarks.oracle.registered import RERUNS, SCORES
from benchmarks.rerun import check, pages


def main() -> int:
    """Do all parts, or one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rerun", description=__doc__)
    parser.add_argument("paper", choices=RERUNS)
    parser.add_argument("part", nargs="?", choices=("all", "check", "pages"), default="all")
    parser.add_argument("--work", type=Path, help="folder of profile and results (default: .oracle-PAPER)")
    arguments = parser.parse_args()
    paper = SCORES[arguments.paper]
    bed, sweep = paper.bed(arguments.work or Path(f".oracle-{paper.name}")), f"{paper.name}-small"
    if arguments.part == "all":
        steps: list[Callable[[], int]] = [
            lambda: score.calibrate(bed, paper),
            lambda: score.probe(bed, paper),
            lambda: score.predict(bed, paper),
            lambda: score.measure(bed, paper, minutes=240),
            lambda: score.write_cases(bed, paper),
        ]
        for step in steps:
            if (code := step()) > score.SOME_FAILED:
                return code
    bed.describe(paper.scored_mbit)
    if arguments.part in ("all", "pages"):
        pages.write(bed, sweep)
        figures.main([])
    return check.show(bed, sweep)


if __name__ == "__main__":
    sys.exit(main())
