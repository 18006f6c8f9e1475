"""Before a run is submitted: how long its step takes, what it is made of, what it holds, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import exp

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock, combined_spread
from hpcbench.oracle.cost import Cost
from hpcbench.oracle.fitting.propagate import ClockOf, spreads
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.neighbours import neighbours_of
from hpcbench.oracle.placement import group_of
from hpcbench.oracle.step import StepTime
from hpcbench.parallel.catalog import resolve_cost
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.mesh import Mesh
from hpcbench.parallel.spatial_limits import grid_of

_Z90 = 1.645
"""Of the standard normal distribution: 90 % lie within."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Where the step time lies with a probability of 90 %, if the machine's numbers are as uncertain as they say."""

    low: float
    high: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds of one steady step, split as measured results are, and bytes of the rank that holds most."""

    step_time_s: float
    interval: Interval
    compute_s: float
    comm_s: float
    exposed_comm_s: float
    bubble_fraction: float
    straggler_s: float
    samples_per_s: float
    peak_memory_bytes: int
    memory: Memory
    bound_by: str
    """``compute``, ``latency``, ``bandwidth``, ``bubble``, or ``memory`` where it does not fit."""
    fits: bool | None
    """``None`` where nobody says how much memory there is."""
    memory_limit_bytes: int | None = None
    depth: str
    """``nominal``, ``calibrated`` or ``fitted``."""
    source: str


def predict(
    spec: RunSpec, table: LayerTable, machine: Machine, clock_of: ClockOf = Clock, memory: Memory | None = None
) -> Prediction:
    """What a run will take. ``table`` is of its model, data set, input size and options.

    ``clock_of`` prices it where the runs are another library's; ``memory`` is what ``fullest`` says of them, for who
    knows it already.
    """
    cost: Cost = resolve_cost(spec.strategy)
    step = cost.step(spec, table, clock_of(machine, spec))
    memory = memory or fullest(spec, table, machine.device)
    peak = memory.total_bytes + round(machine.base_bytes)
    fits = None if machine.memory_bytes is None else peak <= machine.memory_bytes
    return Prediction(
        step_time_s=step.step_time_s,
        interval=_interval(spec, table, machine, step, clock_of),
        compute_s=step.compute_s,
        comm_s=step.comm_s,
        exposed_comm_s=step.exposed_comm_s,
        bubble_fraction=step.bubble_s / step.step_time_s if step.step_time_s else 0.0,
        straggler_s=step.straggler_s,
        samples_per_s=spec.global_batch_size / step.step_time_s if step.step_time_s else 0.0,
        peak_memory_bytes=peak,
        memory=memory,
        bound_by="memory" if fits is False else bound_by(step),
        fits=fits,
        memory_limit_bytes=None if machine.memory_bytes is None else round(machine.memory_bytes),
        depth=machine.depth,
        source=machine.source,
    )


def _interval(spec: RunSpec, table: LayerTable, machine: Machine, step: StepTime, clock_of: ClockOf) -> Interval:
    """By what runs left uncertain where the machine was fitted with runs, else by what its parts' numbers are."""
    if machine.posterior is not None:
        below, above = spreads(spec, table, machine, machine.posterior, clock_of)
    else:
        parts = [(step.compute_s, machine.compute.spread), (step.exposed_comm_s, machine.comm.spread)]
        below = above = combined_spread(parts, step.step_time_s)
    return Interval(low=step.step_time_s * exp(-_Z90 * below), high=step.step_time_s * exp(_Z90 * above))


def fullest(spec: RunSpec, table: LayerTable, device: str = "cuda") -> Memory:
    """What the device holds that holds most. Devices that one rank drives are one on a ``cpu``."""
    cost: Cost = resolve_cost(spec.strategy)
    if device == "cpu" and spec.devices_per_task > 1:
        held = together([cost.memory(spec, table, place) for place in range(spec.devices_per_task)])
    else:
        held = max((cost.memory(spec, table, rank) for rank in telling_ranks(spec)), key=lambda one: one.total_bytes)
    return msgspec.structs.replace(held, untouched_bytes=0) if device == "cpu" else held


def together(parts: Sequence[Memory]) -> Memory:
    """What several devices hold that share their memory."""
    names = Memory.__struct_fields__
    return Memory(**{name: sum(getattr(part, name) for part in parts) for name in names})


def bound_by(step: StepTime) -> str:
    """What takes most of the step."""
    parts = {
        "compute": step.compute_s + step.straggler_s,
        "latency": step.latency_s,
        "bandwidth": step.exposed_comm_s - step.latency_s,
        "bubble": step.bubble_s,
    }
    return max(parts, key=lambda name: parts[name])


def telling_ranks(spec: RunSpec) -> list[int]:
    """Ranks of one replica that differ in what they hold: of stages the first, the last and the middle.

    Of layers, heads and channels that are shared along ``tp`` the first rank has most. Of images it has the largest
    part, and a rank with neighbours on all sides the most halos.
    """
    mesh = Mesh.of(spec)
    stages = sorted({0, 1, mesh.pp // 2, mesh.pp - 1} & set(range(mesh.pp)))
    parts = {0, neighbours_of(grid_of(spec), group_of(spec, "sp")).place} if mesh.sp > 1 else {0}
    places = [range(1), stages, sorted(parts), range(1)]
    return sorted({mesh.rank(Mesh(*coordinates)) for coordinates in product(*places)})
