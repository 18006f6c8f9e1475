"""A whole calibration from the runs of one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

import msgspec

from hpcbench.config.cluster import ClusterProfile
from hpcbench.oracle.calibration.evidence import Evidence, usable
from hpcbench.oracle.calibration.fit_collectives import fit_collectives
from hpcbench.oracle.calibration.fit_kernels import LEAST_SPREAD, fit_kernels
from hpcbench.oracle.calibration.fit_rest import (
    fit_alone,
    fit_base_bytes,
    fit_call_s,
    fit_comm_slowdown,
    fit_contention,
    fit_crowding,
    fit_overlap,
    fit_strategies,
)
from hpcbench.oracle.calibration.store import Calibration, Residual
from hpcbench.oracle.machine import Comm, Machine
from hpcbench.oracle.nominal import nominal_machine
from hpcbench.results.schema import OverlapProbe


def calibrate(
    profile: ClusterProfile, partition: str | None, runs: Sequence[Evidence], made_at: datetime | None = None
) -> Calibration:
    """What ``runs`` say of the cluster; whatever they do not say stays as the profile has it, and is noted."""
    good = usable(runs)
    nominal = nominal_machine(profile, partition)
    alone = fit_alone(good)
    compute, residuals, notes = fit_kernels(nominal, good, alone.steps_s)
    comm, of_comm, more = _fit_comm(nominal, good)
    crowding = fit_crowding(good, alone)
    if crowding:
        compute = msgspec.structs.replace(compute, crowding={1: 1.0, **crowding})
    base_bytes, of_memory = fit_base_bytes(good, nominal.device)
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
    strategies, of_strategies, unknown = fit_strategies(machine, good)
    return Calibration(
        cluster=profile.name,
        made_at=utc(made_at),
        partition=partition or profile.default_partition,
        intra_node=nominal.comm.intra_node,
        inter_node=nominal.comm.inter_node,
        machine=msgspec.structs.replace(machine, strategies=strategies),
        residuals=[*residuals, *of_comm, *of_memory, *of_strategies],
        notes=[*notes, *more, *unknown, *_unmeasured(crowding, comm)],
        run_ids=sorted(one.result.run_id for one in good),
        environment_digests=digests(good),
    )


def utc(made_at: datetime | None = None) -> str:
    """``made_at``, or now, in ISO 8601."""
    return (made_at or datetime.now(timezone.utc)).strftime("%Y-%m-%dT%H:%M:%SZ")


def digests(runs: Sequence[Evidence]) -> list[str]:
    """Of all environments that were measured in."""
    return sorted({digest for one in runs if (digest := one.result.environment_digest) is not None})


def _fit_comm(nominal: Machine, runs: Sequence[Evidence]) -> tuple[Comm, list[Residual], list[str]]:
    probes = [one.result.probe for one in runs if one.result.probe is not None]
    overlaps: list[OverlapProbe] = [one for probe in probes for one in probe.overlaps]
    collectives = [one for probe in probes for one in probe.collectives]
    call_s = fit_call_s(overlaps)
    samples, residuals, notes = fit_collectives(nominal.comm, collectives, call_s, nominal.comm.trees)
    if not samples:
        return nominal.comm, residuals, notes
    points = sum(one.points for one in residuals)
    error = sum(one.error * one.points for one in residuals) / points
    comm = msgspec.structs.replace(
        nominal.comm,
        collectives=samples,
        contention=fit_contention(collectives),
        overlap_slowdown=fit_overlap(overlaps),
        comm_slowdown=fit_comm_slowdown(overlaps),
        spread=max(error, LEAST_SPREAD),
        call_s=call_s,
    )
    return comm, residuals, notes


def _unmeasured(crowding: dict[int, float], comm: Comm) -> list[str]:
    found = []
    if not crowding:
        found.append("no two ranks were measured on one node: they are taken not to be in each other's way")
    across = [one for one in comm.collectives if one.nodes > 1]
    if comm.collectives and not across:
        found.append("nothing was measured between nodes: links between them are the profile's")
    if across and not comm.contention:
        found.append("contention was not measured: groups that send at the same time share a link fairly")
    return found
