"""Predictions for the runs of a sweep, each configuration once, and the forecast of a plan: node-hours and runs that
do not fit.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import RunSpec, run_label
from hpcbench.errors import HpcbenchError
from hpcbench.forecast.layer_table_cache import load_layer_table
from hpcbench.oracle.calibration.calibration_store import machine_for
from hpcbench.oracle.machine import Machine, emulating_machine
from hpcbench.oracle.peak_memory import MemoryBreakdown
from hpcbench.oracle.prediction import (
    MemoryFit,
    NotPredicted,
    Prediction,
    format_need_and_limit,
    peak_rank_memory,
    predict,
)
from hpcbench.parallel.catalog import STRATEGIES, shipped_model_entries
from hpcbench.parallel.check_names import custom_model_folder
from hpcbench.parallel.layer_table import LayerTable, LayerTableRequest
from hpcbench.parallel.resolve import table_exclusion_reason
from hpcbench.parallel.workloads import DATASETS, is_custom_model
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import SweepPlan, available_cores
from hpcbench.submit.submission import emulated_machine

_PredictionT = TypeVar("_PredictionT", Prediction, MemoryBreakdown)

STARTUP_S = {"cpu": 15.0, "cuda": 45.0}
"""From a launch to its first step, and from its last step to the next launch: interpreters, libraries, the model, the
first call of every kernel. A usual time; nothing is measured for it."""

MAX_DEVICES, MAX_MICRO_BATCHES = 10_000_000, 20_000
"""What is priced at most: results that somebody else has written may say anything."""

_FORMULA_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError,
)  # fmt: skip

_PRICED_FIELDS = attrgetter(
    "model", "dataset", "input_size", "strategy", "batch_size", "nodes", "tasks_per_node", "devices_per_task",
    "micro_batches", "dp_degree", "tp_degree", "sp_degree", "pp_degree", "precision", "compile",
    "activation_checkpointing", "channels_last", "optimizer", "momentum", "data", "partition", "rehearse",
)  # fmt: skip
"""What a step's time and memory depend on, beside the options: runs that differ in nothing else are alike."""


class Forecast:
    """What the oracle says of runs on one cluster. Remembers what it was asked."""

    def __init__(
        self,
        profile: ClusterProfile,
        tree: ClusterTree | None = None,
        model_folder: Path | None = None,
        python: str | None = sys.executable,
        *,
        forgiving: bool = False,
    ) -> None:
        """``tree`` is the cluster's, for its calibrations.

        ``forgiving`` makes a hole in a formula a reason, for who looks at more than predictions; else it is raised.
        ``python`` makes tables of layers that are neither shipped nor cached; ``None`` leaves their runs unpriced.
        """
        self.profile, self._tree, self._python = _with_local_hardware(profile), tree, python
        self._forgiving = forgiving
        self._model_folder = str(model_folder.resolve()) if model_folder else None
        self._tables: dict[Any, LayerTable | NotPredicted] = {}
        self._machines: dict[tuple[str | None, int, str | None], Machine] = {}
        self._plain: dict[int, Machine] = {}
        self._held: dict[Any, MemoryBreakdown | NotPredicted] = {}
        self._found: dict[Any, Prediction | NotPredicted] = {}

    def predict(self, spec: RunSpec, *, quick: bool = False, most: int | None = None) -> Prediction | NotPredicted:
        """The prediction for ``spec``, or why there is none; beyond ``most`` different ones none is made.

        ``quick``: where the machine was fitted its interval is not worked out anew for every number that is uncertain.
        """
        try:
            machine = self.machine(spec)
        except HpcbenchError as error:
            return NotPredicted(error.message)
        if quick and machine.posterior is not None:
            machine = self._without_posterior(machine)
        key = (*_configuration_key(spec), machine.posterior is None)
        found = self._found.get(key)
        if found is None:
            if most is not None and len(self._found) >= most:
                return NotPredicted(f"more than {most} different ones")
            found = self._found[key] = self._priced(spec, machine)
        return found

    def run_time_s(self, spec: RunSpec) -> float | None:
        """How long a launch takes, its start included; evaluation, checks and the queue are not. ``None``: unknown."""
        found = self.predict(spec, quick=True)
        return None if isinstance(found, NotPredicted) else self.launch_s(spec, found)

    def launch_s(self, spec: RunSpec, found: Prediction) -> float:
        """As ``run_time_s``, by the run's prediction."""
        steps = spec.warmup_steps + spec.steps + spec.profile_steps
        return STARTUP_S[self.profile.device] + steps * found.step_time_s

    def machine(self, spec: RunSpec) -> Machine:
        """What times on the run's nodes are made of."""
        key = (spec.partition, spec.tasks_per_node, spec.rehearse)
        if key not in self._machines:
            here = machine_for(self.profile, self._tree, *key[:2])
            self._machines[key] = here if spec.rehearse is None else self._rehearsing(here, spec.rehearse)
        return self._machines[key]

    def _rehearsing(self, here: Machine, cluster: str) -> Machine:
        """``ConfigError`` where nobody knows that cluster."""
        return emulating_machine(here, emulated_machine(cluster, self._tree))

    def _without_posterior(self, machine: Machine) -> Machine:
        # Clocks know machines by their parts: one copy of each is enough.
        if id(machine) not in self._plain:
            self._plain[id(machine)] = msgspec.structs.replace(machine, posterior=None)
        return self._plain[id(machine)]

    def machines(self) -> list[Machine]:
        """Those that have been asked for."""
        return list(self._machines.values())

    def table(self, spec: RunSpec) -> LayerTable | NotPredicted:
        """The table of the run's layers."""
        key = (spec.model, spec.dataset, spec.input_size, _hashable_options(spec.model_options))
        if key not in self._tables:
            request = LayerTableRequest(
                model=spec.model,
                dataset=spec.dataset,
                input_size=spec.input_size,
                # Dropout's probability changes no shape.
                model_options={name: value for name, value in spec.model_options.items() if name != "dropout"},
                model_folder=self._model_folder if is_custom_model(spec.model) else None,
            )
            self._tables[key] = self._table(request)
        return self._tables[key]

    def _table(self, request: LayerTableRequest) -> LayerTable | NotPredicted:
        """What somebody else's result names is looked up; a module of theirs is never run."""
        own = is_custom_model(request.model)
        if (not own and request.model not in shipped_model_entries()) or request.dataset not in DATASETS:
            return NotPredicted(f"there is no model {request.model!r:.60} here that takes {request.dataset!r:.60}")
        try:
            return load_layer_table(request, None if own and self._model_folder is None else self._python)
        except HpcbenchError as error:
            return NotPredicted(error.message)

    def memory_fit(self, spec: RunSpec) -> MemoryFit | NotPredicted:
        """What the fullest rank holds, and how much there is."""
        held = self._fullest(spec)
        if isinstance(held, NotPredicted):
            return held
        try:
            machine = self.machine(spec)
        except HpcbenchError as error:
            return NotPredicted(error.message)
        limit = None if machine.memory_bytes is None else round(machine.memory_bytes)
        return MemoryFit(held.total_bytes + round(machine.base_bytes), limit)

    def _fullest(self, spec: RunSpec) -> MemoryBreakdown | NotPredicted:
        key = _configuration_key(spec)
        if key not in self._held:
            self._held[key] = self._told(spec, lambda table: peak_rank_memory(spec, table, self.profile.device))
        return self._held[key]

    def _priced(self, spec: RunSpec, machine: Machine) -> Prediction | NotPredicted:
        held = self._fullest(spec)
        if isinstance(held, NotPredicted):
            return held
        return self._told(spec, lambda table: predict(spec, table, machine, memory=held))

    def _told(self, spec: RunSpec, tell: Callable[[LayerTable], _PredictionT]) -> _PredictionT | NotPredicted:
        if spec.strategy not in STRATEGIES or STRATEGIES[spec.strategy].cost is None:
            return NotPredicted(f"the oracle has no formulas for {spec.strategy!r:.60}")
        if spec.devices > MAX_DEVICES or spec.micro_batches > MAX_MICRO_BATCHES:
            return NotPredicted(f"more than {MAX_DEVICES:,} devices or {MAX_MICRO_BATCHES:,} micro_batches")
        table = self.table(spec)
        if isinstance(table, NotPredicted):
            return table
        if is_custom_model(spec.model) and (reason := table_exclusion_reason(spec, table)):
            return NotPredicted(reason)
        try:
            return tell(table)
        except HpcbenchError as error:
            return NotPredicted(error.message)
        except _FORMULA_ERRORS as error:
            if not self._forgiving:
                raise
            # A hole in a formula must not keep anybody from planning or looking at the other runs.
            return NotPredicted(f"the oracle's formulas fail: {type(error).__name__}: {error}")


def _with_local_hardware(profile: ClusterProfile) -> ClusterProfile:
    """``profile`` with what there is here, where jobs run here and it does not say."""
    if profile.scheduler.kind != "local":
        return profile
    node = profile.node
    here = {
        "cores": node.cores or available_cores(),
        "memory_bytes": node.memory_bytes or psutil.virtual_memory().total,
    }
    return profile.model_copy(update={"node": node.model_copy(update=here)})


def _configuration_key(spec: RunSpec) -> Any:
    return _PRICED_FIELDS(spec), _hashable_options(spec.options), _hashable_options(spec.model_options)


def _hashable_options(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(options.items())) if options else ()


MAX_PRICED_CONFIGURATIONS = 1000
"""Configurations of a plan that are priced, the first ones: a plan is looked at often and must stay quick."""


@dataclass
class PlanForecast:
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

    def remaining_s(self, runs: dict[str, RunSpec], cores: int) -> float | None:
        """How long this machine's ``cores`` will take for ``runs``; ``None`` where one of them is not priced."""
        if not runs or any(key not in self.run_time_s for key in runs):
            return None
        work = sum(self.run_time_s[key] * min(spec.ranks, cores) for key, spec in runs.items())
        return max(work / cores, *(self.run_time_s[key] for key in runs))

    def not_fitting(self, runs: dict[str, RunSpec]) -> list[str]:
        """Those of ``runs`` that will probably not fit into memory."""
        return [key for key in runs if key in self.found and self.found[key].fits is False]

    def warnings(self, runs: dict[str, RunSpec]) -> list[str]:
        """Runs that will not fit, with what they need and what there is; and those that nothing is said of."""
        lines = []
        large = self.not_fitting(runs)
        if large:
            key = max(large, key=lambda one: self.found[one].peak_memory_bytes)
            worst = self.found[key]
            need, limit = format_need_and_limit(worst.peak_memory_bytes, worst.memory_limit_bytes or 0)
            lines.append(
                f"{len(large)} of {len(runs)} will probably not fit into memory, by the oracle: {run_label(runs[key])} "
                f"needs {need} a rank, there is {limit} (predict shows each)"
            )
        # Counted over all runs of the sweep, those with a result among them.
        total = sum(self.unpriced.values())
        if total:
            reason, count = self.unpriced.most_common(1)[0]
            more = f", {count} of them: " if count < total else ": "
            lines.append(f"nothing is predicted for {total} runs{more}{reason}")
        return lines


def forecast_plan(plan: SweepPlan, tree: ClusterTree) -> PlanForecast:
    """The runs of ``plan``, priced by ``tree``'s calibrations. Nothing is measured for it, and it never fails."""
    made = PlanForecast(
        Forecast(plan.profile, tree, custom_model_folder(plan.sweep, plan.profile), python=None, forgiving=True)
    )
    for key, spec in plan.runs.items():
        found = made.forecast.predict(spec, quick=True, most=MAX_PRICED_CONFIGURATIONS)
        if isinstance(found, NotPredicted):
            made.unpriced[found.reason] += 1
            continue
        made.found[key] = found
        made.run_time_s[key] = min(made.forecast.launch_s(spec, found), plan.shape(spec).time_limit_s)
    return made
