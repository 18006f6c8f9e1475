"""Requests for the layouts of decoders on machines that were learned from published runs, and runs for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.profile_tables import DeviceConfig
from hpcbench.errors import ConfigError
from hpcbench.forecast.oracle_requests import RecommendRequest, check_request, default_tasks_per_node
from hpcbench.oracle.transformer.layout import Layout
from hpcbench.oracle.transformer.layout_search import (
    SHARDED_SOFTWARE,
    UNSHARDED_SOFTWARE,
    LayoutRanking,
    LayoutWish,
    rank_layouts,
)
from hpcbench.oracle.transformer.machines import FittedMachine, fitted_machine
from hpcbench.parallel.decoder_shapes import DecoderShape, named_shape, named_shapes
from hpcbench.parallel.layer_table import default_input_size
from hpcbench.submit.plan import partition_limits

DEFAULT_TOKENS_PER_GPU = 16_384
"""Tokens of a step whose batch is not given: two sequences of 8,192, as in NVIDIA's recipes for H100."""


class LayoutRecommendation(NamedTuple):
    """Rankings by number of nodes, and what they rest on."""

    shape: DecoderShape
    machine: FittedMachine
    peak_flops_per_s: float
    tasks_per_node: int
    rankings: dict[int, LayoutRanking]
    notes: list[str]


def recommend_layouts(
    wish: RecommendRequest, cluster_name: str, model_folder: Path
) -> LayoutRecommendation | list[str]:
    """Rank layouts for each number of nodes; where nothing was learned of model or device, notes that state it.

    Raises ``ConfigErrors`` with everything that is wrong with ``wish``, and ``ConfigError`` for a profile that names a
    machine without package data.
    """
    if wish.model not in named_shapes():
        return []
    profile, _ = load_cluster(cluster_name)
    if wish.partition is not None and wish.partition not in profile.partitions:
        return []
    device = _device(profile, wish.partition)
    if device is None or device.fitted is None:
        name = profile.node_of(wish.partition).device_type or "this device"
        return [
            f"no published run of {name} was learned from (the profile has no devices.{name}.fitted): {wish.model} is "
            "priced by the profile's figures, without context parallelism and mixed layouts"
        ]
    one = check_request(wish, profile, model_folder, needs_batch=False)
    shape, sequence = named_shape(wish.model), one.input_size or default_input_size(wish.dataset)
    per_node = wish.tasks_per_node or default_tasks_per_node(profile, wish.partition)
    machine = machine_of_profile(profile, wish.partition, per_node)
    limits = partition_limits(profile, wish.partition or profile.default_partition)
    rankings, batches = {}, []
    for nodes in sorted(set(wish.nodes)):
        if limits.max_nodes is not None and nodes > limits.max_nodes:
            raise ConfigError(f"{nodes} nodes, but {limits.partition} allows {limits.max_nodes}", where="--nodes")
        gpus = nodes * per_node
        batch = wish.global_batch_size
        if batch is None and wish.batch_size is None:
            batch = max(1, DEFAULT_TOKENS_PER_GPU * gpus // sequence)
            batches.append(batch)
        asked = LayoutWish(gpus=gpus, sequence=sequence, global_batch=batch, replica_batch=wish.batch_size)
        rankings[nodes] = rank_layouts(shape, machine, asked)
    return LayoutRecommendation(
        shape=shape,
        machine=machine,
        peak_flops_per_s=device.peak_flops_per_s.get("bf16", machine.device.peak_flops),
        tasks_per_node=per_node,
        rankings=rankings,
        notes=[*_notes(machine, sequence), *_batch_notes(batches), "ranked by the time of a sample"],
    )


def machine_of_profile(profile: ClusterProfile, partition: str | None, per_node: int) -> FittedMachine:
    """Return the fitted machine that a profile's device names, with the profile's links.

    An unknown name is a ConfigError with the valid ones.
    """
    device = _device(profile, partition)
    if device is None or device.fitted is None:
        raise ConfigError(f"the profile {profile.name} names no fitted machine", hint="devices.X.fitted")
    try:
        machine = fitted_machine(device.fitted)
    except ConfigError as error:
        name = profile.node_of(partition).device_type
        raise ConfigError(error.message, where=f"{profile.name}: devices.{name}.fitted", hint=error.hint) from error
    node = replace(machine.device, gpus=per_node)
    intra, inter = profile.links.intra_node, profile.links.inter_node
    if intra is not None:
        node = replace(node, nvlink_bytes_s=intra.bandwidth_bytes_per_s)
    if inter is not None:
        devices = profile.node_of(partition).devices or per_node
        node = replace(node, nic_bytes_s=inter.bandwidth_bytes_per_s * inter.per_node / devices)
    return msgspec.structs.replace(machine, device=node)


def _device(profile: ClusterProfile, partition: str | None) -> DeviceConfig | None:
    name = profile.node_of(partition).device_type
    return profile.devices.get(name) if name is not None else None


def _notes(machine: FittedMachine, sequence: int) -> list[str]:
    return [
        f"published runs: {machine.name}: {machine.provenance[0]}",
        f"whole parameters are priced as {UNSHARDED_SOFTWARE} trains, shards as {SHARDED_SOFTWARE}, in bf16 with fused "
        f"Adam, {sequence} tokens a sample; hpcbench's own loop is in none of these runs",
        "rates between nodes are the profile's, not measured; messages of context parallelism are not priced",
    ]


def _batch_notes(batches: list[int]) -> list[str]:
    if not batches:
        return []
    return [
        f"global batch {' and '.join(map(str, batches))} ({DEFAULT_TOKENS_PER_GPU} tokens a GPU): --global-batch-size"
    ]


def priced_only_reason(shape: DecoderShape, layout: Layout) -> str | None:
    """Return why hpcbench cannot run a layout yet; ``None`` where it can."""
    is_split = layout.tensor > 1 or layout.pipeline > 1
    if layout.context > 1:
        return "context parallelism"
    if layout.shards > 1 and is_split:
        return "fully sharded parameters inside tensor parallelism or pipelines"
    if layout.zero and is_split:
        return "ZeRO 1 across replicas of split models"
    if layout.tensor > 1 and layout.pipeline > 1:
        return "sequence parallelism inside pipelines"
    if layout.tensor > shape.kv_heads:
        return f"tensor degree above {shape.kv_heads} key-value heads"
    return None


def run_point(layout: Layout) -> dict[str, Any]:
    """Return the parameters of the run of a layout that hpcbench can run."""
    point: dict[str, Any] = {
        "batch_size": layout.micro_batch * layout.accumulation, "dp_degree": layout.data_degree,
        "micro_batches": layout.accumulation, "activation_checkpointing": layout.recompute == "full",
    }  # fmt: skip
    if layout.shards > 1:
        hybrid = {"options": {"shard_degree": layout.shards}} if layout.replicas > 1 else {}
        return {**point, "strategy": "fsdp", **hybrid}
    if layout.tensor > 1:
        return {
            **point, "strategy": "tensor", "tp_degree": layout.tensor, "options": {"sequence_parallel": True},
        }  # fmt: skip
    if layout.pipeline > 1:
        interleaved = {"strategy": "interleaved_1f1b", "options": {"virtual_stages": layout.chunks}}
        schedule = interleaved if layout.chunks > 1 else {"strategy": "1f1b"}
        return {**point, "pp_degree": layout.pipeline, **schedule}
    return {**point, "strategy": "zero1" if layout.zero else "ddp" if layout.gpus > 1 else "single"}
