"""Calibrations as sweeps: the one that is due, the probes that a sweep lacks, and the finished runs to fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import RunSpec, config_id, strategy_label
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import ConfigError, HpcbenchError, did_you_mean
from hpcbench.fileio import write_file
from hpcbench.predict.calibration.calibration_store import (
    CalibrationRun,
    StoredCalibration,
    calibration_of_partition,
    disturbances,
    read_calibrations,
)
from hpcbench.predict.calibration.calibration_sweep import (
    PricedRun,
    SweepProbe,
    calibration_sweep_name,
    calibration_sweep_toml,
    price_run,
    probe_settings,
    probe_sweep_toml,
    sweep_probes,
)
from hpcbench.predict.cost_model import CostModel, is_eager_run
from hpcbench.predict.forecast import STARTUP_S, Forecast, used_link_notes
from hpcbench.predict.prediction import MemoryFit, NotPredicted, format_need_and_limit
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK
from hpcbench.strategies.catalog import COLLECTIVES, SINGLE_DEVICE
from hpcbench.strategies.check_sweep import custom_model_folder
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.submit.plan import SweepPlan, available_cores, make_plan
from hpcbench.units import pluralize


def calibration_sweeps(
    tree: ClusterTree, profile: ClusterProfile, partition: str | None, budget_s: float
) -> Iterator[tuple[Path, str]]:
    """Yield file and text of each calibration sweep of a partition, the first one first."""
    for number in count():
        path = tree.path("calibrations", f"{calibration_sweep_name(number, partition)}.toml")
        yield path, calibration_sweep_toml(profile, partition, available_cores(), number, budget_s)


def plan_calibration(
    sweeps: Iterable[tuple[Path, str]], profile: ClusterProfile, tree: ClusterTree, *, takes_disturbed: bool,
    used: Collection[str] = (),
) -> SweepPlan:  # fmt: skip
    """Return the plan of the first of ``sweeps``, each of which is written to its file, that can give a calibration.

    Those can whose runs are missing, or have ended and were not all disturbed, unless ``takes_disturbed``; and whose
    runs are not ``used`` before.
    """
    for path, text in sweeps:
        write_file(path, text.encode())
        plan = make_plan(load_sweep(path), profile, tree)
        results = (tree.read_result(key) for key in plan.runs)
        warnings = [result.warnings for result in results if result is not None and result.status == STATUS_OK]
        is_refused = warnings and all(map(disturbances, warnings)) and not takes_disturbed
        if plan.missing or plan.elsewhere or not (is_refused or plan.runs.keys() & set(used)):
            break
    return plan


NO_MODEL = LayerTable(model="", dataset="", input_size=0, blocks=0, parameter_tensors=[], buffers=[], layers=[])
"""The layer table of runs without a model."""


def collect_evidence(
    trees: Iterable[tuple[ClusterTree, Iterable[str]]], forecast: Forecast
) -> tuple[list[CalibrationRun], list[str]]:
    """Return the usable runs of each tree with the layer tables of ``forecast``, and for the others the reason."""
    evidence: list[CalibrationRun] = []
    problems: list[str] = []
    for tree, run_ids in trees:
        for run_id in run_ids:
            try:
                result = tree.read_result(run_id)
            except (HpcbenchError, msgspec.MsgspecError) as error:
                problems.append(f"run {run_id} is left out: {error}")
                continue
            if result is None or result.status != STATUS_OK:
                continue
            table = NO_MODEL if result.spec.workload == COLLECTIVES else forecast.table(result.spec)
            if isinstance(table, NotPredicted):
                problems.append(f"run {run_id} is left out: {table.reason}")
            else:
                evidence.append(CalibrationRun(result, table))
    return evidence, problems


@dataclass
class SweepCalibration:
    """The plan of a calibration for a sweep: its probes, and the calibration that they extend."""

    sweep: SweepPlan
    runs: dict[str, RunSpec]
    """Runs of the sweep on the partition, by ``run_id``."""
    partition: str | None
    environment: str | None
    probes: list[SweepProbe]
    base: StoredCalibration | None
    """The calibration that is extended; ``None``: the profile."""
    budget_s: float
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the sweep of probes."""
        return f"calibration-for-{self.sweep.sweep.name}"[:64]

    @property
    def node_hours(self) -> float:
        """Predicted node-hours of the probes."""
        run_s = STARTUP_S[self.sweep.profile.device] + self.budget_s
        return sum(int(probe.point.get("nodes", 1)) for probe in self.probes) * run_s / 3600

    def lines(self) -> list[str]:
        """Return the lines that are printed: the probes and their cost."""
        runs = pluralize(len(self.probes), "probe run")
        lines = [f"calibration for {self.sweep.sweep.name}: {runs}, about {self.node_hours:.3g} node-hours"]
        lines += [f"  {probe.what}: for {pluralize(probe.runs, 'configuration')}" for probe in self.probes]
        return [*lines, *(f"  {note}" for note in self.notes)]

    def probe_sweep_text(self, seed: int = 0) -> str:
        """Return the sweep of the probes; launches of other seeds are other runs."""
        plan = self.sweep
        settings = {"name": self.name, "description": f"what sweep {plan.sweep.name} consists of"}
        folder = custom_model_folder(plan.sweep, plan.profile)
        if folder is not None:
            settings["model_folder"] = str(folder.resolve())
        fixed = probe_settings(seed, self.budget_s)
        return probe_sweep_toml(settings, plan.profile, fixed, [probe.point for probe in self.probes])


def prepare_sweep_calibration(
    plan: SweepPlan, tree: ClusterTree, partition: str | None, budget_s: float
) -> SweepCalibration:
    """Return the probes of the blocks, messages and overlaps of ``plan`` that have no measured time.

    Args:
        plan: of the sweep that is to be predicted.
        tree: of its cluster.
        partition: whose runs are meant; ``None`` where they are all of one.
        budget_s: of the measurements of one probe.

    Raises:
        ConfigError: The sweep's runs are of several partitions or environments, or none of them can be probed.
    """
    profile = plan.profile
    partition = _one_partition(plan, partition)
    runs = {key: spec for key, spec in plan.runs.items() if (spec.partition or profile.default_partition) == partition}
    environment = _one_environment(plan, runs.values())
    stored, notes = read_calibrations(tree, profile.name)
    base = calibration_of_partition(stored, profile, partition)
    key = plan.environment_key(environment)
    is_current = base is not None and base.calibration.environment_key in ("", key)
    if base is not None and not is_current:
        notes.append(f"calibration {base.digest} is of another environment: all of the sweep is measured again")
    forecast = Forecast(profile, tree if is_current else None, custom_model_folder(plan.sweep, profile))
    priced, reasons = _price_runs(forecast, runs.values())
    if not priced:
        reason = next(iter(reasons), "no run")
        raise ConfigError(f"nothing of sweep {plan.sweep.name!r} can be probed on {profile.name}: {reason}")
    notes += used_link_notes(profile, runs.values())
    notes += [f"{number} configurations are not probed: {reason}" for reason, number in reasons.most_common()]
    if base is None:
        notes.append(
            f"{profile.name} has no calibration: what is not measured here stays the profile's "
            f"(hpcbench cluster calibrate {profile.name} measures it)"
        )
    probes = list[SweepProbe]()
    for probe in sweep_probes(priced, budget_s):
        oversized = _oversized_reason(probe, forecast)
        if oversized is None:
            probes.append(probe)
        else:
            notes.append(f"not measured: {probe.what}: {oversized}")
    return SweepCalibration(plan, runs, partition, environment, probes, base, budget_s, notes)


def _one_partition(plan: SweepPlan, wanted: str | None) -> str | None:
    profile = plan.profile
    names = {spec.partition or profile.default_partition for spec in plan.runs.values()}
    if wanted is None and len(names) > 1:
        choices = sorted(name or "" for name in names)
        raise ConfigError(
            f"the runs of sweep {plan.sweep.name!r} are on {len(names)} partitions: {', '.join(choices)}",
            hint=f"name one: --partition {choices[0]}",
        )
    chosen = wanted or next(iter(names))
    if chosen not in names:
        raise ConfigError(
            f"no run of sweep {plan.sweep.name!r} is on partition {chosen!r}",
            hint=did_you_mean(str(chosen), sorted(name for name in names if name)),
        )
    return chosen


def _one_environment(plan: SweepPlan, specs: Iterable[RunSpec]) -> str | None:
    names = {spec.environment for spec in specs}
    if len(names) > 1:
        choices = ", ".join(sorted(name or plan.profile.default_environment or "the default" for name in names))
        raise ConfigError(
            f"the runs of sweep {plan.sweep.name!r} are in {len(names)} environments ({choices}): times of one say "
            "nothing of another",
            hint="give --for a sweep of one environment",
        )
    return next(iter(names))


def _price_runs(forecast: Forecast, specs: Iterable[RunSpec]) -> tuple[list[PricedRun], Counter[str]]:
    """Price each configuration once; count by the reason those that cannot be probed."""
    priced: list[PricedRun] = []
    reasons: Counter[str] = Counter()
    for spec in {config_id(spec): spec for spec in specs}.values():
        table, prediction = forecast.table(spec), forecast.predict_alone(spec)
        if not is_eager_run(spec):
            reasons["compiled, or with variables of their own (env)"] += 1
        elif isinstance(table, NotPredicted):
            reasons[table.reason] += 1
        elif isinstance(prediction, NotPredicted):
            reasons[prediction.reason] += 1
        else:
            priced.append(price_run(spec, table, forecast.machine(spec)))
    return priced, reasons


def _oversized_reason(probe: SweepProbe, forecast: Forecast) -> str | None:
    """Return why a probe cannot run: blocks are those of the whole model, on every rank."""
    if probe.point.get("workload") == COLLECTIVES:
        return None
    dropped = ("options", "nodes", "tasks_per_node")
    point = {key: value for key, value in probe.point.items() if key not in dropped}
    single = resolve_point(point | {"strategy": SINGLE_DEVICE}, PartitionLimits("any"))
    fit = single if isinstance(single, InfeasiblePoint) else forecast.memory_fit(single)
    # The ranks of a node share the memory of its processors.
    ranks = int(probe.point.get("tasks_per_node", 1)) if forecast.profile.device == "cpu" else 1
    if not isinstance(fit, MemoryFit) or fit.memory_limit_bytes is None:
        return None
    need, limit = fit.peak_memory_bytes, fit.memory_limit_bytes // ranks
    texts = format_need_and_limit(need, limit)
    return f"the whole model needs {texts[0]} on a rank, there is {texts[1]}" if need > limit else None


def make_probe_plan(prepared: SweepCalibration, tree: ClusterTree, *, takes_disturbed: bool) -> SweepPlan:
    """Return the plan of the probes; its sweep is kept beside the calibrations.

    Probes that have all ended and were all disturbed are planned anew, unless ``takes_disturbed``.
    """
    path = tree.path("calibrations", f"{prepared.name}.toml")
    sweeps = ((path, prepared.probe_sweep_text(seed)) for seed in count())
    return plan_calibration(sweeps, prepared.sweep.profile, tree, takes_disturbed=takes_disturbed)


def coverage_lines(specs: Iterable[RunSpec], forecast: Forecast) -> list[str]:
    """State which configurations of ``specs`` are priced from measured shapes alone, and what the others lack."""
    measured, lines, total = 0, list[str](), 0
    for spec in {config_id(spec): spec for spec in specs}.values():
        table, machine = forecast.table(spec), forecast.machine(spec)
        if isinstance(table, NotPredicted) or isinstance(forecast.predict_alone(spec), NotPredicted):
            continue
        total += 1
        cost_model = CostModel(machine, spec)
        resolve_cost(spec.strategy).step(spec, table, cost_model)
        if cost_model.is_measured:
            measured += 1
            continue
        kernels, messages, _ = cost_model.unmeasured
        kinds = sorted({kernel.kind for kernel in kernels})
        named = f" ({', '.join(kinds[:3])}{', ...' if len(kinds) > 3 else ''})" if kinds else ""
        lines.append(
            f"  {strategy_label(spec)}, {spec.model}, batch {spec.batch_size}: {len(kernels)} kernels{named} and "
            f"{len(messages)} messages between measured ones"
        )
    return [f"{measured} of {total} configurations rest on measured shapes alone", *lines]
