"""``make rerun-ddlbench``, ``make rerun-paradl``: a paper's matrix on the SLURM box, from sbatch to pages.

    python -m benchmarks.rerun ddlbench          run it, interrupted once in the middle, check it, write its pages
    python -m benchmarks.rerun ddlbench check    only look at what is there
    python -m benchmarks.rerun ddlbench pages    only write docs/reruns/

Needs the SLURM box, so root. Results lie under ``--work``, which may be that of the oracle's score: its calibration is
then used for what is predicted, else the one that the last score was made with. What is done stays; without
``--no-interruption`` the sweep is stopped when half of it is done, and submitted again.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from benchmarks.oracle import cases, figures
from benchmarks.rerun import check, fits, pages
from benchmarks.testbed import CLUSTER, RATE_MBIT, Testbed
from hpcbench.results.results_tree import ResultsTree

_LOOK_S = 5.0


def run(bed: Testbed, sweep: str, interrupted: bool) -> None:
    """The sweep, to its end."""
    bed.at(RATE_MBIT)
    path = str(check.SWEEPS / f"{sweep}.toml")
    begin = time.monotonic()
    if interrupted and _stopped_half_way(bed, sweep, path):
        print(f"interrupted after {(time.monotonic() - begin) / 60:.0f} min; submitted again", flush=True)
    # After no interruption it finds everything done.
    bed.hpcbench("run", path, "--cluster", CLUSTER)
    print(f"{sweep}: {(time.monotonic() - begin) / 60:.0f} min in all", flush=True)


def _stopped_half_way(bed: Testbed, sweep: str, path: str) -> bool:
    """Ctrl-C and a cancel in the middle of it; false where it was over before."""
    tree = ResultsTree(bed.results).cluster(CLUSTER)
    results = [tree.result_path(run_id) for run_id in check.planned(bed, sweep).runs]
    command = bed.start("run", path, "--cluster", CLUSTER)
    while command.poll() is None:
        time.sleep(_LOOK_S)
        if sum(path.exists() for path in results) >= len(results) / 2:
            command.send_signal(signal.SIGINT)
            command.wait()
            bed.hpcbench("cancel", sweep, "--cluster", CLUSTER, "--wait")
            return True
    return False


def main() -> int:
    """All of it, or a part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rerun", description=__doc__)
    parser.add_argument("paper", choices=("ddlbench", "paradl"))
    parser.add_argument("part", nargs="?", choices=("all", "check", "pages"), default="all")
    parser.add_argument("--work", type=Path, default=Path(".rerun"), help="(default: %(default)s)")
    parser.add_argument("--no-interruption", action="store_true")
    given = parser.parse_args()
    # A shell's background jobs ignore Ctrl-C, and so would what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    bed, sweep = Testbed(given.work), f"{given.paper}-small"
    if given.part == "all":
        run(bed, sweep, not given.no_interruption)
    else:
        bed.describe(RATE_MBIT)
    if given.part in ("all", "pages"):
        fits.lend(ResultsTree(bed.results).cluster(CLUSTER))
        pages.write(bed, sweep)
        cases.write(sweep)
        figures.main([])
    return check.show(bed, sweep)


if __name__ == "__main__":
    sys.exit(main())
