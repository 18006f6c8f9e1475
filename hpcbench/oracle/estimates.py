"""What a baseline says of a run, and the small runs that it may have seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from hpcbench.config.spec import DEGREES, RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.step import StepTime
from hpcbench.parallel.catalog import resolve_cost
from hpcbench.parallel.layers import LayerTable


class Known(NamedTuple):
    """A configuration that was measured."""

    spec: RunSpec
    step_time_s: float


class Estimate(NamedTuple):
    """Of one step, in seconds, and of the rank that holds most; ``None`` where a baseline says nothing of it."""

    step_time_s: float | None = None
    compute_s: float | None = None
    comm_s: float | None = None
    memory_bytes: float | None = None
    reason: str = ""
    """Why it says nothing at all."""


class Asked(NamedTuple):
    """What a baseline is asked about, and what it may look at."""

    spec: RunSpec
    table: LayerTable
    machine: Machine
    known: Sequence[Known] = ()
    """Measured runs at small scale; none of them may be the run itself."""


def alone(spec: RunSpec) -> RunSpec:
    """One replica's samples on one device."""
    degrees = dict.fromkeys(DEGREES, 1)
    return msgspec.structs.replace(
        spec, strategy="single", options={}, nodes=1, tasks_per_node=1, devices_per_task=1, **degrees
    )


def serial_step(asked: Asked) -> StepTime:
    """The step of ``alone``, by the oracle."""
    spec = alone(asked.spec)
    found: StepTime = resolve_cost("single").step(spec, asked.table, Clock(asked.machine, spec))
    return found
