"""Predictions for the runs of a sweep, each configuration once, and the forecast of a plan: node-hours and runs that
do not fit.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.command import Command, CommandLayout
from hpcbench.config.run_spec import RunSpec, config_id, run_label
from hpcbench.errors import HpcbenchError
from hpcbench.fileio import printable_excerpt
from hpcbench.predict.calibration.calibration_store import (
    calibration_of_partition,
    environment_notes,
    machine_for,
    read_calibrations,
)
from hpcbench.predict.command_layouts import recorded_layouts
from hpcbench.predict.decoder.site import Site
from hpcbench.predict.fitted_decoders import (
    PricedCommand,
    by_published_runs,
    predict_command,
    price_command,
)
from hpcbench.predict.layer_table_cache import load_layer_table
from hpcbench.predict.machine import Machine, assumed_link_notes
from hpcbench.predict.measured_factors import MeasuredFactors
from hpcbench.predict.measured_results import learn_commands, learn_factors, results_of_partition
from hpcbench.predict.peak_memory import MemoryBreakdown
from hpcbench.predict.prediction import (
    MemoryFit,
    NotPredicted,
    Prediction,
    correct_prediction,
    format_need_and_limit,
    peak_rank_memory,
    predict,
)
from hpcbench.predict.strategy_cost import count_operators, find_cost
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.timing_statistics import OPERATOR_S
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.check_sweep import custom_model_folder
from hpcbench.strategies.layer_table import LayerTable, LayerTableRequest
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point, table_exclusion_reason
from hpcbench.submit.plan import SweepPlan, available_cores
from hpcbench.units import format_seconds, pluralize
from hpcbench.workloads.datasets import DATASETS
from hpcbench.workloads.models import MODELS, is_custom_model

_PredictionT = TypeVar("_PredictionT", Prediction, MemoryBreakdown)

STARTUP_S = {"cpu": 15.0, "cuda": 45.0}
"""Seconds of a launch outside its steps, by device: interpreters, libraries, the model, the first call of every
kernel. A typical time, not a measured one."""

MAX_DEVICES, MAX_MICRO_BATCHES = 10_000_000, 20_000
"""Largest run that is predicted: results from other people may hold any number."""
MAX_PRICED_CONFIGURATIONS = 1000
"""Configurations of a plan that are predicted, the first ones: `plan` must stay quick."""

_PRICED_FIELDS = attrgetter(
    "model", "dataset", "input_size", "strategy", "batch_size", "nodes", "tasks_per_node", "devices_per_task",
    "micro_batches", "dp_degree", "tp_degree", "sp_degree", "pp_degree", "precision", "compile",
    "activation_checkpointing", "channels_last", "optimizer", "momentum", "data", "partition", "command_digest",
)  # fmt: skip
"""Parameters that determine a step's time and memory, with the options: runs that agree in them share a prediction."""


class Forecast:
    """Predictions for runs on one cluster; each configuration is computed once.

    Example:
        >>> from hpcbench.config.cluster_profile import load_cluster
        >>> profile, _ = load_cluster("abci-v100")
        >>> Forecast(profile).predict(spec).step_time_s > 0
        True
    """

    def __init__(
        self,
        profile: ClusterProfile,
        tree: ClusterTree | None = None,
        model_folder: Path | None = None,
        python: str | None = sys.executable,
        *,
        untrusted: bool = False,
        command: Command | None = None,
    ) -> None:
        """Set the sources of a forecast.

        Args:
            profile: The cluster's profile.
            tree: The cluster's results, for its calibrations.
            model_folder: Folder of custom models; without one their code is never run.
            python: Interpreter that measures layer tables that are neither shipped nor cached; ``None``: runs with
                these models are not predicted.
            untrusted: The runs come from results files of other people. A run that no sweep can contain is then not
                predicted.
            command: The command whose runs are predicted; those of other commands have the layouts in ``tree``.
        """
        self.profile, self._tree, self._python = _with_local_hardware(profile), tree, python
        self._untrusted, self._command = untrusted, command
        self._model_path = model_folder
        self._model_folder = str(model_folder.resolve()) if model_folder else None
        self._tables: dict[Any, LayerTable | NotPredicted] = {}
        self._machines: dict[tuple[str | None, int], Machine] = {}
        self._memory: dict[Any, MemoryBreakdown | NotPredicted] = {}
        self._predictions: dict[Any, Prediction | NotPredicted] = {}
        self._factors: dict[str | None, MeasuredFactors] = {}
        self._sites: dict[str | None, Site] = {}
        self._environment_notes: list[str] = []

    def predict(self, spec: RunSpec, *, limit: int | None = None, held_out: bool = False) -> Prediction | NotPredicted:
        """Predict step time and memory of a run, or return the reason why that is not possible.

        Args:
            spec: The run.
            limit: Predict at most so many different configurations.
            held_out: Leave the results of the run's own configuration out, as every score must.
        """
        if spec.workload == "command":
            return self._predict_command(spec, limit, held_out)
        prediction = self.predict_alone(spec, limit=limit)
        if isinstance(prediction, NotPredicted) or self._tree is None:
            return prediction
        learned = self._measured_factors(spec.partition).learned(spec, config_id(spec), held_out=held_out)
        return prediction if learned is None else correct_prediction(prediction, learned)

    def _measured_factors(self, partition: str | None) -> MeasuredFactors:
        """Factors on the predictions of trainings on a partition, from the tree's results."""
        if partition not in self._factors:
            # Other people's models are never imported, and nothing is measured for their tables.
            tree, command = self._tree, self._command
            assert tree is not None, "only a tree has results"
            alone = Forecast(self.profile, tree, self._model_path, python=None, untrusted=True, command=command)
            stored, _ = read_calibrations(tree, self.profile.name)
            results = results_of_partition(tree, self.profile, partition)
            calibration = calibration_of_partition(stored, self.profile, partition)
            self._environment_notes += environment_notes(calibration, results)
            trainings = [result for result in results if result.spec.workload != "command"]
            self._factors[partition] = learn_factors(stored, trainings, alone.predict_alone)
        return self._factors[partition]

    def predict_alone(self, spec: RunSpec, *, limit: int | None = None) -> Prediction | NotPredicted:
        """Predict as ``predict``, from the machine's numbers alone."""
        try:
            machine = self.machine(spec)
        except HpcbenchError as error:
            return NotPredicted(error.message)
        key = _configuration_key(spec)
        if key not in self._predictions:
            if limit is not None and len(self._predictions) >= limit:
                return NotPredicted(f"more than {limit} different ones")
            self._predictions[key] = self._predict_training(spec, machine)
        return self._predictions[key]

    def _predict_training(self, spec: RunSpec, machine: Machine) -> Prediction | NotPredicted:
        memory = self._peak_memory(spec)
        if isinstance(memory, NotPredicted):
            return memory
        return self._apply(spec, lambda table: self._price(spec, table, machine, memory))

    @cached_property
    def _layouts(self) -> dict[str, CommandLayout]:
        """The declared layouts of commands, by digest."""
        known = {} if self._tree is None else recorded_layouts(self._tree)
        if self._command is not None and self._command.layout is not None:
            known[self._command.digest] = self._command.layout
        return known

    def has_formulas(self, spec: RunSpec) -> bool:
        """Whether the oracle prices such runs: a strategy's formulas, or the layout that a command declares."""
        if spec.workload == "command":
            return spec.command_digest in self._layouts
        return has_cost(spec)

    def price_command(self, spec: RunSpec) -> PricedCommand | NotPredicted:
        """Return the decoder, layout and machine that price a command's run, or the reason why none does."""
        if not self.has_formulas(spec):
            return NotPredicted("the oracle prices a command only by its layout: declare it in [command.layout]")
        try:
            return price_command(spec, self._layouts[spec.command_digest], self.profile)
        except HpcbenchError as error:
            return NotPredicted(f"{error.message} ({error.where})" if error.where else error.message)

    def _predict_command(self, spec: RunSpec, limit: int | None, held_out: bool) -> Prediction | NotPredicted:
        key = (config_id(spec), held_out)
        if key not in self._predictions:
            if limit is not None and len(self._predictions) >= limit:
                return NotPredicted(f"more than {limit} different ones")
            priced, site = self.price_command(spec), self.site(spec.partition)
            if held_out:
                site = site.without(config_id(spec))
            self._predictions[key] = (
                priced if isinstance(priced, NotPredicted) else predict_command(priced, site, config_id(spec))
            )
        return self._predictions[key]

    def site(self, partition: str | None) -> Site:
        """Return what commands with a declared layout, measured on a partition, show of the cluster."""
        if partition not in self._sites:
            results = [] if self._tree is None else results_of_partition(self._tree, self.profile, partition)
            self._sites[partition] = learn_commands(results, self.price_command, self.profile, partition)
        return self._sites[partition]

    def site_notes(self) -> list[str]:
        """Return a note on each measured command that contradicts the others of its partition."""
        return [
            f"{printable_excerpt(run.label)} took {ratio:.2f} times as long as the cluster's other runs predict: "
            "measure it again, or correct its layout"
            for site in self._sites.values()
            for run, ratio in site.contradictions()
        ]

    def _price(self, spec: RunSpec, table: LayerTable, machine: Machine, memory: MemoryBreakdown) -> Prediction:
        prediction = predict(spec, table, machine, memory=memory)
        return by_published_runs(prediction, spec, self.profile, machine)

    def launch_s(self, spec: RunSpec, prediction: Prediction) -> float:
        """Seconds of one launch, its start included, without evaluation, checks and the time in the queue."""
        steps = spec.warmup_steps + spec.steps + spec.profile_steps
        return STARTUP_S[self.profile.device] + steps * prediction.step_time_s

    def machine(self, spec: RunSpec) -> Machine:
        """The machine parameters for the run's nodes."""
        key = (spec.partition, spec.tasks_per_node)
        if key not in self._machines:
            self._machines[key] = machine_for(self.profile, self._tree, spec.partition, spec.tasks_per_node)
        return self._machines[key]

    def machines(self) -> list[Machine]:
        """The machines of all predictions so far, with a note if the cluster's newest results are of another one."""
        more = self._environment_notes
        return [
            msgspec.structs.replace(machine, notes=[*machine.notes, *more]) if more else machine
            for machine in self._machines.values()
        ]

    def table(self, spec: RunSpec) -> LayerTable | NotPredicted:
        """The layer table of the run's model, or the reason why there is none."""
        key = (spec.model, spec.dataset, spec.input_size, _hashable_options(spec.model_options))
        if key not in self._tables:
            self._tables[key] = self._load_table(spec)
        return self._tables[key]

    def _load_table(self, spec: RunSpec) -> LayerTable | NotPredicted:
        is_custom = is_custom_model(spec.model)
        if (not is_custom and spec.model not in MODELS) or spec.dataset not in DATASETS:
            return NotPredicted(f"there is no model {spec.model!r:.60} here that takes {spec.dataset!r:.60}")
        request = LayerTableRequest(
            model=spec.model,
            dataset=spec.dataset,
            input_size=spec.input_size,
            # The probability of dropout changes no shape.
            model_options={name: value for name, value in spec.model_options.items() if name != "dropout"},
            model_folder=self._model_folder if is_custom else None,
        )
        # Code of a model that only other people's results name is never run.
        python = None if is_custom and self._model_folder is None else self._python
        try:
            return load_layer_table(request, python)
        except HpcbenchError as error:
            return NotPredicted(error.message)

    def memory_fit(self, spec: RunSpec) -> MemoryFit | NotPredicted:
        """Peak memory of the rank that uses most, and the device's capacity; quicker than ``predict``."""
        memory = self._peak_memory(spec)
        if isinstance(memory, NotPredicted):
            return memory
        try:
            machine = self.machine(spec)
        except HpcbenchError as error:
            return NotPredicted(error.message)
        limit = None if machine.memory_bytes is None else round(machine.memory_bytes)
        return MemoryFit(memory.total_bytes + round(machine.base_bytes), limit)

    def _peak_memory(self, spec: RunSpec) -> MemoryBreakdown | NotPredicted:
        key = _configuration_key(spec)
        if key not in self._memory:
            self._memory[key] = self._apply(spec, lambda table: peak_rank_memory(spec, table, self.profile.device))
        return self._memory[key]

    def _apply(self, spec: RunSpec, formula: Callable[[LayerTable], _PredictionT]) -> _PredictionT | NotPredicted:
        """Apply a formula of the oracle to the run's layer table.

        ``HpcbenchError`` is the oracle's documented way to refuse a run. Any other exception is a bug and propagates.
        """
        if not self.has_formulas(spec):
            return NotPredicted(f"the oracle has no formulas for {spec.strategy!r:.60}")
        if spec.devices > MAX_DEVICES or spec.micro_batches > MAX_MICRO_BATCHES:
            return NotPredicted(f"more than {MAX_DEVICES:,} devices or {MAX_MICRO_BATCHES:,} micro_batches")
        table = self.table(spec)
        if isinstance(table, NotPredicted):
            return table
        reason = _invalid_reason(spec) if self._untrusted else None
        if reason is None and is_custom_model(spec.model):
            reason = table_exclusion_reason(spec, table)
        if reason is not None:
            return NotPredicted(reason)
        try:
            return formula(table)
        except HpcbenchError as error:
            return NotPredicted(error.message)


def has_cost(spec: RunSpec) -> bool:
    """Whether the strategy of a training has formulas."""
    return spec.strategy in STRATEGIES and find_cost(spec.strategy) is not None


def _invalid_reason(spec: RunSpec) -> str | None:
    """The reason why no sweep can contain the run; ``None`` if one can."""
    options = dict(STRATEGIES[spec.strategy].options)
    if spec.model in MODELS:
        options |= MODELS[spec.model].options
    for name, value in (*spec.options.items(), *spec.model_options.items()):
        option = options.get(name)
        if option is not None and not (type(value) is option.kind or (option.kind is float and type(value) is int)):
            return f"option {name} = {value!r:.60}: not of type {option.kind.__name__}"
        if option is not None and option.choices and value not in option.choices:
            return f"option {name} = {value!r:.60}: not one of {', '.join(map(str, option.choices))}"
    resolved = resolve_point(msgspec.structs.asdict(spec), PartitionLimits("any"))
    return resolved.reason if isinstance(resolved, InfeasiblePoint) else None


def _with_local_hardware(profile: ClusterProfile) -> ClusterProfile:
    """Return ``profile`` with this machine's cores and memory if jobs run here and it does not set them."""
    if not profile.scheduler.traits.runs_here:
        return profile
    node = profile.node
    hardware = {
        "cores": node.cores or available_cores(),
        "memory_bytes": node.memory_bytes or psutil.virtual_memory().total,
    }
    return profile.model_copy(update={"node": node.model_copy(update=hardware)})


def _configuration_key(spec: RunSpec) -> Any:
    options = spec.options, spec.model_options, spec.parameters
    return _PRICED_FIELDS(spec), *map(_hashable_options, options)


def _hashable_options(options: dict[str, Any]) -> bytes:
    # Untrusted options may hold lists and tables.
    return msgspec.json.encode(options, order="deterministic") if options else b""


@dataclass
class PlanForecast:
    """Predictions for the runs of a plan, by ``run_id``."""

    forecast: Forecast
    predictions: dict[str, Prediction] = field(default_factory=dict)
    run_time_s: dict[str, float] = field(default_factory=dict)
    """Seconds of one launch, limited by its time limit."""
    unpriced: Counter[str] = field(default_factory=Counter)
    """Number of runs without a prediction, by the reason."""

    def node_hours(self, runs: dict[str, RunSpec]) -> float | None:
        """Return the node-hours of the predicted runs among ``runs``; ``None`` if none is predicted."""
        priced = [spec.nodes * self.run_time_s[key] for key, spec in runs.items() if key in self.run_time_s]
        return sum(priced) / 3600 if priced else None

    def not_fitting(self, runs: dict[str, RunSpec]) -> list[str]:
        """Return the ids of the runs that are predicted not to fit into memory."""
        return [key for key in runs if key in self.predictions and self.predictions[key].fits is False]

    def launch_bound(self, runs: dict[str, RunSpec]) -> list[str]:
        """Return the ids of the runs whose devices wait for the host."""
        return [key for key in runs if key in self.predictions and self.predictions[key].bound_by == "host"]

    def warnings(self, runs: dict[str, RunSpec]) -> list[str]:
        """Lines for a person: runs that will not fit, that wait for the host, and that have no prediction."""
        lines = []
        large = self.not_fitting(runs)
        if large:
            key = max(large, key=lambda run_id: self.predictions[run_id].peak_memory_bytes)
            worst = self.predictions[key]
            need, limit = format_need_and_limit(worst.peak_memory_bytes, worst.memory_limit_bytes or 0)
            lines.append(
                f"{len(large)} of {len(runs)} will probably not fit into memory, by the oracle: {run_label(runs[key])} "
                f"needs {need} a rank, there is {limit} (predict shows each)"
            )
        slow = self.launch_bound(runs)
        if slow:
            key = max(slow, key=lambda run_id: self.predictions[run_id].step_time_s)
            table = self.forecast.table(runs[key])
            assert not isinstance(table, NotPredicted), "its step was predicted from the table"
            count = count_operators(runs[key], table)
            lines.append(
                f"{len(slow)} of {len(runs)} will probably wait for the host: {run_label(runs[key])} "
                f"launches about {count:,} operators in {format_seconds(count * OPERATOR_S)}, longer than its device "
                "computes and sends (a larger batch_size, or compile)"
            )
        if self.predictions and any(machine.depth == "nominal" for machine in self.forecast.machines()):
            lines += used_link_notes(self.forecast.profile, runs.values())
        # Counted over all runs of the sweep, those with a result among them.
        total = sum(self.unpriced.values())
        if total:
            reason, count = self.unpriced.most_common(1)[0]
            more = f", {count} of them: " if count < total else ": "
            lines.append(f"nothing is predicted for {pluralize(total, 'run')}{more}{reason}")
        return lines


def used_link_notes(profile: ClusterProfile, specs: Iterable[RunSpec]) -> list[str]:
    """Return notes with the assumed values of the links that the runs use and the profile does not define."""
    runs = list(specs)
    is_used = {
        "intra_node": any(spec.tasks_per_node > 1 for spec in runs),
        "inter_node": any(spec.nodes > 1 for spec in runs),
    }
    return [note for key, note in assumed_link_notes(profile).items() if is_used[key]]


def forecast_plan(plan: SweepPlan, tree: ClusterTree) -> PlanForecast:
    """Predict the runs of ``plan`` with the calibrations in ``tree``; no layer table is measured for it."""
    models, command = custom_model_folder(plan.sweep, plan.profile), plan.sweep.command
    forecast = Forecast(plan.profile, tree, models, python=None, command=command)
    plan_forecast = PlanForecast(forecast)
    for key, spec in plan.runs.items():
        prediction = forecast.predict(spec, limit=MAX_PRICED_CONFIGURATIONS)
        if isinstance(prediction, NotPredicted):
            plan_forecast.unpriced[prediction.reason] += 1
            continue
        plan_forecast.predictions[key] = prediction
        plan_forecast.run_time_s[key] = min(forecast.launch_s(spec, prediction), plan.shape(spec).time_limit_s)
    return plan_forecast
