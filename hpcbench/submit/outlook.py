"""What the oracle says of a plan: the node-hours that it will probably take, and the runs that will not fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hpcbench.config.spec import RunSpec, label
from hpcbench.oracle.answers import Unpriced, need_and_limit
from hpcbench.oracle.predict import Prediction
from hpcbench.parallel.check import model_folder
from hpcbench.results.store import ClusterTree
from hpcbench.submit.forecast import Forecast
from hpcbench.submit.plan import Plan

MOST_PRICED = 1000
"""Configurations of a plan that are priced, the first ones: a plan is looked at often and must stay quick."""


@dataclass
class Outlook:
    """Predictions by ``run_id``."""

    forecast: Forecast
    found: dict[str, Prediction] = field(default_factory=dict)
    run_time_s: dict[str, float] = field(default_factory=dict)
    """Of one launch, at most to its time limit."""
    unpriced: Counter[str] = field(default_factory=Counter)
    """Runs by the reason why nothing is said of them."""

    def node_hours(self, runs: dict[str, RunSpec]) -> float | None:
        """What those of ``runs`` that are priced will probably take; ``None`` where none is."""
        priced = [spec.nodes * self.run_time_s[key] for key, spec in runs.items() if key in self.run_time_s]
        return sum(priced) / 3600 if priced else None

    def left_s(self, runs: dict[str, RunSpec], cores: int) -> float | None:
        """How long this machine's ``cores`` will take for ``runs``; ``None`` where one of them is not priced."""
        if not runs or any(key not in self.run_time_s for key in runs):
            return None
        work = sum(self.run_time_s[key] * min(spec.ranks, cores) for key, spec in runs.items())
        return max(work / cores, *(self.run_time_s[key] for key in runs))

    def unfit(self, runs: dict[str, RunSpec]) -> list[str]:
        """Those of ``runs`` that will probably not fit into memory."""
        return [key for key in runs if key in self.found and self.found[key].fits is False]

    def warnings(self, runs: dict[str, RunSpec]) -> list[str]:
        """Runs that will not fit, with what they need and what there is; and those that nothing is said of."""
        lines = []
        large = self.unfit(runs)
        if large:
            key = max(large, key=lambda one: self.found[one].peak_memory_bytes)
            worst = self.found[key]
            need, limit = need_and_limit(worst.peak_memory_bytes, worst.memory_limit_bytes or 0)
            lines.append(
                f"{len(large)} of {len(runs)} will probably not fit into memory, by the oracle: {label(runs[key])} "
                f"needs {need} a rank, there is {limit} (predict shows each)"
            )
        # Counted over all runs of the sweep, those with a result among them.
        total = sum(self.unpriced.values())
        if total:
            reason, count = self.unpriced.most_common(1)[0]
            more = f", {count} of them: " if count < total else ": "
            lines.append(f"nothing is predicted for {total} runs{more}{reason}")
        return lines


def outlook(plan: Plan, tree: ClusterTree) -> Outlook:
    """The runs of ``plan``, priced by ``tree``'s calibrations. Nothing is measured for it, and it never fails."""
    made = Outlook(Forecast(plan.profile, tree, model_folder(plan.sweep, plan.profile), python=None, forgiving=True))
    for key, spec in plan.runs.items():
        found = made.forecast.of(spec, quick=True, most=MOST_PRICED)
        if isinstance(found, Unpriced):
            made.unpriced[found.reason] += 1
            continue
        made.found[key] = found
        made.run_time_s[key] = min(made.forecast.launch_s(spec, found), plan.shape(spec).time_limit_s)
    return made
