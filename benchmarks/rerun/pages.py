"""The report, plots, tables and data of a rerun, all made by the commands of users, and the tables of its page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rerun import figures
from benchmarks.testbed import CLUSTER, Testbed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "rerun" / "README.md"
_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
BUILT = ROOT / "build" / "reruns"
"""Files that the commands make again; they are not committed."""
_PLOTS = ("throughput", "scaling", "parts", "memory", "predicted")
_TABLES = {
    "throughput": ("samples_per_s",),
    "memory": ("peak_memory_bytes",),
    "seconds": ("step_time_s,compute_s,exposed_comm_s", "--where", "devices == 4"),
}
"""Metric and options of further tables: a column for each strategy."""
_LAYOUTS = {"ddlbench-small": "ddlbench", "paradl-small": "paradl"}


def write(bed: Testbed, sweep: str) -> None:
    """Write the data to commit beside this file, and everything else into ``build/reruns``.

    Predictions are made from the rerun's calibrations, and moved by its other results. A plot that these results do not
    allow is reported and left out.
    """
    BUILT.mkdir(parents=True, exist_ok=True)
    one = ("--cluster", CLUSTER)
    bed.output("table", sweep, *one, "--out", str(data_of(sweep)))
    bed.output("report", sweep, *one, "--predict", "--out", f"{BUILT}/{sweep}.html")
    bed.output("table", sweep, *one, "--layout", _LAYOUTS[sweep], "--out", f"{BUILT}/{sweep}-paper.md")
    for name, (metric, *chosen) in _TABLES.items():
        by = ("--by", "model,dataset,devices", "--pivot", "strategy", "--metric", metric)
        bed.output("table", sweep, *one, *chosen, *by, "--out", f"{BUILT}/{sweep}-{name}.md")
    for kind in _PLOTS:
        predicted = ("--predict",) if kind in ("scaling", "predicted") else ()
        bed.hpcbench("plot", kind, sweep, *one, *predicted, "--out", f"{BUILT}/{sweep}-{kind}.svg")
    (BUILT / f"{sweep}-report.txt").write_bytes(bed.output("report", sweep, *one))


def data_of(sweep: str, root: Path = ROOT) -> Path:
    """Return the committed table of a rerun's results."""
    return root / "benchmarks" / "rerun" / f"{sweep}.parquet"


def measured_blocks(sweep: str, rows: Sequence[figures.Row]) -> dict[str, str]:
    """Return the tables of measurements by their name on the page."""
    layout = figures.families_on_two if sweep == "ddlbench-small" else figures.strategies_by_model
    found = {
        "time": layout(rows, figures.TIME),
        "fastest": figures.fastest(rows),
        "memory": layout(rows, figures.MEMORY),
    }
    if sweep == "ddlbench-small":
        found["scale"] = figures.families_at_scale(rows)
    return {f"{sweep}-{name}": text for name, text in found.items()}


def score_blocks(sweep: str, documents: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of predictions by their name on the page of the oracle's figures."""
    return {f"{sweep}-accuracy": figures.accuracy(documents), f"{sweep}-choices": figures.choices(documents)}


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """``page`` with ``blocks`` in their places, which must be there; other places stay as they are."""
    places = [found[2] for found in _BLOCK.finditer(page)]
    missing = sorted(set(blocks) - set(places))
    assert not missing, f"the page has no place for {', '.join(missing)}"
    return _BLOCK.sub(lambda one: f"{one[1]}\n{blocks[one[2]]}\n\n{one[3]}" if one[2] in blocks else one[0], page)
