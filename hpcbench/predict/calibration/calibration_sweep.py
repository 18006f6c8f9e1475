"""The sweep of probes that measures a cluster: blocks of models, messages and overlaps, and trainings of libraries.

The default one measures models of every kind at usual sizes; that for a sweep measures the sweep's own blocks, messages
and overlaps. Both are ordinary sweeps of the same probes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil, floor
from typing import Any, NamedTuple

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import PARAMETER_DEFAULTS, RunSpec
from hpcbench.predict.cost_model import CostModel, UnmeasuredShapes, kernel_conditions, row_kernels
from hpcbench.predict.kernel_prices import KernelPrices
from hpcbench.predict.machine import Machine
from hpcbench.predict.message_prices import workload_key
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.probes.entry import COLLECTIVES, PROBE_BLOCKS
from hpcbench.strategies.strategy_entry import Library
from hpcbench.strategies.traffic import COMM_OPERATIONS, MessageShape, format_messages
from hpcbench.units import format_bytes, pluralize

_PROBE_STEPS = {"warmup_steps": 2, "steps": 8, "profile_steps": 0, "learning_rate": 0.001}
"""Steps of a probe before its measurements."""
_SEEDS_PER_CALIBRATION = 100
_MAX_NODES = 4
"""Latency and bandwidth between more nodes are extrapolated by the structure of the algorithms."""
_PACK = 8
_MESSAGE_BYTES = {"cpu": [1024 * 4**power for power in range(8)], "cuda": [4096 * 4**power for power in range(9)]}
"""Up to 16 MiB and to 256 MiB: links of GPUs are not saturated below some 128 MiB."""
_CONTENDED_BYTES = (2**18, 2**22)
_OVERLAPPED_BYTES = 2**22
MAX_SIZES_PER_GROUP = 12
"""Sizes of one operation of one group that are measured for a sweep; those between are interpolated."""
_WORKLOAD_FIELDS = (
    "model", "dataset", "input_size", "model_options", "precision", "channels_last", "cudnn_benchmark", "optimizer",
    "momentum", "partition", "environment",
)  # fmt: skip


class CalibrationWorkload(NamedTuple):
    """A model with its data set and batch size."""

    model: str
    dataset: str
    batch_size: int
    precision: str = "fp32"
    input_size: int | None = None

    def keys(self, samples: int | None = None) -> dict[str, Any]:
        """Return the parameters, with ``samples`` instead of the batch size."""
        size = samples or self.batch_size
        point: dict[str, Any] = {"model": self.model, "dataset": self.dataset, "batch_size": size}
        if self.input_size is not None:
            point["input_size"] = self.input_size
        return point | ({"precision": self.precision} if self.precision != "fp32" else {})


class DeviceWorkloads(NamedTuple):
    """The workloads for a kind of device: a step is long enough to be timed and short enough to be repeated."""

    layers: tuple[CalibrationWorkload, ...]
    """Workloads whose layers are of every kind that a shipped model has, in two and in three dimensions."""
    transformer: CalibrationWorkload
    """Workload of the strategies that do not split channels; it is one of ``layers``."""
    convolutional: CalibrationWorkload


_VIT, _VGG = CalibrationWorkload("vit", "cifar10", 32), CalibrationWorkload("vgg11", "cifar10", 16)
_IMAGES = (CalibrationWorkload("resnet18", "cifar10", 8), CalibrationWorkload("mobilenetv2", "cifar10", 8))
_VOLUMES = CalibrationWorkload("cosmoflow", "cosmoflow", 8, input_size=16)
_VIT_B16, _VGG_LARGE = CalibrationWorkload("vit_b16", "imagenet", 32), CalibrationWorkload("vgg11", "imagenet", 32)
_IMAGES_LARGE = (CalibrationWorkload("resnet18", "imagenet", 64), CalibrationWorkload("mobilenetv2", "imagenet", 64))
_VOLUMES_LARGE = CalibrationWorkload("cosmoflow", "cosmoflow", 4, input_size=64)
_HALF = (_VIT_B16._replace(precision="bf16"), CalibrationWorkload("resnet18", "imagenet", 64, "bf16"))
WORKLOADS = {
    "cpu": DeviceWorkloads((_VIT, _VGG, *_IMAGES, _VOLUMES), _VIT, _VGG),
    "cuda": DeviceWorkloads((_VIT_B16, _VGG_LARGE, *_IMAGES_LARGE, _VOLUMES_LARGE, *_HALF), _VIT_B16, _VGG_LARGE),
}


class CalibrationScale(NamedTuple):
    """Nodes and ranks on each."""

    nodes: int
    tasks_per_node: int

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.tasks_per_node

    def keys(self) -> dict[str, int]:
        """Return the parameters."""
        return {name: value for name, value in self._asdict().items() if value > 1}


def cluster_size(profile: ClusterProfile, partition: str | None, local_cores: int) -> CalibrationScale:
    """Nodes, at most ``_MAX_NODES``, and ranks that a node takes: a GPU each, or a core. This machine is one node."""
    queue = profile.partition(partition)
    node = queue.node
    runs_here = profile.scheduler.traits.runs_here
    tasks = node.devices if profile.device == "cuda" else local_cores if runs_here else node.cores
    return CalibrationScale(1 if runs_here else min(queue.max_nodes or _MAX_NODES, _MAX_NODES), tasks or 1)


def calibration_sweep_name(number: int, partition: str | None) -> str:
    """``calibration-3``, ``calibration-high-3``."""
    return f"calibration-{f'{partition}-' if partition else ''}{number}"


def calibration_sweep_toml(
    profile: ClusterProfile, partition: str | None, local_cores: int, number: int, budget_s: float = 20.0
) -> str:
    """The sweep of calibration ``number`` of a cluster: every number has its own runs.

    ``budget_s`` is what the measurements of one run take.
    """
    size, workloads = cluster_size(profile, partition, local_cores), WORKLOADS[profile.device]
    fixed = probe_settings(_SEEDS_PER_CALIBRATION * number, budget_s)
    if partition is not None:
        fixed["partition"] = partition
    points = [
        *_block_points(size, workloads, budget_s),
        *_message_points(size, profile.device, budget_s),
        *_training_points(size, workloads, profile.device),
    ]
    name, description = calibration_sweep_name(number, partition), f"what predictions for {profile.name} are made from"
    return probe_sweep_toml({"name": name, "description": description}, profile, fixed, points)


def probe_settings(seed: int, budget_s: float) -> dict[str, Any]:
    """Return the common parameters of probes whose measurements take ``budget_s`` each, about."""
    return {**_PROBE_STEPS, "seed": seed, "time_limit_min": max(10, ceil(1.5 * budget_s / 60) + 1)}


def probe_sweep_toml(
    settings: Mapping[str, str], profile: ClusterProfile, fixed: Mapping[str, Any], points: Iterable[Mapping[str, Any]]
) -> str:
    """Return the text of a sweep that measures a cluster, from its settings, common parameters and points."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in settings.items()]
    lines += ["", "[fixed]", *(f"{key} = {_toml_value(value)}" for key, value in fixed.items())]
    if not profile.scheduler.traits.runs_here:
        lines += ["", "[submit]", f"pack = {_PACK}"]
    for point in points:
        lines += ["", "[[include]]", *(f"{key} = {_toml_value(value)}" for key, value in point.items())]
    return "\n".join(lines) + "\n"


def _block_points(size: CalibrationScale, workloads: DeviceWorkloads, budget_s: float) -> Iterator[dict[str, Any]]:
    """Every model alone, at its batch and a quarter of it; two of them on a full node, and beside an all_reduce."""
    for workload in workloads.layers:
        for samples in (workload.batch_size, max(workload.batch_size // 4, 1)):
            yield {"strategy": PROBE_BLOCKS, **workload.keys(samples), "options": {"budget_s": budget_s}}
    for workload in (workloads.transformer, workloads.convolutional):
        if size.tasks_per_node > 1:
            side = {"tasks_per_node": size.tasks_per_node, "options": {"budget_s": budget_s}}
            yield {"strategy": PROBE_BLOCKS, **workload.keys(), **side}
        for world in strategy_scales(size, "cuda" if size.nodes == 1 else "cpu"):
            shape = MessageShape("all_reduce", world.ranks, world.tasks_per_node, 1, _OVERLAPPED_BYTES)
            options = {"overlaps": format_messages([shape]), "budget_s": budget_s}
            yield {"strategy": PROBE_BLOCKS, **workload.keys(), **world.keys(), "options": options}


def _message_points(size: CalibrationScale, device: str, budget_s: float) -> Iterator[dict[str, Any]]:
    for world in message_scales(size):
        if world.nodes > 1 and world.tasks_per_node > 1:
            # Groups of one rank on each node: one alone, then more of them together.
            rivals = sorted({1, 2, world.tasks_per_node})
            shapes = [
                MessageShape("all_reduce", world.nodes, 1, count, size_bytes)
                for count in rivals
                for size_bytes in _CONTENDED_BYTES
            ]
        else:
            operations = [name for name in COMM_OPERATIONS if name != "send" or world.ranks == 2]
            shapes = [
                MessageShape(operation, world.ranks, world.tasks_per_node, 1, size_bytes)
                for operation in operations
                for size_bytes in _MESSAGE_BYTES[device]
            ]
        options = {"messages": format_messages(shapes), "budget_s": budget_s}
        yield {"workload": COLLECTIVES, **world.keys(), "options": options}


def message_scales(size: CalibrationScale) -> list[CalibrationScale]:
    """Return scales for a group inside a node, a group between nodes, and several groups on the same nodes."""
    scales = [(1, 2), (1, 4), (2, 1), (4, 1), (2, max(min(size.tasks_per_node, 4), 2))]
    fitting = [(nodes, tasks) for nodes, tasks in scales if nodes <= size.nodes and tasks <= size.tasks_per_node]
    return [CalibrationScale(nodes, tasks) for nodes, tasks in fitting]


def strategy_scales(size: CalibrationScale, device: str) -> list[CalibrationScale]:
    """Two and four ranks: cores of a node are in each other's way, so on cpus each rank has its own node if it can."""
    per_node = min(size.tasks_per_node, 4) if device == "cuda" or size.nodes == 1 else 1
    worlds = []
    for ranks in (2, 4):
        tasks = min(ranks, per_node)
        if ranks % tasks == 0 and ranks // tasks <= size.nodes:
            worlds.append(CalibrationScale(ranks // tasks, tasks))
    return worlds


def _training_points(size: CalibrationScale, workloads: DeviceWorkloads, device: str) -> Iterator[dict[str, Any]]:
    """Every strategy of a library, in two sizes; a larger world with a larger batch, which separates the library's
    time per step from its time per computation."""
    workload = workloads.transformer
    for key, entry in STRATEGIES.items():
        runs = entry.library
        if runs is None:
            continue
        worlds = strategy_scales(size, device)
        if runs.one_process:
            worlds = [CalibrationScale(1, 1)] * 2 if size.tasks_per_node >= 2 else []
        for times, world in enumerate(worlds, 1):
            point = {"strategy": key, **_micro_batched_keys(runs, workload, times), **world.keys()}
            point |= {"devices_per_task": 2} if runs.one_process else {}
            yield point | ({"options": dict(runs.cpu_options)} if runs.cpu_options and device == "cpu" else {})


def _micro_batched_keys(runs: Library, workload: CalibrationWorkload, times: int) -> dict[str, Any]:
    """A pipeline's micro-batch is as large as the others' batch."""
    count = {} if runs.micro_batches == 1 else {"micro_batches": runs.micro_batches}
    return workload.keys(times * runs.batch_factor * workload.batch_size) | count


def _toml_value(value: Any) -> str:
    """Words, numbers and flat tables of them."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml_value(entry)}" for key, entry in value.items()) + " }"
    # JSON's words and numbers are TOML's, too.
    return msgspec.json.encode(value).decode()


class PricedRun(NamedTuple):
    """A configuration of a sweep, with what of it was not measured."""

    spec: RunSpec
    table: LayerTable
    prices: KernelPrices
    unmeasured: UnmeasuredShapes


class SweepProbe(NamedTuple):
    """A probe run for a sweep."""

    point: dict[str, Any]
    """Parameters in a sweep file."""
    what: str
    """Description that is printed."""
    runs: int
    """Configurations of the sweep that need it."""


def price_run(spec: RunSpec, table: LayerTable, machine: Machine) -> PricedRun:
    """Price a run, and return what of it has no measured time."""
    cost_model = CostModel(machine, spec)
    resolve_cost(spec.strategy).step(spec, table, cost_model)
    return PricedRun(spec, table, KernelPrices.of(machine.compute), cost_model.unmeasured)


def sweep_probes(runs: Sequence[PricedRun], budget_s: float) -> list[SweepProbe]:
    """Return the probes of blocks, messages and overlaps that the runs of a sweep need."""
    return [*_sweep_blocks(runs, budget_s), *_sweep_messages(runs, budget_s), *_sweep_overlaps(runs, budget_s)]


def _sweep_blocks(runs: Sequence[PricedRun], budget_s: float) -> Iterator[SweepProbe]:
    """Yield a probe for every model, number of samples and number of ranks side by side that lacks a time."""
    users: dict[tuple[Any, ...], list[PricedRun]] = defaultdict(list)
    points: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        conditions, mean = kernel_conditions(run.spec), run.spec.batch_size / run.spec.micro_batches
        for samples in sorted({max(1, floor(mean)), ceil(mean)}):
            kernels = (kernel for row in run.table.layers for kernel in row_kernels(run.spec, row, samples))
            if all(run.prices.price(kernel, conditions).is_measured for kernel in kernels):
                continue
            key = (*(msgspec.json.encode(getattr(run.spec, name)) for name in _WORKLOAD_FIELDS), samples, conditions)
            users[key].append(run)
            points[key] = _block_point(run.spec, samples)
    for key, point in points.items():
        what = f"{_blocks_text(point)}, {pluralize(point.get('tasks_per_node', 1), 'rank')} a node"
        yield SweepProbe(point | {"options": {"budget_s": budget_s}}, what, len(users[key]))


def _block_point(spec: RunSpec, samples: int) -> dict[str, Any]:
    point: dict[str, Any] = {"strategy": PROBE_BLOCKS, "batch_size": samples}
    for name in _WORKLOAD_FIELDS:
        if (value := getattr(spec, name)) != PARAMETER_DEFAULTS.get(name):
            point[name] = value
    return point | ({"tasks_per_node": spec.tasks_per_node} if spec.tasks_per_node > 1 else {})


def _blocks_text(point: Mapping[str, Any]) -> str:
    return f"blocks of {point['model']} on {point['dataset']}, {pluralize(point['batch_size'], 'sample')}"


def _sweep_messages(runs: Sequence[PricedRun], budget_s: float) -> Iterator[SweepProbe]:
    """Yield a probe for every placement in which messages lack a time."""
    needs: dict[tuple[Any, ...], set[MessageShape]] = defaultdict(set)
    users: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    points: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, run in enumerate(runs):
        spec = run.spec
        for shape in run.unmeasured.messages:
            if _can_be_built(shape, spec):
                key = (shape.nodes, spec.tasks_per_node, spec.partition, spec.environment)
                needs[key].add(shape)
                users[key].add(number)
                points.setdefault(key, _message_point(spec, shape.nodes))
    for key, point in points.items():
        by_group: dict[tuple[Any, ...], list[MessageShape]] = defaultdict(list)
        for shape in sorted(needs[key]):
            by_group[shape[:-1]].append(shape)
        shapes = [shape for group in by_group.values() for shape in _spaced(group)]
        largest = max(shape.payload_bytes for shape in shapes)
        what = (
            f"{len(shapes)} messages of {len(by_group)} operations and groups up to {format_bytes(largest)}, "
            f"{pluralize(point.get('nodes', 1), 'node')} x {point.get('tasks_per_node', 1)}"
        )
        options = {"messages": format_messages(shapes), "budget_s": budget_s}
        yield SweepProbe(point | {"options": options}, what, len(users[key]))


def _can_be_built(shape: MessageShape, spec: RunSpec) -> bool:
    """Whether groups of neighbours that fill nodes evenly are placed so."""
    groups = spec.tasks_per_node // shape.ranks_per_node
    is_even = shape.ranks % shape.ranks_per_node == 0 and groups > 0
    is_pair = shape.operation != "send" or shape.ranks == 2
    return is_even and is_pair and spec.devices_per_task == 1 and (shape.nodes == 1 or shape.rivals <= groups)


def _message_point(spec: RunSpec, nodes: int) -> dict[str, Any]:
    point: dict[str, Any] = {"workload": COLLECTIVES}
    settings = {"partition": spec.partition, "environment": spec.environment}
    point |= {name: value for name, value in settings.items() if value is not None}
    return point | CalibrationScale(nodes, spec.tasks_per_node).keys()


def _spaced(shapes: Sequence[MessageShape]) -> Sequence[MessageShape]:
    """Return at most ``MAX_SIZES_PER_GROUP``, the first and the last among them, spaced evenly by their order."""
    if len(shapes) <= MAX_SIZES_PER_GROUP:
        return shapes
    last = len(shapes) - 1
    places = {round(number * last / (MAX_SIZES_PER_GROUP - 1)) for number in range(MAX_SIZES_PER_GROUP)}
    return [shapes[place] for place in sorted(places)]


def _sweep_overlaps(runs: Sequence[PricedRun], budget_s: float) -> Iterator[SweepProbe]:
    """Yield a probe for every model, number of samples and placement whose overlap was not measured."""
    payloads: dict[tuple[Any, ...], dict[str, int]] = defaultdict(dict)
    users: dict[tuple[Any, ...], int] = defaultdict(int)
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
        points[key] = _block_point(spec, samples) | ({"nodes": spec.nodes} if spec.nodes > 1 else {})
    for key, point in points.items():
        nodes, tasks, sizes = point.get("nodes", 1), point.get("tasks_per_node", 1), payloads[key]
        shapes = [MessageShape(name, nodes * tasks, tasks, 1, sizes[name]) for name in sorted(sizes)]
        options = {"overlaps": format_messages(shapes), "budget_s": budget_s}
        what = f"{_blocks_text(point)}, beside {' and '.join(sorted(sizes))}, {pluralize(nodes, 'node')} x {tasks}"
        yield SweepProbe(point | {"options": options}, what, users[key])
