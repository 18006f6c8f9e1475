"""A complete calibration of a cluster, from the runs of a calibration sweep or from other runs at small scale."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from math import hypot, log
from typing import Any

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.oracle.calibration import fit_overheads
from hpcbench.oracle.calibration.calibration_runs import (
    PROBE_BLOCKS,
    PROBE_MESSAGES,
    CalibrationRun,
    disturbed_spread,
    usable_runs,
)
from hpcbench.oracle.calibration.calibration_store import Calibration, FitResidual
from hpcbench.oracle.calibration.fit_collectives import fit_collectives
from hpcbench.oracle.calibration.fit_kernels import MIN_COMPUTE_SPREAD, fit_kernels
from hpcbench.oracle.calibration.posterior import fit_posterior, run_observations
from hpcbench.oracle.machine import CommParameters, Machine, nominal_machine


def machine_runs(runs: Sequence[CalibrationRun]) -> list[CalibrationRun]:
    """Return the usable runs without probes of a sweep's own shapes, which determine no other times."""
    return [run for run in usable_runs(runs) if run.spec.strategy not in (PROBE_BLOCKS, PROBE_MESSAGES)]


def fit_calibration(
    profile: ClusterProfile, partition: str | None, runs: Sequence[CalibrationRun], made_at: datetime | None = None
) -> Calibration:
    """Fit the machine to ``runs``. Figures without evidence stay those of the profile, with a note."""
    good = machine_runs(runs)
    nominal = nominal_machine(profile, partition)
    alone = fit_overheads.fit_lone_ranks(good)
    compute, residuals, notes = fit_kernels(nominal, good, alone.steps_s)
    comm, of_comm, more = _fit_communication(nominal, good)
    outside = disturbed_spread([run.result.warnings for run in good])
    compute = msgspec.structs.replace(compute, spread=hypot(compute.spread, outside))
    comm = msgspec.structs.replace(comm, spread=hypot(comm.spread, outside))
    crowding = fit_overheads.fit_crowding(good, alone)
    if crowding:
        compute = msgspec.structs.replace(compute, crowding={1: 1.0, **crowding})
    base_bytes, of_memory = fit_overheads.fit_base_bytes(good, nominal.device)
    machine = msgspec.structs.replace(
        nominal,
        depth="calibrated",
        source="",
        compute=compute,
        comm=comm,
        straggling=alone.straggling,
        base_bytes=nominal.base_bytes if base_bytes is None else base_bytes,
        notes=[],
    )
    is_across = any(sample.nodes > 1 for sample in comm.collectives)
    unmeasured = {
        "no two ranks were measured on one node: they are taken not to be in each other's way": not crowding,
        "nothing was measured between nodes: links between them are the profile's": comm.collectives and not is_across,
        "contention was not measured: groups that send at the same time share a link fairly": is_across
        and not comm.contention,
    }
    strategies, of_strategies = fit_overheads.fit_strategy_overheads(machine, good)
    return Calibration(
        machine=msgspec.structs.replace(machine, strategies=strategies),
        residuals=[*residuals, *of_comm, *of_memory, *of_strategies],
        notes=[*notes, *more, *(note for note, applies in unmeasured.items() if applies)],
        **_provenance(profile, partition, good, made_at),
    )


def _provenance(
    profile: ClusterProfile, partition: str | None, runs: Sequence[CalibrationRun], made_at: datetime | None = None
) -> dict[str, Any]:
    """Return the fields of a calibration for its date, its runs and the links of the profile."""
    nominal = nominal_machine(profile, partition)
    digests = {run.result.environment_digest for run in runs}
    return {
        "cluster": profile.name,
        "made_at": (made_at or datetime.now(timezone.utc)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "partition": partition or profile.default_partition,
        "intra_node": nominal.comm.intra_node,
        "inter_node": nominal.comm.inter_node,
        "run_ids": sorted(run.result.run_id for run in runs),
        "environment_digests": sorted(digest for digest in digests if digest is not None),
    }


def _fit_communication(
    nominal: Machine, runs: Sequence[CalibrationRun]
) -> tuple[CommParameters, list[FitResidual], list[str]]:
    probes = [run.result.probe for run in runs if run.result.probe is not None]
    overlaps = [overlap for probe in probes for overlap in probe.overlaps]
    collectives = [collective for probe in probes for collective in probe.collectives]
    call_s = fit_overheads.fit_call_overhead(overlaps)
    samples, residuals, notes = fit_collectives(nominal.comm, collectives, call_s, nominal.comm.trees)
    if not samples:
        return nominal.comm, residuals, notes
    error = sum(each.error * each.points for each in residuals) / sum(each.points for each in residuals)
    comm = msgspec.structs.replace(
        nominal.comm,
        collectives=samples,
        contention=fit_overheads.fit_contention(collectives),
        overlap_slowdown=fit_overheads.fit_overlap(overlaps),
        comm_slowdown=fit_overheads.fit_comm_slowdown(overlaps),
        spread=max(error, MIN_COMPUTE_SPREAD),
        call_s=call_s,
    )
    return comm, residuals, notes


_MIN_LEARNED = 0.1
"""Share of the prior's variance that runs must remove for a number to be theirs."""


def fit_calibration_from_runs(
    profile: ClusterProfile, partition: str | None, machine: Machine, runs: Sequence[CalibrationRun]
) -> Calibration:
    """Return ``machine`` (of the profile, or an earlier calibration) with the numbers that make ``runs`` most probable.

    ``ConfigError`` where no run can be used.
    """
    good = usable_runs(runs)
    # Measured times of single shapes are no parameters that whole runs could move.
    machine = msgspec.structs.replace(machine, measured=None)
    results = (run.result for run in good)
    observed = run_observations(results, lambda spec: next(run.table for run in good if run.spec == spec))
    fitted = fit_posterior(machine, observed)
    posterior = fitted.posterior
    assert posterior is not None, "a fit has a posterior"
    spread = hypot(posterior.run_spread, disturbed_spread([run.result.warnings for run in good]))
    posterior = msgspec.structs.replace(posterior, run_spread=spread)
    residuals = [
        FitResidual(part="runs", what=each.run, points=1, error=abs(log(each.predicted_s / each.measured_s)))
        for each in posterior.residuals
    ]
    drawn = [each.name for each in posterior.parameters if each.learned < _MIN_LEARNED]
    notes = [f"the runs say nothing of {', '.join(drawn)}: as before"] if drawn else []
    return Calibration(
        machine=msgspec.structs.replace(fitted, posterior=posterior, notes=[]),
        residuals=residuals,
        notes=[*machine.notes, *notes],
        **_provenance(profile, partition, good),
    )
