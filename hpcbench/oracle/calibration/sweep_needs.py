"""The probes for a sweep: the kernels and messages that price its runs and have no measured time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor
from typing import Any, NamedTuple

import msgspec

from hpcbench.config.run_spec import PARAMETER_DEFAULTS, RunSpec
from hpcbench.oracle.calibration.fit_kernels import part_share
from hpcbench.oracle.cost_model import CostModel, UnmeasuredShapes, kernel_conditions, row_kernels
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.measured_shapes import KernelConditions, MeasuredShapes, per_sample_sizes, workload_key
from hpcbench.oracle.strategies.base import resolve_cost
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.strategies.probes import PROBE_BLOCKS, PROBE_MESSAGES
from hpcbench.parallel.traffic import MessageShape, format_messages
from hpcbench.units import format_bytes, pluralize

CUTS = ("outputs", "inputs", "positions", "channels")
"""Ways in which ``probe_blocks`` cuts layers."""
MAX_SIZES_PER_GROUP = 12
"""Sizes of one operation of one group that are measured; those between are interpolated."""
_STEPS_BEFORE_MESSAGES = {"model": "vit", "dataset": "digits", "batch_size": 4}
"""Every run trains for some steps; the model is the same for all sweeps."""
_WORKLOAD_FIELDS = (
    "model", "dataset", "input_size", "model_options", "precision", "channels_last", "cudnn_benchmark", "optimizer",
    "momentum", "partition", "environment",
)  # fmt: skip


class PricedRun(NamedTuple):
    """A configuration of the sweep, with what it lacks."""

    spec: RunSpec
    table: LayerTable
    unmeasured: UnmeasuredShapes
    pass_s: float
    """Seconds of one micro-batch forward and backward through all layers."""
    measured: MeasuredShapes | None
    """Shapes that earlier probes measured."""


class SweepProbe(NamedTuple):
    """A probe run."""

    point: dict[str, Any]
    """Parameters in a sweep file."""
    what: str
    """Description that is printed."""
    runs: int
    """Configurations of the sweep that need it."""
    seconds: float
    """Predicted seconds of one repetition of the measurement."""

    @property
    def nodes(self) -> int:
        """Nodes of the run."""
        return int(self.point.get("nodes", 1))


def price_run(spec: RunSpec, table: LayerTable, machine: Machine) -> PricedRun:
    """Price a run, and return what of it has no measured time."""
    cost_model = CostModel(machine, spec)
    resolve_cost(spec.strategy).step(spec, table, cost_model)
    whole = CostModel(machine, spec)
    samples = spec.batch_size / spec.micro_batches
    passes_s = sum(whole.kernel_s(kernel) for row in table.layers for kernel in row_kernels(spec, row, samples))
    return PricedRun(spec, table, cost_model.unmeasured, passes_s, machine.measured)


def block_probes(runs: Sequence[PricedRun], budget_s: float) -> list[SweepProbe]:
    """Return a probe for every model, number of samples and number of ranks side by side that lacks a time."""
    shares: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    users: dict[tuple[Any, ...], int] = defaultdict(int)
    seconds: dict[tuple[Any, ...], float] = {}
    points: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        conditions = kernel_conditions(run.spec)
        mean = run.spec.batch_size / run.spec.micro_batches
        for samples in sorted({max(1, floor(mean)), ceil(mean)}):
            cuts = _missing_cuts(run, mean, samples)
            if cuts is None:
                continue
            key = (*(msgspec.json.encode(getattr(run.spec, name)) for name in _WORKLOAD_FIELDS), samples, conditions)
            shares[key] |= cuts
            users[key] += 1
            seconds[key] = max(seconds.get(key, 0.0), run.pass_s * samples / mean)
            points[key] = _block_point(run.spec, samples, conditions)
    return [_block_probe(point, shares[key], users[key], seconds[key], budget_s) for key, point in points.items()]


def _missing_cuts(run: PricedRun, mean: float, samples: int) -> set[int] | None:
    """Return the numbers of parts that lack a time, none where whole layers alone do; ``None`` where no probe helps."""
    lacking = {per_sample_sizes(kernel, mean) for kernel in run.unmeasured.kernels}
    lacking |= {per_sample_sizes(kernel, samples) for kernel in run.unmeasured.kernels}
    key = (workload_key(run.spec), samples, kernel_conditions(run.spec))
    # Parts that still lack a time in these numbers cannot be measured: some layers cannot be cut.
    measured_parts = {cuts.parts for cuts in (run.measured.cuts if run.measured else ()) if cuts[:-1] == key}

    def is_lacking(split: str, parts: int) -> bool:
        share = part_share(split, parts)
        return any(
            per_sample_sizes(kernel, samples) in lacking
            for row in run.table.layers
            for kernel in row_kernels(run.spec, row, samples, share)
        )

    degrees = {run.spec.tp_degree, run.spec.sp_degree} - {1} - measured_parts
    cuts = {parts for parts in degrees if any(is_lacking(split, parts) for split in CUTS)}
    return cuts if cuts or is_lacking("whole", 1) else None


def _block_point(spec: RunSpec, samples: int, conditions: KernelConditions) -> dict[str, Any]:
    point: dict[str, Any] = {"strategy": PROBE_BLOCKS, "batch_size": samples}
    for name in _WORKLOAD_FIELDS:
        if (value := getattr(spec, name)) != PARAMETER_DEFAULTS.get(name):
            point[name] = value
    point |= {"tasks_per_node": conditions.ranks_per_node} if conditions.ranks_per_node > 1 else {}
    return point | {"options": {"accumulates": True} if conditions.accumulates else {}}


def _block_probe(point: dict[str, Any], shares: set[int], users: int, seconds: float, budget_s: float) -> SweepProbe:
    options = point["options"] | {"budget_s": budget_s}
    if shares:
        options["shares"] = ",".join(map(str, sorted(shares)))
    what = f"{_blocks_text(point)}, {pluralize(point.get('tasks_per_node', 1), 'rank')} a node"
    if options.get("accumulates"):
        what += ", gradients accumulated"
    if shares:
        what += f", layers in {' and '.join(map(str, sorted(shares)))} parts"
    return SweepProbe(point | {"options": options}, what, users, seconds)


def _blocks_text(point: dict[str, Any]) -> str:
    return f"blocks of {point['model']} on {point['dataset']}, {pluralize(point['batch_size'], 'sample')}"


def overlap_probes(runs: Sequence[PricedRun], budget_s: float) -> list[SweepProbe]:
    """Return a probe for every model, number of samples and placement whose overlap was not measured."""
    payloads: dict[tuple[Any, ...], dict[str, int]] = defaultdict(dict)
    users: dict[tuple[Any, ...], int] = defaultdict(int)
    seconds: dict[tuple[Any, ...], float] = {}
    points: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        spec, samples = run.spec, run.spec.batch_size // run.spec.micro_batches
        # Blocks beside collectives of a group that is not all ranks, or of one process, cannot be built.
        calls = [call for call in run.unmeasured.overlaps if call.group_size == spec.ranks]
        if not calls or spec.devices_per_task > 1 or samples < 1:
            continue
        key = (workload_key(spec), samples, spec.nodes, spec.tasks_per_node, spec.partition, spec.environment)
        for call in calls:
            payloads[key][call.operation] = max(call.payload_bytes, payloads[key].get(call.operation, 0))
        users[key] += 1
        seconds[key] = max(seconds.get(key, 0.0), run.pass_s)
        conditions = KernelConditions(spec.tasks_per_node, False, spec.channels_last, spec.cudnn_benchmark)
        points[key] = _block_point(spec, samples, conditions) | ({"nodes": spec.nodes} if spec.nodes > 1 else {})
    return [_overlap_probe(point, payloads[key], users[key], seconds[key], budget_s) for key, point in points.items()]


def _overlap_probe(
    point: dict[str, Any], payloads: Mapping[str, int], users: int, seconds: float, budget_s: float
) -> SweepProbe:
    nodes, tasks = point.get("nodes", 1), point.get("tasks_per_node", 1)
    shapes = [MessageShape(name, nodes * tasks, tasks, 1, payloads[name]) for name in sorted(payloads)]
    options = {"overlaps": format_messages(shapes), "budget_s": budget_s}
    what = f"{_blocks_text(point)}, beside {' and '.join(sorted(payloads))}, {pluralize(nodes, 'node')} x {tasks}"
    # Each of the three readings takes about a pass and its collectives.
    return SweepProbe(point | {"options": options}, what, users, 4 * seconds * len(shapes))


def message_probes(runs: Sequence[PricedRun], budget_s: float) -> list[SweepProbe]:
    """Return a probe for every placement in which messages lack a time."""
    needs: dict[tuple[int, int, str | None, str | None], dict[MessageShape, float]] = defaultdict(dict)
    users: dict[tuple[int, int, str | None, str | None], int] = defaultdict(int)
    points: dict[tuple[int, int, str | None, str | None], dict[str, Any]] = {}
    for run in runs:
        spec, places = run.spec, set[int]()
        for shape, seconds in run.unmeasured.messages.items():
            if _can_be_built(shape, spec):
                key = (shape.nodes, spec.tasks_per_node, spec.partition, spec.environment)
                needs[key][shape] = max(seconds, needs[key].get(shape, 0.0))
                points.setdefault(key, _message_point(spec, shape.nodes))
                places.add(shape.nodes)
        for nodes in places:
            users[nodes, spec.tasks_per_node, spec.partition, spec.environment] += 1
    return [_message_probe(point, needs[key], users[key], budget_s) for key, point in points.items()]


def _can_be_built(shape: MessageShape, spec: RunSpec) -> bool:
    """Whether groups of neighbours that fill nodes evenly are placed so."""
    groups = spec.tasks_per_node // shape.ranks_per_node
    is_even = shape.ranks % shape.ranks_per_node == 0 and groups > 0
    is_pair = shape.operation != "send" or shape.ranks == 2
    return is_even and is_pair and spec.devices_per_task == 1 and (shape.nodes == 1 or shape.rivals <= groups)


def _message_point(spec: RunSpec, nodes: int) -> dict[str, Any]:
    point: dict[str, Any] = {"strategy": PROBE_MESSAGES, **_STEPS_BEFORE_MESSAGES}
    settings = {"partition": spec.partition, "environment": spec.environment}
    scale = {"nodes": nodes, "tasks_per_node": spec.tasks_per_node}
    point |= {name: value for name, value in settings.items() if value is not None}
    return point | {name: value for name, value in scale.items() if value > 1}


def _message_probe(
    point: dict[str, Any], needs: Mapping[MessageShape, float], users: int, budget_s: float
) -> SweepProbe:
    by_group: dict[tuple[Any, ...], list[MessageShape]] = defaultdict(list)
    for shape in sorted(needs):
        by_group[shape[:-1]].append(shape)
    shapes = [shape for group in by_group.values() for shape in _spaced(group)]
    largest = max(shape.payload_bytes for shape in shapes)
    nodes, tasks = point.get("nodes", 1), point.get("tasks_per_node", 1)
    what = (
        f"{len(shapes)} messages of {len(by_group)} operations and groups up to {format_bytes(largest)}, "
        f"{nodes} node{'s' * (nodes > 1)} x {tasks}"
    )
    options = {"messages": format_messages(shapes), "budget_s": budget_s}
    return SweepProbe(point | {"options": options}, what, users, sum(needs[shape] for shape in shapes))


def _spaced(shapes: Sequence[MessageShape]) -> Iterable[MessageShape]:
    """Return at most ``MAX_SIZES_PER_GROUP``, the first and the last among them, spaced evenly by their order."""
    if len(shapes) <= MAX_SIZES_PER_GROUP:
        return shapes
    last = len(shapes) - 1
    places = {round(number * last / (MAX_SIZES_PER_GROUP - 1)) for number in range(MAX_SIZES_PER_GROUP)}
    return [shapes[place] for place in sorted(places)]
