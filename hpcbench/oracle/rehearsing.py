"""A run that rehearses another cluster: its devices here, this cluster's links."""

from __future__ import annotations

import msgspec

from hpcbench.oracle.machine import Machine
from hpcbench.parallel.kernel import Compute, Rehearsed


def rehearsing(here: Machine, there: Machine) -> Machine:
    """What a rehearsal of ``there`` takes on ``here``; of memory nothing can be said."""
    return msgspec.structs.replace(
        here,
        compute=alone(there),
        strategies={},
        straggling=0.0,
        memory_bytes=None,
        source=f"{here.source}; computation rehearsed: {there.source}",
        notes=[*here.notes, *there.notes],
    )


def rehearsed(there: Machine) -> Rehearsed:
    """What the worker is told."""
    return Rehearsed(cluster=there.cluster, source=there.source, compute=alone(there))


def alone(there: Machine) -> Compute:
    """The device of ``there`` without what its ranks do to each other and its overheads: those are real here."""
    return msgspec.structs.replace(there.compute, crowding={}, step_s=0.0)
