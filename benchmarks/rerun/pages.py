"""The committed pages of a rerun: its report, its plots, its tables and its data, all made by the commands of users."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rerun import figures
from benchmarks.testbed import CLUSTER, Testbed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reruns.md"
_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
HERE = Path(__file__).resolve().parents[2] / "docs" / "reruns"
_PLOTS = ("throughput", "scaling", "parts", "memory", "predicted")
_TABLES = {
    "throughput": ("samples_per_s",),
    "memory": ("peak_memory_bytes",),
    "seconds": ("step_time_s,compute_s,exposed_comm_s", "--where", "devices == 4"),
}
"""Metric and options of further tables: a column for each strategy."""
_LAYOUTS = {"ddlbench-small": "ddlbench", "paradl-small": "paradl"}


def write(bed: Testbed, sweep: str) -> None:
    """Into ``docs/reruns``; what cannot be drawn from these results is said and left out.

    Predictions in them are made from the rerun's calibrations, and moved by its other results.
    """
    HERE.mkdir(exist_ok=True)
    # Not committed: a page of some megabytes.
    one = ("--cluster", CLUSTER)
    bed.output("report", sweep, *one, "--predict", "--out", f"{HERE}/{sweep}.html")
    bed.output("table", sweep, *one, "--out", f"{HERE}/{sweep}.parquet")
    bed.output("table", sweep, *one, "--layout", _LAYOUTS[sweep], "--out", f"{HERE}/{sweep}-paper.md")
    for name, (metric, *chosen) in _TABLES.items():
        by = ("--by", "model,dataset,devices", "--pivot", "strategy", "--metric", metric)
        bed.output("table", sweep, *one, *chosen, *by, "--out", f"{HERE}/{sweep}-{name}.md")
    for kind in _PLOTS:
        predicted = ("--predict",) if kind in ("scaling", "predicted") else ()
        bed.hpcbench("plot", kind, sweep, *one, *predicted, "--out", f"{HERE}/{sweep}-{kind}.svg")
    (HERE / f"{sweep}-report.txt").write_bytes(bed.output("report", sweep, *one))


def blocks_of(sweep: str, rows: Sequence[figures.Row], documents: Mapping[str, Any]) -> dict[str, str]:
    """Tables by their name on the page."""
    found = {
        "accuracy": figures.accuracy(documents),
        "choices": figures.choices(documents),
        "fastest": figures.fastest(rows),
    }
    layout = figures.families_on_two if sweep == "ddlbench-small" else figures.strategies_by_model
    found |= {"time": layout(rows, figures.TIME), "memory": layout(rows, figures.MEMORY)}
    if sweep == "ddlbench-small":
        found["scale"] = figures.families_at_scale(rows)
    return {f"{sweep}-{name}": text for name, text in found.items()}


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """``page`` with ``blocks`` in their places, which must be there; other places stay as they are."""
    places = [found[2] for found in _BLOCK.finditer(page)]
    missing = sorted(set(blocks) - set(places))
    assert not missing, f"the page has no place for {', '.join(missing)}"
    return _BLOCK.sub(lambda one: f"{one[1]}\n{blocks[one[2]]}\n\n{one[3]}" if one[2] in blocks else one[0], page)
