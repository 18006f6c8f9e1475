"""The committed pages of a rerun: its report, its plots, its tables and its data, all made by the commands of users."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.testbed import CLUSTER, Testbed

HERE = Path(__file__).resolve().parents[2] / "docs" / "reruns"
_PLOTS = ("throughput", "scaling", "parts", "memory", "predicted")
_LAYOUTS = {"ddlbench-small": "ddlbench", "paradl-small": "paradl"}


def write(bed: Testbed, sweep: str) -> None:
    """Into ``docs/reruns``; what cannot be drawn from these results is said and left out."""
    HERE.mkdir(exist_ok=True)
    one = ("--cluster", CLUSTER)
    _must(bed, "report", sweep, *one, "--predict", "--out", f"{HERE}/{sweep}.html")
    _must(bed, "table", sweep, *one, "--out", f"{HERE}/{sweep}.parquet")
    _must(bed, "table", sweep, *one, "--layout", _LAYOUTS[sweep], "--out", f"{HERE}/{sweep}.md")
    _must(bed, "validate", sweep, *one, "--out", f"{HERE}/{sweep}-oracle.json")
    for kind in _PLOTS:
        predicted = ("--predict",) if kind in ("scaling", "predicted") else ()
        bed.hpcbench("plot", kind, sweep, *one, *predicted, "--out", f"{HERE}/{sweep}-{kind}.svg")
    for command in (("report",), ("validate",)):
        text = HERE / f"{sweep}-{command[0]}.txt"
        text.write_bytes(_output(bed, *command, sweep, *one))


def _must(bed: Testbed, *arguments: str) -> None:
    if code := bed.hpcbench(*arguments):
        raise SystemExit(f"hpcbench {' '.join(arguments)} ended with {code}")


def _output(bed: Testbed, *arguments: str) -> bytes:
    command = [sys.executable, "-m", "hpcbench", *arguments, "--results", str(bed.results)]
    return subprocess.run(command, cwd=bed.work, stdout=subprocess.PIPE, check=True).stdout
