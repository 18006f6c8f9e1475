"""The committed pages of a rerun: its report, its plots, its tables and its data, all made by the commands of users."""

from __future__ import annotations

from pathlib import Path

from benchmarks.testbed import CLUSTER, Testbed

HERE = Path(__file__).resolve().parents[2] / "docs" / "reruns"
_PLOTS = ("throughput", "scaling", "parts", "memory", "predicted")
_TABLES = {
    "throughput": ("samples_per_s", ()),
    "memory": ("peak_memory_bytes", ()),
    "seconds": ("step_time_s,compute_s,exposed_comm_s", ("--where", "devices == 4")),
}
"""Metric and selection of further tables: a column for each strategy."""
_LAYOUTS = {"ddlbench-small": "ddlbench", "paradl-small": "paradl"}


def write(bed: Testbed, sweep: str) -> None:
    """Into ``docs/reruns``; what cannot be drawn from these results is said and left out."""
    HERE.mkdir(exist_ok=True)
    one = ("--cluster", CLUSTER)
    bed.output("report", sweep, *one, "--predict", "--out", f"{HERE}/{sweep}.html")
    bed.output("table", sweep, *one, "--out", f"{HERE}/{sweep}.parquet")
    bed.output("table", sweep, *one, "--layout", _LAYOUTS[sweep], "--out", f"{HERE}/{sweep}-paper.md")
    for name, (metric, chosen) in _TABLES.items():
        by = ("--by", "model,dataset,devices", "--pivot", "strategy", "--metric", metric, *chosen)
        bed.output("table", sweep, *one, *by, "--out", f"{HERE}/{sweep}-{name}.md")
    bed.output("validate", sweep, *one, "--out", f"{HERE}/{sweep}-oracle.json")
    for kind in _PLOTS:
        predicted = ("--predict",) if kind in ("scaling", "predicted") else ()
        bed.hpcbench("plot", kind, sweep, *one, *predicted, "--out", f"{HERE}/{sweep}-{kind}.svg")
    for command in ("report", "validate"):
        (HERE / f"{sweep}-{command}.txt").write_bytes(bed.output(command, sweep, *one))
