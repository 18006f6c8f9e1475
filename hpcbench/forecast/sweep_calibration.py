"""Calibration for one sweep: the probes of its own shapes, their cost, and the calibration that they give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import count
from math import ceil

import msgspec

from hpcbench.config.run_spec import RunSpec, config_id, strategy_label
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.forecast.forecast import STARTUP_S, Forecast, forecast_plan, used_link_notes
from hpcbench.forecast.oracle_requests import plan_calibration
from hpcbench.oracle.calibration.calibration_runs import (
    PROBE_STEPS,
    CalibrationRun,
    check_disturbed,
    probe_sweep_toml,
    usable_runs,
)
from hpcbench.oracle.calibration.calibration_store import (
    Calibration,
    StoredCalibration,
    calibration_of_partition,
    read_calibrations,
)
from hpcbench.oracle.calibration.fit_shapes import busy_notes, fit_shapes
from hpcbench.oracle.calibration.sweep_needs import (
    PricedRun,
    SweepProbe,
    block_probes,
    message_probes,
    overlap_probes,
    price_run,
)
from hpcbench.oracle.cost_model import CostModel, is_eager_run
from hpcbench.oracle.machine import nominal_machine
from hpcbench.oracle.measured_shapes import MeasuredShapes
from hpcbench.oracle.prediction import MemoryFit, NotPredicted, format_need_and_limit
from hpcbench.oracle.strategies.base import resolve_cost
from hpcbench.parallel.catalog import SINGLE_DEVICE
from hpcbench.parallel.check_names import custom_model_folder
from hpcbench.parallel.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import SweepPlan
from hpcbench.units import pluralize

SWEEP_SHARE = 0.1
"""Fraction of a sweep's predicted node-hours that its probes may take ..."""
MIN_LIMIT_H = 0.25
"""... or so many hours of the sweep's largest allocation, whichever is more."""
_MIN_PASSES = 16
"""Passes through all blocks of a probe run, whatever its budget."""
_TIME_LIMIT_MIN = 10
_TIME_LIMIT_MARGIN = 1.5
"""Time limit of a probe over its predicted time, where that is more than ``_TIME_LIMIT_MIN``."""
LEFT_OUT = "left out: "


@dataclass
class SweepCalibration:
    """The plan of a calibration for a sweep: probes, cost, and the calibration that they extend."""

    sweep: SweepPlan
    runs: Mapping[str, RunSpec]
    """Runs of the sweep on the partition, by ``run_id``."""
    partition: str | None
    probes: list[SweepProbe]
    left_out: list[str]
    """Probes that are not run, and why."""
    node_hours: float
    """Predicted node-hours of the probes."""
    sweep_node_hours: float | None
    limit_node_hours: float
    base: StoredCalibration | None
    """The calibration that is extended; ``None``: the profile."""
    shapes: MeasuredShapes | None
    """Measured before, in the same environment."""
    environment: str | None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the sweep of probes."""
        return f"calibration-for-{self.sweep.sweep.name}"[:64]

    def lines(self) -> list[str]:
        """Return the lines that are printed: the probes, their cost, and the parts that are left out."""
        name, nodes = self.sweep.sweep.name, max(spec.nodes for spec in self.runs.values())
        hours = "unknown" if self.sweep_node_hours is None else f"{self.sweep_node_hours:.3g}"
        lines = [
            f"calibration for {name}: {pluralize(len(self.probes), 'probe run')}, predicted {self.node_hours:.3g} "
            f"node-hours; at most {self.limit_node_hours:.3g}: the larger of a tenth of the sweep's {hours} and 15 "
            f"minutes of {pluralize(nodes, 'node')}"
        ]
        lines += [f"  {probe.what}: for {pluralize(probe.runs, 'configuration')}" for probe in self.probes]
        return [*lines, *(f"  {text}" for text in self.left_out), *(f"  {note}" for note in self.notes)]


def prepare_sweep_calibration(
    plan: SweepPlan, tree: ClusterTree, partition: str | None, budget_s: float
) -> SweepCalibration:
    """Return the probes of the shapes of ``plan`` that have no measured time, as far as they may cost.

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
    stored, problems = read_calibrations(tree, profile.name)
    base = calibration_of_partition(stored, profile, partition)
    shapes, notes = _current_shapes(plan, base, environment)
    forecast = Forecast(profile, tree, custom_model_folder(plan.sweep, profile))
    priced, reasons = _price_runs(forecast, runs.values(), shapes)
    if not priced:
        reason = next(iter(reasons), "no run")
        raise ConfigError(f"nothing of sweep {plan.sweep.name!r} can be probed on {profile.name}: {reason}")
    notes = [*problems, *notes, *used_link_notes(profile, runs.values())]
    notes += [f"{count} configurations are not probed: {reason}" for reason, count in reasons.most_common()]
    if base is None:
        notes.append(
            f"{profile.name} has no calibration: what is not measured here stays the profile's "
            f"(hpcbench cluster calibrate {profile.name} measures it)"
        )
    sweep_hours = forecast_plan(plan, tree).node_hours(runs)
    limit = max(SWEEP_SHARE * (sweep_hours or 0.0), MIN_LIMIT_H * max(spec.nodes for spec in runs.values()))
    by_blocks = [*block_probes(priced, budget_s), *overlap_probes(priced, budget_s)]
    fitting, oversized = _without_oversized(by_blocks, forecast)
    probes = [*fitting, *message_probes(priced, budget_s)]
    affordable, left_out, hours = _within_limit(probes, limit, STARTUP_S[profile.device])
    left_out = [*oversized, *left_out]
    return SweepCalibration(
        plan, runs, partition, affordable, left_out, hours, sweep_hours, limit, base, shapes, environment, notes
    )


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


def _current_shapes(
    plan: SweepPlan, base: StoredCalibration | None, environment: str | None
) -> tuple[MeasuredShapes | None, list[str]]:
    """Return the shapes of ``base`` that were measured with today's software, and notes on the other ones."""
    shapes = None if base is None else base.calibration.machine.measured
    if base is None or shapes is None:
        return None, []
    key = plan.environment_key(environment)
    if shapes.environment == environment and shapes.environment_keys == [key]:
        return shapes, []
    return None, [
        f"the shapes that calibration {base.digest} measured for {', '.join(shapes.sweeps)} are of another environment "
        f"({', '.join(shapes.environment_keys)}, now {key}): they are measured again"
    ]


def _price_runs(
    forecast: Forecast, specs: Iterable[RunSpec], shapes: MeasuredShapes | None
) -> tuple[list[PricedRun], Counter[str]]:
    """Price each configuration once; count by the reason those that cannot be probed."""
    priced: list[PricedRun] = []
    reasons: Counter[str] = Counter()
    for spec in {config_id(spec): spec for spec in specs}.values():
        table, prediction = forecast.table(spec), forecast.predict_alone(spec, quick=True)
        if not is_eager_run(spec):
            reasons["compiled, or with variables of their own (env)"] += 1
        elif isinstance(prediction, NotPredicted) or isinstance(table, NotPredicted):
            reason = prediction if isinstance(prediction, NotPredicted) else table
            assert isinstance(reason, NotPredicted), "one of them is not predicted"
            reasons[reason.reason] += 1
        else:
            machine = msgspec.structs.replace(forecast.machine(spec), measured=shapes)
            priced.append(price_run(spec, table, machine))
    return priced, reasons


def _without_oversized(probes: Sequence[SweepProbe], forecast: Forecast) -> tuple[list[SweepProbe], list[str]]:
    """Return the probes of blocks whose whole model fits on a device, and why others are left out."""
    usable: list[SweepProbe] = []
    left_out: list[str] = []
    for probe in probes:
        point = {key: value for key, value in probe.point.items() if key not in ("options", "nodes", "tasks_per_node")}
        single = resolve_point(point | {"strategy": SINGLE_DEVICE}, PartitionLimits("any"))
        fit = single if isinstance(single, InfeasiblePoint) else forecast.memory_fit(single)
        limit = fit.memory_limit_bytes if isinstance(fit, MemoryFit) else None
        # The ranks of a node share the memory of its processors.
        ranks = int(probe.point.get("tasks_per_node", 1)) if forecast.profile.device == "cpu" else 1
        if isinstance(fit, MemoryFit) and limit is not None and ranks * fit.peak_memory_bytes > limit:
            need, has = format_need_and_limit(fit.peak_memory_bytes, limit // ranks)
            left_out.append(f"{LEFT_OUT}{probe.what}: the whole model needs {need} on a rank, there is {has}")
        else:
            usable.append(probe)
    return usable, left_out


def _within_limit(
    probes: Sequence[SweepProbe], limit: float, startup_s: float
) -> tuple[list[SweepProbe], list[str], float]:
    """Return the probes that fit into ``limit`` node-hours.

    Those for most of the sweep's time come first; overlap, which the calibration has a value for, comes last.
    """
    affordable: list[SweepProbe] = []
    left_out: list[str] = []
    total_hours = 0.0
    for probe in sorted(probes, key=lambda probe: ("overlaps" in probe.point["options"], -probe.runs * probe.seconds)):
        hours = probe.nodes * _run_time_s(probe, startup_s) / 3600
        if total_hours + hours > limit:
            left_out.append(f"{LEFT_OUT}{probe.what}: {hours:.3g} node-hours are more than what is left of {limit:.3g}")
            continue
        affordable.append(probe)
        total_hours += hours
    return affordable, left_out, total_hours


def _run_time_s(probe: SweepProbe, startup_s: float) -> float:
    """Return the predicted time of a probe run: start, steps of training, and measurements."""
    options = probe.point["options"]
    # Parts of layers are measured beside whole ones.
    passes = _MIN_PASSES * (2 if "shares" in options else 1)
    steps = PROBE_STEPS["warmup_steps"] + PROBE_STEPS["steps"]
    return startup_s + steps * probe.seconds + max(float(options["budget_s"]), passes * probe.seconds)


def probe_sweep_text(prepared: SweepCalibration, seed: int = 0) -> str:
    """Return the sweep of the probes; launches of other seeds are other runs."""
    plan = prepared.sweep
    settings = {"name": prepared.name, "description": f"what sweep {plan.sweep.name} consists of"}
    folder = custom_model_folder(plan.sweep, plan.profile)
    if folder is not None:
        settings["model_folder"] = str(folder.resolve())
    fixed = {**PROBE_STEPS, "seed": seed, "time_limit_min": _TIME_LIMIT_MIN}
    points = []
    for probe in prepared.probes:
        needed_min = ceil(_TIME_LIMIT_MARGIN * _run_time_s(probe, STARTUP_S[plan.profile.device]) / 60)
        points.append(probe.point | ({"time_limit_min": needed_min} if needed_min > _TIME_LIMIT_MIN else {}))
    return probe_sweep_toml(settings, plan.profile, fixed, points)


def make_probe_plan(prepared: SweepCalibration, tree: ClusterTree, *, takes_disturbed: bool) -> SweepPlan:
    """Return the plan of the probes; its sweep is kept beside the calibrations.

    Probes that have all ended and were all disturbed are planned anew, unless ``takes_disturbed``.
    """
    path = tree.path("calibrations", f"{prepared.name}.toml")
    sweeps = ((path, probe_sweep_text(prepared, seed)) for seed in count())
    return plan_calibration(sweeps, prepared.sweep.profile, tree, takes_disturbed=takes_disturbed)


def extend_calibration(
    prepared: SweepCalibration, runs: Sequence[CalibrationRun], *, takes_disturbed: bool
) -> Calibration:
    """Return the calibration that ``prepared`` extends (else the profile's numbers) with what ``runs`` measured.

    Raises:
        ConfigError: No run ended well, or all of them were disturbed and ``takes_disturbed`` is not set.
    """
    profile, base, name = prepared.sweep.profile, prepared.base, prepared.sweep.sweep.name
    good = usable_runs(runs)
    stays = "the profile's numbers" if base is None else f"calibration {base.digest}"
    if not good:
        raise ConfigError(
            f"no probe of sweep {name!r} on {profile.name} ended well: nothing was kept, predictions rest on {stays}",
            hint=f"hpcbench status {prepared.name} shows how they ended, hpcbench logs RUN_ID why",
        )
    what = f"probes of sweep {name!r} on {profile.name}"
    then = f"nothing was kept, predictions rest on {stays}"
    disturbed = check_disturbed([run.result.warnings for run in good], what, then, takes_disturbed=takes_disturbed)
    nominal = nominal_machine(profile, prepared.partition)
    new_shapes, environment = fit_shapes(nominal, good, name), prepared.environment
    new_shapes = msgspec.structs.replace(
        new_shapes, environment=environment, environment_keys=[prepared.sweep.environment_key(environment)]
    )
    # A later call may measure what this one leaves out.
    notes = [*prepared.notes, *busy_notes(good)]
    notes += [note.replace("runs", "probes") + ": the intervals are wider" for note in disturbed]
    earlier, differences = _comparable_shapes(prepared, new_shapes)
    notes += differences
    machine = nominal if base is None else base.calibration.machine
    shapes = new_shapes if earlier is None else earlier.joined(new_shapes)
    made_at = _made_after(None if base is None else base.calibration)
    run_ids = sorted(run.result.run_id for run in good)
    digests = new_shapes.environment_digests
    if base is None:
        return Calibration(
            cluster=profile.name, made_at=made_at, partition=prepared.partition,
            intra_node=nominal.comm.intra_node, inter_node=nominal.comm.inter_node,
            machine=msgspec.structs.replace(machine, measured=shapes, notes=[]), notes=notes,
            extends="profile", run_ids=run_ids, environment_digests=digests,
        )  # fmt: skip
    before = base.calibration
    return msgspec.structs.replace(
        before, made_at=made_at, partition=prepared.partition, extends=base.digest,
        machine=msgspec.structs.replace(machine, measured=shapes),
        notes=list(dict.fromkeys([*before.notes, *notes])), run_ids=sorted({*before.run_ids, *run_ids}),
        environment_digests=sorted({*before.environment_digests, *digests}),
    )  # fmt: skip


def _comparable_shapes(prepared: SweepCalibration, shapes: MeasuredShapes) -> tuple[MeasuredShapes | None, list[str]]:
    """Return the earlier shapes of the same machine and software, and notes on numbers of other ones."""
    base, earlier, notes = prepared.base, prepared.shapes, list[str]()
    new_digests = set(shapes.environment_digests)
    if earlier is not None and new_digests and not new_digests & set(earlier.environment_digests):
        notes.append(
            f"the shapes measured before ({', '.join(earlier.sweeps)}) are of another machine or software "
            f"({', '.join(earlier.environment_digests)}, now {', '.join(sorted(new_digests))}): they are left out"
        )
        earlier = None
    digests = set() if base is None else set(base.calibration.environment_digests)
    if base is not None and new_digests and digests and not new_digests & digests:
        notes.append(
            f"calibration {base.digest} is of another machine or software ({', '.join(sorted(digests))}, now "
            f"{', '.join(sorted(new_digests))}): what was not measured for the sweep still rests on it, until "
            f"hpcbench cluster calibrate {prepared.sweep.profile.name} measures it again"
        )
    return earlier, notes


_DATE_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def _made_after(newest: Calibration | None) -> str:
    """Return the time, at least a second after ``newest`` was made: the newest one counts."""
    now = datetime.now(timezone.utc).strftime(_DATE_FORMAT)
    if newest is None or newest.made_at < now:
        return now
    try:
        return (datetime.strptime(newest.made_at, _DATE_FORMAT) + timedelta(seconds=1)).strftime(_DATE_FORMAT)
    except ValueError:
        # Another writer's text.
        return now


def carry_shapes(calibration: Calibration, newest: Calibration | None) -> tuple[Calibration, str | None]:
    """Return ``calibration`` with the measured shapes of ``newest``, and a note where they are of other software."""
    if newest is not None and newest.made_at >= calibration.made_at:
        calibration = msgspec.structs.replace(calibration, made_at=_made_after(newest))
    shapes = None if newest is None else newest.machine.measured
    if shapes is None:
        return calibration, None
    digests = set(calibration.environment_digests)
    if digests and not digests & set(shapes.environment_digests):
        return calibration, (
            f"the shapes measured for {', '.join(shapes.sweeps)} are of another machine or software: they are left out"
        )
    return msgspec.structs.replace(
        calibration, machine=msgspec.structs.replace(calibration.machine, measured=shapes)
    ), None


def coverage_lines(specs: Iterable[RunSpec], forecast: Forecast) -> list[str]:
    """State which configurations of ``specs`` are priced from measured shapes alone, and what the others lack."""
    measured, lines, total = 0, list[str](), 0
    for spec in {config_id(spec): spec for spec in specs}.values():
        table, machine = forecast.table(spec), forecast.machine(spec)
        if isinstance(table, NotPredicted) or isinstance(forecast.predict_alone(spec, quick=True), NotPredicted):
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
            f"{len(messages)} messages by formulas"
        )
    return [f"{measured} of {total} configurations rest on measured shapes alone", *lines]
