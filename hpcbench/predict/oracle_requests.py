"""Validated requests to the oracle: recommendations for a model, and layouts of decoders on machines that were learned
from published runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.command import LayerPrecision
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.predict.candidate_points import DeviceAllocation
from hpcbench.predict.decoder.layout import Layout
from hpcbench.predict.decoder.layout_search import (
    SHARDED_SOFTWARE,
    SPLIT_SOFTWARE,
    LayoutRanking,
    LayoutWish,
    priced_only_reason,
    rank_layouts,
)
from hpcbench.predict.decoder.low_precision import RECIPES
from hpcbench.predict.decoder.machines import FittedMachine
from hpcbench.predict.fitted_decoders import device_of_profile, machine_of_profile, missing_machine_reason, run_point
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import MemoryFit
from hpcbench.predict.recommend import OBJECTIVES, Recommendation, recommend
from hpcbench.predict.trainers import Trainer
from hpcbench.results.results_tree import ResultsTree
from hpcbench.strategies.decoder_shapes import DecoderShape, named_shape, named_shapes
from hpcbench.strategies.layer_table import default_input_size
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point, single_device_run
from hpcbench.submit.plan import available_cores, partition_limits
from hpcbench.workloads.datasets import DATASETS
from hpcbench.workloads.models import MODELS, check_custom_model, is_custom_model


class RecommendRequest(NamedTuple):
    """The arguments of ``recommend``. One of the batch sizes is set; layouts of decoders have a default."""

    model: str
    dataset: str
    nodes: tuple[int, ...] = (1,)
    tasks_per_node: int | None = None
    input_size: int | None = None
    batch_size: int | None = None
    global_batch_size: int | None = None
    precision: str = "fp32"
    optimizer: str = "sgd"
    partition: str | None = None
    objective: str = "samples_per_s"

    def batch_problems(self, *, of_layouts: bool) -> list[ConfigError]:
        """The fault of the batch sizes; layouts have a default, an unknown model needs none."""
        given = [size for size in (self.batch_size, self.global_batch_size) if size is not None]
        has_model = not self.model or is_custom_model(self.model) or self.model in MODELS
        if len(given) == 1 or (not given and (of_layouts or not has_model)):
            return []
        fault = "both are given" if given else "neither is given"
        hint = "--batch-size is per replica, --global-batch-size of all replicas; the latter keeps the training equal"
        return [ConfigError(f"--batch-size or --global-batch-size: {fault}", hint=hint)]


def recommend_for(
    wish: RecommendRequest, profile: ClusterProfile, results: ResultsTree, model_folder: Path
) -> tuple[list[Recommendation], Forecast]:
    """A ranking for each number of nodes, and what it was made with.

    Raises ``ConfigErrors`` with everything that is wrong with ``wish``.
    """
    check_request(wish, profile, model_folder)
    base: dict[str, Any] = {"model": wish.model, "dataset": wish.dataset, "precision": wish.precision}
    base |= {"optimizer": wish.optimizer} if wish.optimizer != "sgd" else {}
    base |= {key: value for key in ("input_size", "partition") if (value := getattr(wish, key)) is not None}
    batch = {key: value for key in ("batch_size", "global_batch_size") if (value := getattr(wish, key)) is not None}
    forecast = Forecast(profile, results.cluster(profile.name), model_folder)
    per_node = wish.tasks_per_node or default_tasks_per_node(profile, wish.partition)
    limits = partition_limits(profile, wish.partition or profile.default_partition)
    worlds = [DeviceAllocation(nodes, per_node, batch) for nodes in sorted(set(wish.nodes))]
    return [recommend(base, world, limits, forecast, wish.objective) for world in worlds], forecast


def check_request(
    wish: RecommendRequest, profile: ClusterProfile, model_folder: Path, *, of_layouts: bool = False
) -> None:
    """Raise ``ConfigErrors`` with everything that is wrong with ``wish``."""
    if problems := _request_problems(wish, profile, model_folder, of_layouts):
        raise ConfigErrors(problems)
    if not of_layouts:
        _single_run(wish)


def _single_run(wish: RecommendRequest) -> RunSpec:
    """Return a run of one sample on one device; ``ConfigError`` where there is none."""
    run = single_device_run(wish.model, wish.dataset, wish.input_size)
    if isinstance(run, InfeasiblePoint):
        raise ConfigError(run.reason)
    return run


def default_tasks_per_node(profile: ClusterProfile, partition: str | None) -> int:
    """A task for each device; of machines without devices one a node, here one a core."""
    if profile.device == "cpu":
        return available_cores() if profile.scheduler.traits.runs_here else 1
    return profile.partition(partition).node.devices or 1


def _request_problems(
    wish: RecommendRequest, profile: ClusterProfile, model_folder: Path, of_layouts: bool
) -> list[HpcbenchError]:
    problems: list[HpcbenchError] = []
    if is_custom_model(wish.model):
        problems += [problem] if (problem := check_custom_model(wish.model, model_folder.resolve(), "--model")) else []
    elif wish.model not in (known_models := {*MODELS, *named_shapes()}):
        problems.append(ConfigError(f"unknown model {wish.model!r}", hint=did_you_mean(wish.model, known_models)))
    hints = get_type_hints(RunSpec)
    choices: dict[str, Any] = {
        "dataset": DATASETS, "precision": [*get_args(hints["precision"]), *(RECIPES if of_layouts else ())],
        "optimizer": get_args(hints["optimizer"]),
        "objective": OBJECTIVES, "partition": profile.partitions,
    }  # fmt: skip
    for name, known in choices.items():
        value = getattr(wish, name)
        if value is not None and value not in known:
            problems.append(ConfigError(f"unknown {name} {value!r}", hint=did_you_mean(value, known)))
    return [*problems, *wish.batch_problems(of_layouts=of_layouts)]


PRICED_SEQUENCE = 4096
"""Tokens of a sample of decoders that hpcbench does not train: as in published recipes of experts."""
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
    measured: dict[Layout, list[float]] = {}  # noqa: RUF012 - never changed
    """Measured step times of layouts, seconds, by ``anyones_layout``."""


def recommend_layouts(
    wish: RecommendRequest,
    profile: ClusterProfile,
    model_folder: Path,
    results: ResultsTree | None = None,
    trainer: Trainer | None = None,
) -> LayoutRecommendation | list[str]:
    """Rank layouts for each number of nodes; where nothing was learned of model or device, notes that state it.

    A calibration among ``results`` prices runs better than runs of others; a note then states that. With ``trainer``
    the layouts are those that it runs, priced by its software.

    Raises ``ConfigErrors`` with everything that is wrong with ``wish``, and ``ConfigError`` for a profile that names a
    machine without package data.
    """
    if wish.model not in named_shapes():
        return []
    if wish.partition is not None and wish.partition not in profile.partitions:
        check_request(wish, profile, model_folder, of_layouts=True)
    device = device_of_profile(profile, wish.partition)
    reason = missing_machine_reason(profile, wish.partition)
    if device is None or reason is not None:
        if wish.model not in MODELS:
            raise ConfigError(f"{reason}: {wish.model} is priced by its layouts alone", where=profile.name)
        how = "priced by the profile's figures, without context parallelism and mixed layouts"
        return [f"{reason}: {wish.model} is {how}"]
    check_request(wish, profile, model_folder, of_layouts=True)
    shape, sequence = named_shape(wish.model), wish.input_size or PRICED_SEQUENCE
    if wish.model in MODELS:
        sequence = _single_run(wish).input_size or default_input_size(wish.dataset)
    precision: LayerPrecision = wish.precision if wish.precision in RECIPES else "bf16"
    per_node = wish.tasks_per_node or default_tasks_per_node(profile, wish.partition)
    machine = machine_of_profile(profile, wish.partition, per_node)
    limits = partition_limits(profile, wish.partition or profile.default_partition)
    forecast = Forecast(profile, results.cluster(profile.name) if results is not None else None, model_folder)
    is_priced_only = wish.model not in MODELS or precision != "bf16"
    if trainer is None and not is_priced_only and forecast.machine(_single_run(wish)).depth != "nominal":
        return [f"{wish.model} is priced by the calibration of {profile.name}, without layouts that only others run"]
    rankings, batches = {}, []
    for nodes in sorted(set(wish.nodes)):
        if limits.max_nodes is not None and nodes > limits.max_nodes:
            raise ConfigError(f"{nodes} nodes, but {limits.partition} allows {limits.max_nodes}", where="--nodes")
        gpus = nodes * per_node
        batch = wish.global_batch_size
        if batch is None and wish.batch_size is None:
            batch = max(1, DEFAULT_TOKENS_PER_GPU * gpus // sequence)
            batches.append(batch)
        asked = LayoutWish(
            gpus=gpus, sequence=sequence, global_batch=batch, replica_batch=wish.batch_size, precision=precision
        )
        if trainer is not None:
            site = forecast.site(wish.partition)
            asked = replace(asked, software=trainer.software, can_run=trainer.can_run, site=site)
        run = {"dataset": wish.dataset, "input_size": sequence, "partition": wish.partition, "nodes": nodes}
        own_memory = partial(_own_memory_gib, forecast, limits, shape, {**run, "tasks_per_node": per_node})
        rankings[nodes] = rank_layouts(shape, machine, asked, own_memory=own_memory)
    notes = _layout_notes(machine, shape, sequence, precision, trainer)
    if batches:
        sizes = " and ".join(map(str, batches))
        notes.append(f"global batch {sizes}: {DEFAULT_TOKENS_PER_GPU} tokens a GPU, unless --global-batch-size sets it")
    return LayoutRecommendation(
        shape=shape,
        machine=machine,
        peak_flops_per_s=device.peak_flops_per_s.get("bf16", machine.device.peak_flops),
        tasks_per_node=per_node,
        rankings=rankings,
        notes=[*notes, "ranked by the time of a sample"],
    )


def _layout_notes(
    machine: FittedMachine, shape: DecoderShape, sequence: int, precision: LayerPrecision, trainer: Trainer | None
) -> list[str]:
    """Return the sources of the prices of layouts."""
    if trainer is not None:
        how = [f"priced by runs of {trainer.software}"]
    else:
        how = [
            f"priced by runs of torch's FSDP where parameters are whole, of {SHARDED_SOFTWARE} where they are sharded, "
            f"and of {SPLIT_SOFTWARE} where hpcbench cannot run the layout",
            "no published run is of hpcbench's own loop: the intervals are wider by the difference between programs",
        ]
    notes = [
        f"{machine.name}: {machine.provenance[0]}",
        *how,
        f"all layouts: {precision}, fused Adam, {sequence} tokens a sample",
        "rates between nodes are the profile's, not measured",
    ]
    if shape.experts is not None:
        notes.append("experts are priced by their work alone, with balanced routing: no run of them was learned from")
    if precision != "bf16":
        notes.append(f"products in {precision} are priced by the device's peak: no run of them was learned from")
    return notes


def _own_memory_gib(
    forecast: Forecast, limits: PartitionLimits, shape: DecoderShape, run: dict[str, Any], layout: Layout
) -> tuple[float, float] | None:
    """Return the peak of hpcbench's own run of ``layout``, as ``predict`` states it, and the limit."""
    if priced_only_reason(shape, layout) is not None:
        return None
    point = {**run, "model": shape.name, "precision": "bf16", "optimizer": "adamw", **run_point(layout)}
    spec = resolve_point({name: value for name, value in point.items() if value is not None}, limits)
    fit = spec if isinstance(spec, InfeasiblePoint) else forecast.memory_fit(spec)
    if not isinstance(fit, MemoryFit):
        return None
    limit = float("inf") if fit.memory_limit_bytes is None else fit.memory_limit_bytes / 2**30
    return fit.peak_memory_bytes / 2**30, limit
