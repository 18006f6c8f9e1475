"""A calibration from whole runs at small scale alone, where nothing was measured part by part."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from math import log

import msgspec

from hpcbench.config.cluster import ClusterProfile
from hpcbench.oracle.calibration.evidence import Evidence, usable
from hpcbench.oracle.calibration.fit import digests, utc
from hpcbench.oracle.calibration.store import Calibration, Residual
from hpcbench.oracle.fitting.fit import fit
from hpcbench.oracle.fitting.observe import observations_of
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.nominal import nominal_machine

_LITTLE = 0.1
"""Share of the prior's variance that runs must remove for a number to be theirs."""


def fit_runs(
    profile: ClusterProfile,
    partition: str | None,
    machine: Machine,
    runs: Sequence[Evidence],
    made_at: datetime | None = None,
) -> Calibration:
    """``machine`` (of the profile, or an earlier calibration) moved to where ``runs`` are most probable.

    ``ConfigError`` where no run can be used.
    """
    good = usable(runs)
    tables = [(one.spec, one.table) for one in good]
    observed = observations_of(
        (one.result for one in good), lambda spec: next(table for known, table in tables if known == spec)
    )
    fitted = fit(machine, observed)
    nominal = nominal_machine(profile, partition)
    posterior = fitted.posterior
    assert posterior is not None, "a fit says how sure it is"
    residuals = [
        Residual(part="runs", what=one.run, points=1, error=abs(log(one.predicted_s / one.measured_s)))
        for one in posterior.residuals
    ]
    drawn = [one.name for one in posterior.parameters if one.learned < _LITTLE]
    notes = [f"the runs say nothing of {', '.join(drawn)}: as before"] if drawn else []
    return Calibration(
        cluster=profile.name,
        made_at=utc(made_at),
        partition=partition or profile.default_partition,
        intra_node=nominal.comm.intra_node,
        inter_node=nominal.comm.inter_node,
        machine=msgspec.structs.replace(fitted, notes=[]),
        residuals=residuals,
        notes=[*machine.notes, *notes],
        run_ids=sorted(one.result.run_id for one in good),
        environment_digests=digests(good),
    )
