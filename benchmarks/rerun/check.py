"""Whether a rerun matrix is complete, and what is wrong with what is not."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.testbed import CLUSTER, Testbed
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import STATUS_OK, RunResult
from hpcbench.submit.plan import SweepPlan, make_plan
from hpcbench.units import format_percent

SWEEPS = Path(__file__).resolve().parents[2] / "sweeps"
_LEAST_OK = 0.95
_KNOWN_FAILURES = ("resnet152", "mobilenetv2")
"""Models that DDLBench's pipelines could not run."""


class Cell(NamedTuple):
    """A run of the plan and what became of it."""

    spec: RunSpec
    result: RunResult | None

    @property
    def is_ok(self) -> bool:
        """Whether it ran to its end."""
        return self.result is not None and self.result.status == STATUS_OK

    @property
    def learned(self) -> bool | None:
        """Whether its loss fell; ``None`` where nothing is known of it."""
        loss = self.result.metrics.loss if self.result is not None else None
        if loss is None or loss.first is None or loss.last is None:
            return None
        return loss.last < loss.first


def planned(bed: Testbed, sweep: str) -> SweepPlan:
    """The sweep on the box; run from its project folder."""
    os.chdir(bed.work)
    profile, _ = load_cluster(CLUSTER)
    return make_plan(load_sweep(SWEEPS / f"{sweep}.toml"), profile, ResultsTree(bed.results).cluster(CLUSTER))


def cells(bed: Testbed, sweep: str) -> list[Cell]:
    """Every run of the plan, in its order."""
    tree = ResultsTree(bed.results).cluster(CLUSTER)
    return [Cell(spec, tree.read_result(run_id)) for run_id, spec in planned(bed, sweep).runs.items()]


def faults(found: Iterable[Cell]) -> Iterator[str]:
    """Return the differences of the matrix from its paper's."""
    every = list(found)
    if not every:
        yield "no run is planned"
        return
    share = sum(cell.is_ok for cell in every) / len(every)
    if share < _LEAST_OK:
        least = format_percent(_LEAST_OK)
        yield f"{format_percent(share, 1)} of {len(every)} cells are ok, at least {least} are required"
    for strategy, own in _grouped(every).items():
        known = [cell.learned for cell in own if cell.is_ok and cell.learned is not None]
        if not any(cell.is_ok for cell in own):
            yield f"{strategy}: no cell is ok"
        elif sum(known) * 2 < len(known) or not known:
            yield f"{strategy}: the loss falls in {sum(known)} of {len(known)} cells"
    for model in _KNOWN_FAILURES:
        broken = [cell for cell in every if cell.spec.model == model and not cell.is_ok]
        if broken:
            yield f"{model}: {len(broken)} cells are not ok, the first: {_label(broken[0])}"


def show(bed: Testbed, sweep: str) -> int:
    """Counts, every cell that is not ok with its reason, and a verdict; 1 where something is wrong."""
    found, console = cells(bed, sweep), Console()
    counts = Counter("missing" if cell.result is None else cell.result.status for cell in found)
    console.print(f"{sweep}: {len(found)} cells: " + ", ".join(f"{many} {status}" for status, many in counts.items()))
    console.print(_by_strategy(found))
    for cell in found:
        if not cell.is_ok:
            console.print(f"{_label(cell)}: {_reason(cell)}", highlight=False, markup=False)
    wrong = list(faults(found))
    for line in wrong:
        console.print(f"FAULT {line}", highlight=False, markup=False)
    return 1 if wrong else 0


def _by_strategy(found: Iterable[Cell]) -> Table:
    table = Table("strategy", "cells", "ok", "loss falls", "devices", box=None)
    for strategy, rows in _grouped(found).items():
        fine = [cell for cell in rows if cell.is_ok]
        scales = sorted({cell.spec.devices for cell in fine})
        fell = sum(bool(cell.learned) for cell in fine)
        table.add_row(strategy, str(len(rows)), str(len(fine)), str(fell), ", ".join(map(str, scales)))
    return table


def _grouped(found: Iterable[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in found:
        groups[cell.spec.strategy].append(cell)
    return groups


def _label(cell: Cell) -> str:
    spec = cell.spec
    return f"{spec.strategy}, {spec.model} on {spec.dataset}, {spec.devices} devices"


def _reason(cell: Cell) -> str:
    if cell.result is None:
        return "no result"
    error = cell.result.error
    return f"{cell.result.status}: {error.message if error is not None else 'no reason given'}"
