"""``make bench``: every benchmark, or those that are named (``make bench ONLY="loop spatial"``), as one table."""

from __future__ import annotations

import json
import subprocess
import sys

from rich.console import Console
from rich.table import Table

_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
_FOUR = [*_TORCHRUN[:-2], "--nproc-per-node=4", "-m"]
BENCHMARKS = {
    "startup": [sys.executable, "-m", "benchmarks.startup"],
    "scale": [sys.executable, "-m", "benchmarks.scale"],
    "collection": [sys.executable, "-m", "benchmarks.collection"],
    "submit": [sys.executable, "-m", "benchmarks.submit"],
    "recommend": [sys.executable, "-m", "benchmarks.recommend"],
    "loop": [*_TORCHRUN, "benchmarks.loop_cost"],
    "strategies": [*_TORCHRUN, "benchmarks.strategies_cost"],
    "pipelines": [*_TORCHRUN, "benchmarks.pipelines", "peers"],
    "bubbles": [*_FOUR, "benchmarks.pipelines", "bubbles"],
    "spatial": [*_TORCHRUN, "benchmarks.spatial_cost"],
    "tensor": [*_TORCHRUN, "benchmarks.tensor_cost"],
    "channels": [*_TORCHRUN, "benchmarks.channels_cost"],
    "pipedream": [*_TORCHRUN, "benchmarks.pipedream"],
    "megatron": [sys.executable, "-m", "benchmarks.oracle.megatron"],
}


def main() -> int:
    table = Table("benchmark", "figure", "measured", "goal", "")
    failed = False
    for name in sys.argv[1:] or BENCHMARKS:
        command = BENCHMARKS[name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            failed = True
            table.add_row(name, "did not finish", done.stderr.strip().splitlines()[-1], "", "")
            continue
        for row in json.loads(done.stdout.strip().splitlines()[-1]):
            met = {True: "met", False: "missed", None: ""}[row["met"]]
            table.add_row(name, row["figure"], row["measured"], row["goal"], met)
    Console(width=120).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
