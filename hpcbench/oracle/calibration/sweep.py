"""The sweep that a calibration runs, as the TOML that anybody could have written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from hpcbench.config.cluster import ClusterProfile

_SEEDS_A_ROUND = 100
_MOST_NODES = 4
"""Beyond them latency and bandwidth are extrapolated by the algorithms' structure."""
_LAUNCHES = 3
_MICRO_BATCHES = 4
_PACK = 8

_DATA = ("ddp", "zero1", "fsdp", "fairscale_oss", "fairscale_sddp", "fairscale_fsdp", "horovod")
_PIPELINES = ("model", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "pipedream")
_CHANNELS = ("filter", "channel", "spatial")
_ON_CPUS: dict[str, dict[str, Any]] = {"horovod": {"options": {"cycle_time_ms": 10}}}
"""Negotiating every millisecond, as it does by itself, takes a rank without a spare core more than its computation."""


class Workload(NamedTuple):
    """What is trained."""

    model: str
    dataset: str
    batch_size: int
    precision: str = "fp32"
    input_size: int | None = None

    def keys(self, times: int = 1) -> dict[str, Any]:
        """As parameters, with ``times`` the batch."""
        found: dict[str, Any] = {"model": self.model, "dataset": self.dataset, "batch_size": times * self.batch_size}
        if self.input_size is not None:
            found["input_size"] = self.input_size
        return found | ({"precision": self.precision} if self.precision != "fp32" else {})


class Workloads(NamedTuple):
    """What suits a device: each step long enough to be timed, and short enough to be repeated."""

    layers: tuple[Workload, ...]
    """Between them every kind of layer that a shipped model has, in two and in three dimensions."""
    transformer: Workload
    """Of ``layers``, too: every strategy but those that split channels."""
    convolutional: Workload


_VIT, _VGG = Workload("vit", "cifar10", 32), Workload("vgg11", "cifar10", 16)
_IMAGES = (Workload("resnet18", "cifar10", 8), Workload("mobilenetv2", "cifar10", 8))
_VOLUMES = Workload("cosmoflow", "cosmoflow", 8, input_size=16)
_VIT_B16, _VGG_LARGE = Workload("vit_b16", "imagenet", 32), Workload("vgg11", "imagenet", 32)
_IMAGES_LARGE = (Workload("resnet18", "imagenet", 64), Workload("mobilenetv2", "imagenet", 64))
_VOLUMES_LARGE = Workload("cosmoflow", "cosmoflow", 4, input_size=64)
_HALF = (_VIT_B16._replace(precision="bf16"), Workload("resnet18", "imagenet", 64, "bf16"))
WORKLOADS = {
    "cpu": Workloads((_VIT, _VGG, *_IMAGES, _VOLUMES), _VIT, _VGG),
    "cuda": Workloads((_VIT_B16, _VGG_LARGE, *_IMAGES_LARGE, _VOLUMES_LARGE, *_HALF), _VIT_B16, _VGG_LARGE),
}


class World(NamedTuple):
    """Nodes and ranks on each."""

    nodes: int
    tasks_per_node: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.tasks_per_node

    def keys(self) -> dict[str, int]:
        """As parameters."""
        return {name: value for name, value in self._asdict().items() if value > 1}


class Size(NamedTuple):
    """What a cluster has for a calibration."""

    nodes: int
    tasks_per_node: int


def size_of(profile: ClusterProfile, partition: str | None, local_cores: int) -> Size:
    """Nodes, at most ``_MOST_NODES``, and ranks that a node takes; a local machine is one node with its own cores."""
    node, queue = profile.node_of(partition), profile.partition(partition)
    if profile.scheduler.kind == "local":
        return Size(1, local_cores)
    tasks = node.devices if profile.device == "cuda" else node.cores
    return Size(min(queue.max_nodes or _MOST_NODES, _MOST_NODES), tasks or 1)


def sweep_name(number: int, partition: str | None) -> str:
    """``calibration-3``, ``calibration-high-3``."""
    return f"calibration-{f'{partition}-' if partition else ''}{number}"


def sweep_text(
    profile: ClusterProfile, partition: str | None, local_cores: int, number: int, budget_s: float = 20.0
) -> str:
    """The sweep of calibration ``number`` of a cluster: every number has its own runs.

    ``budget_s`` is what the measurements of one run take.
    """
    size, workloads = size_of(profile, partition, local_cores), WORKLOADS[profile.device]
    fixed: dict[str, Any] = {"warmup_steps": 2, "steps": 8, "profile_steps": 0, "learning_rate": 0.001,
                             "seed": _SEEDS_A_ROUND * number, "time_limit_min": 10}  # fmt: skip
    if partition is not None:
        fixed["partition"] = partition
    points = [
        *_probes(size, workloads, fixed["seed"], budget_s),
        *_trainings(strategy_worlds(size, profile.device), workloads, _ON_CPUS if profile.device == "cpu" else {}),
        *_one_process(size, workloads.transformer),
    ]
    lines = [
        f'name = "{sweep_name(number, partition)}"',
        f'description = "what predictions for {profile.name} are made from"',
    ]
    lines += ["", "[fixed]", *(f"{key} = {_toml(value)}" for key, value in fixed.items())]
    if profile.scheduler.kind != "local":
        lines += ["", "[submit]", f"pack = {_PACK}"]
    for point in points:
        lines += ["", "[[include]]", *(f"{key} = {_toml(value)}" for key, value in point.items())]
    return "\n".join(lines) + "\n"


def _probes(size: Size, workloads: Workloads, seed: int, budget_s: float) -> Iterator[dict[str, Any]]:
    for workload in workloads.layers:
        yield {"strategy": "probe_layers", **workload.keys(), "options": {"budget_s": budget_s}}
        # Launches differ by more than steps do, and everything else is told from what a lone rank takes.
        for launch in range(1, _LAUNCHES):
            yield {"strategy": "single", **workload.keys(), "seed": seed + launch}
    for world in collective_worlds(size):
        is_between = world.nodes > 1 and world.tasks_per_node == 1
        for launch in range(_LAUNCHES if is_between else 1):
            point = {"strategy": "probe_collectives", **workloads.transformer.keys(), **world.keys()}
            yield point | {"options": {"budget_s": budget_s}} | ({"seed": seed + launch} if launch else {})


def collective_worlds(size: Size) -> list[World]:
    """Inside a node, between nodes, and several groups on the same nodes."""
    inside = [World(1, tasks) for tasks in (2, 4) if tasks <= size.tasks_per_node]
    between = [World(nodes, 1) for nodes in (2, 4) if nodes <= size.nodes]
    shared = [World(2, min(size.tasks_per_node, 4))] if size.nodes >= 2 and size.tasks_per_node >= 2 else []
    return [*inside, *between, *shared]


def strategy_worlds(size: Size, device: str) -> list[World]:
    """Two and four ranks: cores of a node are in each other's way, so on cpus each rank has its own node if it can."""
    per_node = min(size.tasks_per_node, 4) if device == "cuda" or size.nodes == 1 else 1
    worlds = []
    for ranks in (2, 4):
        tasks = min(ranks, per_node)
        if ranks % tasks == 0 and ranks // tasks <= size.nodes:
            worlds.append(World(ranks // tasks, tasks))
    return worlds


def _trainings(
    worlds: Sequence[World], workloads: Workloads, more: Mapping[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Every strategy in every world; a larger world with a larger batch, so that what a library takes by the step is
    told from what it takes of the computation. A pipeline's micro-batch is as large as the others' batch."""
    for number, world in enumerate(worlds):
        for key in (*_DATA, "tensor"):
            yield {"strategy": key, **workloads.transformer.keys(number + 1), **world.keys(), **more.get(key, {})}
        for key in _PIPELINES:
            yield {"strategy": key, **world.keys(), **_micro_batches(workloads.transformer, number + 1, key)}
        for key in _CHANNELS:
            yield {"strategy": key, **workloads.convolutional.keys(number + 1), **world.keys()}


def _one_process(size: Size, workload: Workload) -> Iterator[dict[str, Any]]:
    """A library whose one process drives two devices."""
    if size.tasks_per_node >= 2:
        for times in (1, 2):
            yield {"strategy": "fairscale_pipe", "devices_per_task": 2, **_micro_batches(workload, times)}


def _micro_batches(workload: Workload, times: int, strategy: str = "") -> dict[str, Any]:
    count = {} if strategy == "model" else {"micro_batches": _MICRO_BATCHES}
    return workload.keys(times * _MICRO_BATCHES) | count


def _toml(value: Any) -> str:
    """Words, numbers and flat tables of them."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    # JSON's words and numbers are TOML's, too.
    return msgspec.json.encode(value).decode()
