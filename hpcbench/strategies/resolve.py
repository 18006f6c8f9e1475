"""Resolution of a sweep point to a run: degrees are filled in, limits are checked, and an infeasible point gets a
reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec

from hpcbench.config.command import COMMAND_PARAMETERS
from hpcbench.config.run_spec import DEGREE_NAMES, RunSpec, max_job_minutes
from hpcbench.strategies import catalog
from hpcbench.strategies.catalog import ALIASES, exclusion_reason, get_strategy
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.strategy_entry import StrategyEntry
from hpcbench.workloads.datasets import DATASETS, FIXED_SIZE_DATASETS, sample_shape
from hpcbench.workloads.models import MODELS, get_model

_EVERY_WORKLOAD = (
    "nodes", "tasks_per_node", "warmup_steps", "seed", "time_limit_min", "partition", "environment", "env", "node",
)  # fmt: skip
WORKLOAD_PARAMETERS: dict[str, tuple[str, ...]] = {
    catalog.COLLECTIVES: ("operation", "message_bytes", "group_tasks", "options", "steps", *_EVERY_WORKLOAD),
    "command": ("parameters", *COMMAND_PARAMETERS),
}
"""Parameters that a sweep may set for runs that are no trainings, by their workload."""


@dataclass(frozen=True)
class PartitionLimits:
    """The limits of a partition; ``None`` is not checked."""

    partition: str
    max_nodes: int | None = None
    only_node: str | None = None
    """Name of the machine, where jobs run on it alone."""
    cores_per_node: int | None = None
    cpus_per_task: int | None = None
    devices_per_node: int | None = None
    max_time_min: float | None = None
    min_nodes: int | None = None
    time_steps: tuple[tuple[int, float], ...] = ()
    """Largest number of nodes, and the minutes that jobs up to it may take."""
    max_node_hours: float | None = None
    all_devices_across_nodes: bool = False
    """Runs over several nodes must take all devices of each."""


@dataclass(frozen=True)
class InfeasiblePoint:
    """A point that cannot be run, and the rule that excludes it."""

    point: dict[str, Any]
    reason: str


def resolve_point(point: dict[str, Any], limits: PartitionLimits) -> RunSpec | InfeasiblePoint:
    """Resolve a point of a sweep to a run: fill in its degrees, and check it against all limits.

    A strategy's own degree takes the devices that the other degrees leave. Options that belong to other strategies or
    models of the sweep are dropped, and options at their default left out.

    Args:
        point: Parameters by name, those of ``options``, ``model_options`` and ``env`` in dictionaries. Names and types
            must be valid: ``load_sweep`` and ``check_names`` check them.
        limits: The limits of the partition that the run is for.

    Returns:
        The run, or the point with the reason why it is infeasible.

    Raises:
        ConfigError: The strategy or the model is unknown.
        msgspec.ValidationError: A parameter is unknown, of a wrong type, or out of its bounds.

    Example:
        >>> point = {"strategy": "1f1b", "model": "vgg11", "dataset": "cifar10", "batch_size": 8, "tasks_per_node": 2}
        >>> resolve_point(point | {"micro_batches": 4}, PartitionLimits("any")).pp_degree
        2
        >>> resolve_point(point | {"micro_batches": 3}, PartitionLimits("any")).reason
        'batch_size 8 cannot be cut into 3 equal micro_batches'
    """
    if point.get("workload") == "command":
        return _resolve_command(point, limits)
    if point.get("workload") == catalog.COLLECTIVES:
        return _resolve_collectives(point, limits)
    values = dict(point)
    _drop_foreign_options(values)
    if reason := _fill_degrees(values):
        return InfeasiblePoint(point, reason)
    if alias := ALIASES.get(values["strategy"]):
        values["strategy"] = alias.strategy
    if "global_batch_size" in values:
        # ``batch_size`` is per replica.
        total, replicas = values.pop("global_batch_size"), values.get("dp_degree", 1)
        if total % replicas:
            nearest = max(round(total / replicas), 1) * replicas
            reason = f"global_batch_size {total} cannot be shared evenly by {replicas} replicas: {nearest} can"
            return InfeasiblePoint(point, reason)
        values["batch_size"] = total // replicas
    model = get_model(values["model"])
    # Data of another kind is refused below for its kind, not for this length.
    takes_own_size = model.input_size is not None and model.kind == DATASETS[values["dataset"]].kind
    if takes_own_size and values.get("input_size") is None:
        values["input_size"] = model.input_size
    if values["dataset"] == "digits" and values.get("data") == "real":
        # The one name for what it always is: real, and resident on the device.
        del values["data"]
    spec = msgspec.convert(values, RunSpec)
    if spec.batch_size % spec.micro_batches:
        return InfeasiblePoint(
            point, f"batch_size {spec.batch_size} cannot be cut into {spec.micro_batches} equal micro_batches"
        )
    reason = (
        _input_exclusion(spec) or _target_exclusion(spec) or _limits_exclusion(spec, limits) or exclusion_reason(spec)
    )
    return InfeasiblePoint(point, reason) if reason else spec


def _resolve_command(point: dict[str, Any], limits: PartitionLimits) -> RunSpec | InfeasiblePoint:
    """Resolve a point of a sweep with ``[command]``, whose devices are the command's own affair."""
    values = dict(point)
    if values.get("options", {}).get("launch"):
        # One process a node drives the devices of all tasks.
        values["devices_per_task"] = values.get("devices_per_task", 1) * values.pop("tasks_per_node", 1)
    spec = msgspec.convert(values, RunSpec)
    reason = _limits_exclusion(spec, limits)
    return InfeasiblePoint(point, reason) if reason else spec


def _resolve_collectives(point: dict[str, Any], limits: PartitionLimits) -> RunSpec | InfeasiblePoint:
    """Resolve a point without a model; parameters of trainings belong to other points of the same sweep."""
    own = (*WORKLOAD_PARAMETERS[catalog.COLLECTIVES], "workload", "repeat")
    values = {name: value for name, value in point.items() if name in own}
    known = get_strategy(catalog.COLLECTIVES).options
    values["options"] = {name: value for name, value in values.get("options", {}).items() if name in known}
    values["strategy"] = catalog.COLLECTIVES
    values["dp_degree"] = values.get("nodes", 1) * values.get("tasks_per_node", 1)
    spec = msgspec.convert(values, RunSpec)
    reason = _limits_exclusion(spec, limits) or exclusion_reason(spec)
    return InfeasiblePoint(point, reason) if reason else spec


def _drop_foreign_options(point: dict[str, Any]) -> None:
    """Options that this strategy or model does not have belong to others of the same sweep; defaults are left out.

    A user's own model gets all of them.
    """
    entry = get_model(point["model"])
    for key, options in (("options", get_strategy(point["strategy"]).options), ("model_options", entry.options)):
        if point.get(key) and not (key == "model_options" and entry.own):
            point[key] = {
                name: options[name].kind(value)
                for name, value in point[key].items()
                if name in options and value != options[name].default
            }


def _fill_degrees(point: dict[str, Any]) -> str | None:
    """Set the degrees of ``point``, whose product is the number of devices; return the reason where none can be.

    A strategy's own degree takes the devices that the other degrees leave. Under a hybrid's name the ranks of one node
    share the model and the nodes are replicas, unless the point sets the degrees.
    """
    per_node = point.get("tasks_per_node", 1) * point.get("devices_per_task", 1)
    devices = point.get("nodes", 1) * per_node
    entry = get_strategy(point["strategy"])
    degrees = {degree: point[degree] for degree in DEGREE_NAMES if degree in point}
    for degree, value in degrees.items():
        if value > 1 and degree not in (entry.own_degree, *entry.hybrid):
            return f"{point['strategy']} has no {degree}: {value} given, 1 is right"
    alias = ALIASES.get(point["strategy"])
    if alias is not None and alias.needs_tp_degree and degrees.get("tp_degree", 1) == 1:
        return f"{point['strategy']} shares layers, too: set tp_degree to 2 or more, or use data_pipeline"
    open_degrees = [name for name in (entry.own_degree, "dp_degree" if alias else None) if name and name not in degrees]
    if len(open_degrees) == 2:
        shared = prod(degrees.values())
        degrees[open_degrees.pop(0)] = per_node // shared if per_node % shared == 0 else 1
    for degree in open_degrees:
        if devices % prod(degrees.values()) == 0:
            degrees[degree] = devices // prod(degrees.values())
    if prod(degrees.values()) == devices and point.get("devices_per_task", 1) > 1 and not entry.drives_several_devices:
        return (
            f"{point['strategy']} computes on one device per task, devices_per_task is {point['devices_per_task']}: "
            "set tasks_per_node instead"
        )
    if prod(degrees.values()) != devices:
        counts = ((point.get(key, 1), key) for key in ("nodes", "tasks_per_node", "devices_per_task"))
        world = " x ".join(f"{key} {count}" for count, key in counts if count > 1) or "nodes 1"
        problem = _degrees_problem(point["strategy"], entry, degrees, devices)
        return f"{world} = {devices} device{'s' if devices > 1 else ''}, but {problem}"
    point.update(degrees)
    return None


def _degrees_problem(key: str, entry: StrategyEntry, degrees: dict[str, int], devices: int) -> str:
    if entry.own_degree is None:
        return f"{key} runs on 1"
    product = prod(degrees.values())
    problem = " x ".join(f"{degree} {value}" for degree, value in degrees.items()) + " is not as many"
    if product < devices and devices % product:
        return f"{problem} and does not divide them"
    open_degree = next((name for name in (*entry.hybrid, entry.own_degree) if name not in degrees), None)
    if product > devices or open_degree is None:
        return problem
    return f"{problem}: {open_degree} {devices // product} as well is right"


def _input_exclusion(spec: RunSpec) -> str | None:
    dataset = DATASETS[spec.dataset]
    own_size = dataset.shape[-1]
    if not dataset.synthetic and spec.data != "device":
        return f"{spec.dataset} is real and small, it lies on the device: data = {spec.data!r} cannot change it"
    if spec.data == "real" and dataset.real is None:
        return f"{spec.dataset} has no files of its own: data is 'device', 'host' or 'files'"
    is_real = spec.data == "real" or not dataset.synthetic
    if is_real and spec.dataset in FIXED_SIZE_DATASETS and spec.input_size not in (None, own_size):
        return f"{spec.dataset} is real data of {own_size}: input_size {spec.input_size} cannot change it"
    entry = get_model(spec.model)
    if entry.kind not in (None, dataset.kind):
        return f"{spec.model} takes {entry.kind}; {spec.dataset} holds {dataset.kind}"
    size = sample_shape(spec.dataset, spec.input_size)[-1]
    if size < entry.min_size:
        return f"{spec.model} needs an input of {entry.min_size} or more; {spec.dataset} has {size}"
    if spec.global_batch_size > dataset.samples:
        return f"global batch {spec.global_batch_size} is more than the {dataset.samples} samples of {spec.dataset}"
    return None


def _target_exclusion(spec: RunSpec) -> str | None:
    if spec.target_accuracy is None:
        return None
    dataset = DATASETS[spec.dataset]
    if dataset.target == "values":
        return f"target_accuracy: {spec.dataset} is regressed on values, which has no accuracy"
    if dataset.synthetic and spec.data != "real":
        return (
            f"target_accuracy needs samples that are held out; {spec.dataset} is synthetic where data is {spec.data!r}"
        )
    return None


def _limits_exclusion(spec: RunSpec, limits: PartitionLimits) -> str | None:
    longest = max_job_minutes(spec.nodes, limits.max_time_min, limits.time_steps, limits.max_node_hours)
    depends_on_nodes = limits.time_steps or limits.max_node_hours is not None
    on_nodes = f" on {spec.nodes} node{'s' if spec.nodes > 1 else ''}" if depends_on_nodes else ""
    checks = (
        (spec.nodes, limits.max_nodes, "nodes"),
        (spec.tasks_per_node * spec.devices_per_task, limits.devices_per_node, "devices per node"),
        (spec.tasks_per_node * (limits.cpus_per_task or 1), limits.cores_per_node, "cores per node"),
        (spec.time_limit_min, longest, f"minutes of time limit{on_nodes}"),
    )
    if spec.node is not None and spec.nodes > 1:
        return f"node {spec.node} is for runs of one node, and nodes is {spec.nodes}"
    if limits.only_node is not None and spec.node not in (None, limits.only_node):
        return f"node {spec.node}, but {limits.partition} is this machine, {limits.only_node}"
    for wanted, allowed, what in checks:
        if wanted is not None and allowed is not None and wanted > allowed:
            return f"{wanted:g} {what}, but {limits.partition} allows {allowed:g}"
    if limits.min_nodes is not None and spec.nodes < limits.min_nodes:
        return f"{spec.nodes} nodes, but {limits.partition} takes jobs from {limits.min_nodes} on"
    used, available = spec.tasks_per_node * spec.devices_per_task, limits.devices_per_node
    if limits.all_devices_across_nodes and spec.nodes > 1 and available is not None and used < available:
        return f"{used} of {available} devices on each of {spec.nodes} nodes, but {limits.partition} wants all of them"
    return None


def single_device_run(
    model: str, dataset: str, input_size: int | None = None, model_options: dict[str, Any] | None = None
) -> RunSpec | InfeasiblePoint:
    """A run of a sample on one device, or why there is none."""
    point: dict[str, Any] = {"model": model, "dataset": dataset, "strategy": catalog.SINGLE_DEVICE, "batch_size": 1}
    optional = {"input_size": input_size, "model_options": model_options}
    return resolve_point(
        point | {name: value for name, value in optional.items() if value not in (None, {})}, PartitionLimits("any")
    )


def shipped_model_dataset_pairs() -> list[tuple[str, str]]:
    """Every shipped model with every data set that it takes, in the catalog's order."""
    return [
        (model, dataset)
        for model in MODELS
        for dataset in DATASETS
        if not isinstance(single_device_run(model, dataset), InfeasiblePoint)
    ]


def table_exclusion_reason(spec: RunSpec, table: LayerTable) -> str | None:
    """Return the reason why the strategy of the run cannot split the model of ``table``."""
    exclusion = get_strategy(spec.strategy).table_exclusion
    return None if exclusion is None else exclusion(spec, table)
