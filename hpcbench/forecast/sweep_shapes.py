"""The calibration that the finished probes of a sweep give, and what of the sweep it measures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

import msgspec

from hpcbench.config.run_spec import config_id, strategy_label
from hpcbench.errors import ConfigError
from hpcbench.forecast.forecast import Forecast
from hpcbench.forecast.sweep_calibration import SweepCalibration, all_disturbed, disturbance
from hpcbench.oracle.calibration.calibration_runs import CalibrationRun, usable_runs
from hpcbench.oracle.calibration.calibration_store import Calibration
from hpcbench.oracle.calibration.fit_shapes import busy_notes, fit_shapes
from hpcbench.oracle.cost_model import CostModel
from hpcbench.oracle.machine import nominal_machine
from hpcbench.oracle.measured_shapes import MeasuredShapes
from hpcbench.oracle.prediction import NotPredicted
from hpcbench.oracle.strategies.base import resolve_cost
from hpcbench.submit.plan import SweepPlan


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
    disturbed = [run.result for run in good if disturbance(run.result)]
    if all_disturbed([run.result for run in good]) and not takes_disturbed:
        raise ConfigError(
            f"all {len(good)} probes of sweep {name!r} on {profile.name} are marked as disturbed: "
            f"{disturbance(good[0].result)}; nothing was kept, predictions rest on {stays}",
            hint="the same command measures again, when the machine is quiet; --busy takes them as they are",
        )
    nominal = nominal_machine(profile, prepared.partition)
    found = fit_shapes(nominal, good, name, is_disturbed=bool(disturbed))
    found = msgspec.structs.replace(
        found,
        environment=prepared.environment,
        environment_keys=[prepared.sweep.environment_key(prepared.environment)],
    )
    notes = [*prepared.notes, *prepared.left_out, *busy_notes(good)]
    if disturbed:
        notes.append(f"{len(disturbed)} of {len(good)} probes are marked as disturbed: the intervals are wider")
    earlier, differences = _comparable_shapes(prepared, found)
    notes += differences
    machine = nominal if base is None else base.calibration.machine
    shapes = found if earlier is None else earlier.joined(found)
    made_at = _made_after(None if base is None else base.calibration)
    run_ids = sorted(run.result.run_id for run in good)
    digests = found.environment_digests
    if base is None:
        return Calibration(
            cluster=profile.name,
            made_at=made_at,
            partition=prepared.partition,
            intra_node=nominal.comm.intra_node,
            inter_node=nominal.comm.inter_node,
            machine=msgspec.structs.replace(machine, measured=shapes, notes=[]),
            notes=notes,
            extends="profile",
            run_ids=run_ids,
            environment_digests=digests,
        )
    before = base.calibration
    return msgspec.structs.replace(
        before,
        made_at=made_at,
        partition=prepared.partition,
        machine=msgspec.structs.replace(machine, measured=shapes),
        notes=list(dict.fromkeys([*before.notes, *notes])),
        extends=base.digest,
        run_ids=sorted({*before.run_ids, *run_ids}),
        environment_digests=sorted({*before.environment_digests, *digests}),
    )


def _comparable_shapes(prepared: SweepCalibration, found: MeasuredShapes) -> tuple[MeasuredShapes | None, list[str]]:
    """Return the earlier shapes of the same machine and software, and notes on numbers of other ones."""
    base, earlier, notes = prepared.base, prepared.shapes, list[str]()
    own = set(found.environment_digests)
    if earlier is not None and own and not own & set(earlier.environment_digests):
        notes.append(
            f"the shapes measured before ({', '.join(earlier.sweeps)}) are of another machine or software "
            f"({', '.join(earlier.environment_digests)}, now {', '.join(sorted(own))}): they are left out"
        )
        earlier = None
    digests = set() if base is None else set(base.calibration.environment_digests)
    if base is not None and own and digests and not own & digests:
        notes.append(
            f"calibration {base.digest} is of another machine or software ({', '.join(sorted(digests))}, now "
            f"{', '.join(sorted(own))}): what was not measured for the sweep still rests on it, until "
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
    own = set(calibration.environment_digests)
    if own and not own & set(shapes.environment_digests):
        return calibration, (
            f"the shapes measured for {', '.join(shapes.sweeps)} are of another machine or software: they are left out"
        )
    return msgspec.structs.replace(
        calibration, machine=msgspec.structs.replace(calibration.machine, measured=shapes)
    ), None


def coverage_lines(plan: SweepPlan, forecast: Forecast) -> list[str]:
    """State which configurations of a sweep are priced from measured shapes alone, and what the others lack."""
    measured, lines, total = 0, list[str](), 0
    for spec in {config_id(spec): spec for spec in plan.runs.values()}.values():
        table, machine = forecast.table(spec), forecast.machine(spec)
        if isinstance(table, NotPredicted) or isinstance(forecast.predict_alone(spec, quick=True), NotPredicted):
            continue
        total += 1
        cost_model = CostModel(machine, spec)
        resolve_cost(spec.strategy).step(spec, table, cost_model)
        if cost_model.is_measured:
            measured += 1
            continue
        kernels, messages = cost_model.unmeasured
        kinds = sorted({kernel.kind for kernel in kernels})
        named = f" ({', '.join(kinds[:3])}{', ...' if len(kinds) > 3 else ''})" if kinds else ""
        lines.append(
            f"  {strategy_label(spec)}, {spec.model}, batch {spec.batch_size}: {len(kernels)} kernels{named} and "
            f"{len(messages)} messages by formulas"
        )
    return [f"{measured} of {total} configurations rest on measured shapes alone", *lines]
