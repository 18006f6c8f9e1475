"""Megatron-LM's published times and memory beside the oracle's: ``python -m benchmarks.oracle.megatron``.

``megatron.toml`` holds the runs and what is publicly known of the parts; nothing is fitted to the runs.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.oracle.megatron_run import MegatronCostModel, step_of_run
from benchmarks.oracle.megatron_runs import Published, Recompute, held, machine, plan_of, published
from benchmarks.oracle.megatron_table import Gpt, kept_in_block
from hpcbench.predict.cost_model import StepBreakdown
from hpcbench.predict.prediction import bottleneck
from hpcbench.units import format_percent

_GIB = 2**30
GOAL_MEAN, GOAL_WORST = 0.05, 0.10


class Row(NamedTuple):
    """A published time beside the predicted one."""

    run: Published
    recompute: Recompute
    published_s: float
    step: StepBreakdown

    @property
    def error(self) -> float:
        """Signed, relative to what was published."""
        return self.step.step_time_s / self.published_s - 1.0


class Amount(NamedTuple):
    """A published amount beside the predicted one."""

    run: str
    kind: str
    case: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Signed, relative to what was published."""
        return self.predicted / self.published - 1.0


def times(runs: Sequence[Published] | None = None) -> Iterator[Row]:
    """Every published time, or those of ``runs``."""
    found = machine()
    peak = found.compute.peak_flops_per_s["bf16"]
    recomputed: tuple[Recompute, ...] = ("full", "selective")
    for run in published() if runs is None else runs:
        for recompute in recomputed:
            seconds = run.published_s(recompute, peak)
            if seconds is not None:
                plan = plan_of(run, recompute)
                yield Row(run, recompute, seconds, step_of_run(MegatronCostModel(found, plan.spec), plan, run.overlaps))


def amounts() -> Iterator[Amount]:
    """Every published amount of memory. The papers leave the embedding out: a middle stage has none."""
    runs = {run.name: run for run in published() if run.source == "korthikanti"}
    for name, one in held().items():
        run = runs[name]
        stages = {"of the first stage": 0, "of a middle stage": run.pp // 2 * run.tp}
        for which, rank in stages.items():
            gib = plan_of(run, "none", rank).state_bytes() / _GIB
            yield Amount(name, f"states {which}", "", one.states_gib, gib)
        for recompute, published_gib in one.activations_gib.items():
            plan = plan_of(run, recompute)
            gib = plan.alive_bytes(plan.actions) / _GIB
            yield Amount(name, "activations", recompute, published_gib, gib)
        gpt = Gpt(run.layers, run.width, run.heads)
        for what, percent in one.left_percent.items():
            yield Amount(name, "activations left", what, percent, 100 * left(gpt, run.tp, what))


def left(gpt: Gpt, ranks: int, what: str) -> float:
    """Return the share of a block's activations that ``what`` leaves (Korthikanti et al. 2022, table 2)."""
    whole = _kept_bytes(gpt, ranks, by_tokens=False)
    if what == "full":
        return 2 * gpt.numbers / whole
    chosen = gpt._replace(selective=what in ("core", "both"))
    return _kept_bytes(chosen, ranks, by_tokens=what in ("by_tokens", "both")) / whole


def _kept_bytes(gpt: Gpt, ranks: int, by_tokens: bool) -> float:
    rows = kept_in_block(gpt).values()
    split, whole = sum(row.split for row in rows), sum(row.whole for row in rows)
    return (split + whole) / ranks if by_tokens else split / ranks + whole


def summary(errors: Sequence[float]) -> tuple[float, float]:
    """Mean and worst of absolute values."""
    found = [abs(error) for error in errors]
    return statistics.fmean(found), max(found)


def main() -> int:
    found, memory = list(times()), list(amounts())
    console = Console(width=140, stderr=True)
    table = Table("run", "source", "devices", "recomputed", "published s", "predicted s", "error", "bound by")
    for row in found:
        table.add_row(
            row.run.name, row.run.source, str(row.run.devices), row.recompute, f"{row.published_s:.2f}",
            f"{row.step.step_time_s:.2f}", format_percent(row.error, 1, sign='+'), bottleneck(row.step),
        )  # fmt: skip
    console.print(table)
    table = Table("run", "memory", "case", "published", "predicted", "error")
    for one in memory:
        table.add_row(
            one.run,
            one.kind,
            one.case,
            f"{one.published:.2f}",
            f"{one.predicted:.2f}",
            format_percent(one.error, 2, sign="+"),
        )
    console.print(table)
    print(json.dumps([*_time_figures(found), *_memory_figures(memory)]))
    return 0


def _time_figures(found: Sequence[Row]) -> Iterator[dict[str, Any]]:
    groups = {
        "Korthikanti's table 5": [row.error for row in found if row.run.source == "korthikanti"],
        "Korthikanti's abstract": [row.error for row in found if row.run.source == "korthikanti, abstract"],
        "Narayanan's table 1": [row.error for row in found if row.run.source == "narayanan"],
        "all": [row.error for row in found],
    }
    for name, errors in groups.items():
        mean, worst = summary(errors)
        yield {
            "figure": f"error of an iteration's time, {name} ({len(errors)} rows)",
            "measured": f"mean {format_percent(mean, 1)}, worst {format_percent(worst, 1)}",
            "goal": f"mean {format_percent(GOAL_MEAN)}, worst {format_percent(GOAL_WORST)}",
            "met": mean <= GOAL_MEAN and worst <= GOAL_WORST,
        }


def _memory_figures(found: Sequence[Amount]) -> Iterator[dict[str, Any]]:
    for kind in dict.fromkeys(one.kind for one in found):
        errors = [one.error for one in found if one.kind == kind]
        mean, worst = summary(errors)
        yield {
            "figure": f"error of memory, {kind} ({len(errors)} rows)",
            "measured": f"mean {format_percent(mean, 2)}, worst {format_percent(worst, 2)}",
            "goal": "",
            "met": None,
        }


if __name__ == "__main__":
    sys.exit(main())
