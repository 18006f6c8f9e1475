"""Baseline predictors against which the oracle is scored: published models and simple scaling rules.

The published models are evaluated as in their papers: layers are timed on one device and their times divided,
nothing overlaps, and a link has its nominal latency and bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2, prod
from statistics import linear_regression, median
from typing import NamedTuple

import msgspec

from hpcbench.config.run_spec import DEGREE_NAMES, RunSpec
from hpcbench.oracle import published_formulas as formulas
from hpcbench.oracle.collective_formulas import HockneyLink
from hpcbench.oracle.cost_model import CostModel, row_kernels, update_kernels
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.pipeline_rank import PipelineRank
from hpcbench.oracle.placement import GroupPlacement, are_on_one_node, place_group
from hpcbench.oracle.published_formulas import (
    DdlbenchLink,
    ParadlJob,
    ParadlLayer,
    ParadlLink,
    ddlbench_gpipe_comm_s,
    ddlbench_gpipe_compute_s,
    ddlbench_horovod_step_s,
)
from hpcbench.oracle.step_time import StepBreakdown
from hpcbench.oracle.strategies.base import resolve_cost
from hpcbench.oracle.tensor_sizes import FP32_BYTES, activation_number_bytes, parameter_bytes
from hpcbench.parallel import layer_table
from hpcbench.parallel.catalog import options_with_defaults
from hpcbench.parallel.gradient_buckets import MIB
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.strategies.pipeline import pipeline_layout
from hpcbench.parallel.strategies.spatial import spatial_split_of_run


class MeasuredRun(NamedTuple):
    """A configuration that was measured."""

    spec: RunSpec
    step_time_s: float


class BaselineEstimate(NamedTuple):
    """Of one step, in seconds, and of the rank that holds most; ``None`` where a baseline says nothing of it."""

    step_time_s: float | None = None
    compute_s: float | None = None
    comm_s: float | None = None
    memory_bytes: float | None = None
    reason: str = ""
    """Why it says nothing at all."""


class BaselineRequest(NamedTuple):
    """What a baseline is asked about, and what it may look at."""

    spec: RunSpec
    table: LayerTable
    machine: Machine
    known: Sequence[MeasuredRun] = ()
    """Measured runs at small scale; none of them may be the run itself."""


def single_device_spec(spec: RunSpec) -> RunSpec:
    """One replica's samples on one device."""
    degrees = dict.fromkeys(DEGREE_NAMES, 1)
    return msgspec.structs.replace(
        spec, strategy="single", options={}, nodes=1, tasks_per_node=1, devices_per_task=1, **degrees
    )


def single_device_step(asked: BaselineRequest) -> StepBreakdown:
    """The step of ``alone``, by the oracle."""
    spec = single_device_spec(asked.spec)
    found: StepBreakdown = resolve_cost("single").step(spec, asked.table, CostModel(asked.machine, spec))
    return found


_PARADL_SPLIT_KINDS = ("Conv1d", "Conv2d", "Conv3d", "Linear")
"""Kinds of layers that filter and channel split; all others run whole, as in the authors' lists of layers."""


def paradl_baseline(asked: BaselineRequest) -> BaselineEstimate:
    """What the paper's table III says of the run, with its memory; why it says nothing, where it has no row for it."""
    spec = asked.spec
    formula = _PARADL_ESTIMATES.get(spec.strategy)
    if formula is None:
        return BaselineEstimate(reason=f"ParaDL has no formula for {spec.strategy}")
    if formula in (_estimate_pipeline, _estimate_model) and (
        spec.dp_degree * spec.tp_degree > 1 or pipeline_layout(spec).replicas
    ):
        return BaselineEstimate(reason="ParaDL has no formula for pipelines with replicas or split layers")
    found = formula(asked)
    return BaselineEstimate(found.epoch_s, found.compute_s, found.comm_s, found.memory_bytes)


def paradl_layers(asked: BaselineRequest, split: Sequence[bool]) -> list[ParadlLayer]:
    """The table's rows as layers: times of one device at the run's micro-batch, per sample.

    ``split`` tells which rows the strategy splits.
    """
    spec = single_device_spec(asked.spec)
    clock, samples = CostModel(asked.machine, spec), spec.batch_size / spec.micro_batches
    found = []
    for row, is_split in zip(asked.table.layers, split, strict=True):
        passes = row_kernels(spec, row, samples)
        found.append(
            ParadlLayer(
                input_items=prod(row.input_shape),
                output_items=row.output_bytes / FP32_BYTES,
                weight_items=row.parameters,
                forward_s=clock.kernel_s(passes.forward) / samples,
                backward_s=clock.kernel_s(passes.backward) / samples,
                update_s=sum(map(clock.kernel_s, update_kernels(spec, [row.parameters * FP32_BYTES]))),
                halo_items=halo_items(row),
                is_split=is_split,
            )
        )
    return found


def halo_items(row: layer_table.LayerRow) -> float:
    """Of the input and of the output's gradient, what one neighbour needs of a sample that is split along its last dim.

    C floor((K - 1) / 2) times the extents of the other dims, of each.
    """
    kernel = row.attributes.get("kernel_size", 1)
    width = int(kernel[-1] if isinstance(kernel, list) else kernel) - 1
    return width // 2 * (prod(row.input_shape[:-1]) + prod(row.output_shape[:-1]))


def _paradl_job(asked: BaselineRequest, split: Sequence[bool] | None = None) -> ParadlJob:
    batch = asked.spec.global_batch_size
    whole = [True] * len(asked.table.layers)
    return ParadlJob(
        batch, batch, paradl_layers(asked, whole if split is None else split), activation_number_bytes(asked.spec)
    )


def _paradl_link(asked: BaselineRequest, group: GroupPlacement) -> ParadlLink:
    """The narrowest link of a ring."""
    comm = asked.machine.comm
    return ParadlLink(*(comm.intra_node if group.nodes == 1 else comm.inter_node))


def _estimate_serial(asked: BaselineRequest) -> formulas.ParadlEstimate:
    return formulas.paradl_serial(_paradl_job(asked))


def _estimate_data(asked: BaselineRequest) -> formulas.ParadlEstimate:
    return formulas.paradl_data(
        _paradl_job(asked), asked.spec.dp_degree, _paradl_link(asked, place_group(asked.spec, "dp"))
    )


def _estimate_filter(asked: BaselineRequest) -> formulas.ParadlEstimate:
    spec = asked.spec
    job = _paradl_job(asked, [row.kind in _PARADL_SPLIT_KINDS for row in asked.table.layers])
    outer, inner = place_group(spec, "dp"), _paradl_link(asked, place_group(spec, "tp"))
    return formulas.paradl_data_filter(
        job, spec.dp_degree, spec.tp_degree, inner, _paradl_link(asked, outer), outer.rivals
    )


def _estimate_spatial(asked: BaselineRequest) -> formulas.ParadlEstimate:
    spec = asked.spec
    end = spatial_split_of_run(spec, asked.table).end if spec.sp_degree > 1 else len(asked.table.layers)
    job = _paradl_job(asked, [place < end for place in range(len(asked.table.layers))])
    outer, inner = place_group(spec, "dp"), _paradl_link(asked, place_group(spec, "sp"))
    return formulas.paradl_data_spatial(
        job, spec.dp_degree, spec.sp_degree, inner, _paradl_link(asked, outer), outer.rivals
    )


def _paradl_stages(asked: BaselineRequest, job: ParadlJob) -> list[list[ParadlLayer]]:
    return [[job.layers[row] for row in own] for own in PipelineRank(asked.spec, asked.table, 0).rows]


def _estimate_pipeline(asked: BaselineRequest) -> formulas.ParadlEstimate:
    job = _paradl_job(asked)
    wire = _paradl_link(asked, place_group(asked.spec, "pp"))
    return formulas.paradl_pipeline(job, _paradl_stages(asked, job), asked.spec.micro_batches, wire)


def _estimate_model(asked: BaselineRequest) -> formulas.ParadlEstimate:
    """One segment after another, and one update."""
    job, parts = _paradl_job(asked), asked.spec.micro_batches
    still = [[layer._replace(update_s=0.0) for layer in stage] for stage in _paradl_stages(asked, job)]
    part = job._replace(samples=job.samples / parts, batch=job.batch / parts)
    wire = _paradl_link(asked, place_group(asked.spec, "pp"))
    one = formulas.paradl_pipeline(part, still, 1, wire)
    update_s = max(sum(layer.update_s for layer in stage) for stage in _paradl_stages(asked, job))
    return formulas.ParadlEstimate(parts * one.compute_s + update_s, parts * one.comm_s, one.memory_bytes)


_PARADL_ESTIMATES: dict[str, Callable[[BaselineRequest], formulas.ParadlEstimate]] = {
    "single": _estimate_serial,
    "ddp": _estimate_data,
    "horovod": _estimate_data,
    "filter": _estimate_filter,
    "channel": _estimate_filter,
    "spatial": _estimate_spatial,
    "model": _estimate_model,
    "gpipe": _estimate_pipeline,
    "1f1b": _estimate_pipeline,
    "fairscale_pipe": _estimate_pipeline,
}


_DDLBENCH_DATA, _DDLBENCH_PIPELINES = ("ddp", "horovod"), ("gpipe", "fairscale_pipe", "model")
_FUSION_OPTIONS = {"ddp": "bucket_cap_mb", "horovod": "fusion_threshold_mb"}


def ddlbench_baseline(asked: BaselineRequest) -> BaselineEstimate:
    """Equation 5.1 for replicas, 6.1 and 6.2 for GPipe, and of one micro-batch for layers that are split over ranks."""
    spec = asked.spec
    if spec.strategy in _DDLBENCH_DATA:
        return _ddlbench_data(asked)
    if spec.strategy not in _DDLBENCH_PIPELINES:
        return BaselineEstimate(reason=f"DDLBench has no equation for {spec.strategy}")
    if spec.dp_degree * spec.tp_degree > 1 or pipeline_layout(spec).replicas:
        return BaselineEstimate(reason="DDLBench has no equation for pipelines with replicas or split layers")
    return _ddlbench_gpipe(asked)


def _ddlbench_data(asked: BaselineRequest) -> BaselineEstimate:
    """The links of the ring are all taken to be its slowest, which is what its steps wait for."""
    spec = asked.spec
    workers = spec.dp_degree
    group = place_group(spec, "dp")
    comm = asked.machine.comm
    link = _ddlbench_link(comm.intra_node if group.nodes == 1 else comm.inter_node)
    threshold = float(options_with_defaults(spec)[_FUSION_OPTIONS[spec.strategy]]) * MIB
    replica_s, sent = single_device_step(asked).step_time_s, sum(parameter_bytes(spec, asked.table))
    step_s = ddlbench_horovod_step_s(replica_s * workers, [link] * workers, sent, threshold)
    return BaselineEstimate(step_s, replica_s, step_s - replica_s)


def _ddlbench_gpipe(asked: BaselineRequest) -> BaselineEstimate:
    spec = asked.spec
    sequential_s, parts = single_device_step(asked).step_time_s, spec.micro_batches
    run, comm = PipelineRank(spec, asked.table, 0), asked.machine.comm
    transfers_s = []
    for place in range(spec.pp_degree - 1):
        wire = comm.intra_node if are_on_one_node(spec, "pp", place, place + 1) else comm.inter_node
        link = _ddlbench_link(wire)
        size = spec.batch_size / parts * run.boundary_bytes(place)
        transfers_s.append(link.latency_s + size / link.bandwidth_bytes_per_s)
    if spec.strategy == "model":
        compute_s, comm_s = sequential_s, parts * ddlbench_gpipe_comm_s(transfers_s, 1)
    else:
        compute_s = ddlbench_gpipe_compute_s(sequential_s, spec.pp_degree, parts)
        comm_s = ddlbench_gpipe_comm_s(transfers_s, parts)
    return BaselineEstimate(compute_s + comm_s, compute_s, comm_s)


def _ddlbench_link(wire: HockneyLink) -> DdlbenchLink:
    return DdlbenchLink(wire.latency_s, 1.0 / wire.beta_s_per_byte if wire.beta_s_per_byte else float("inf"))


_SCALE_INDEPENDENT_KEYS = (
    "model", "model_options", "dataset", "input_size", "strategy", "options", "batch_size", "micro_batches",
    "precision", "compile", "activation_checkpointing", "channels_last", "optimizer", "momentum", "data",
)  # fmt: skip
"""Parameters in which a run and a smaller one must agree to be the same at two scales."""
_PAIR_DEVICES = 2
"""Ranks from which perfect scaling is reckoned."""


def compute_only_baseline(asked: BaselineRequest) -> BaselineEstimate:
    """A replica's computation on one device, shared evenly by its devices: as if nothing had to be passed."""
    spec = asked.spec
    compute_s = single_device_step(asked).compute_s / (spec.devices / spec.dp_degree)
    return BaselineEstimate(compute_s, compute_s, 0.0)


def constant_time_baseline(asked: BaselineRequest) -> BaselineEstimate:
    """The step time of the largest scale that was measured stays."""
    known = smaller_runs(asked)
    if not known:
        return BaselineEstimate(reason=_no_run_reason(asked))
    largest = max(one.spec.devices for one in known)
    return BaselineEstimate(median(one.step_time_s for one in known if one.spec.devices == largest))


def perfect_scaling_baseline(asked: BaselineRequest) -> BaselineEstimate:
    """The samples per second and device of two devices stay."""
    known = [one for one in smaller_runs(asked) if one.spec.devices == _PAIR_DEVICES]
    if not known:
        return BaselineEstimate(reason=f"{_no_run_reason(asked)} on {_PAIR_DEVICES} devices")
    device_s = median(one.step_time_s * _PAIR_DEVICES / one.spec.global_batch_size for one in known)
    return BaselineEstimate(device_s * asked.spec.global_batch_size / asked.spec.devices)


def log_devices_baseline(asked: BaselineRequest) -> BaselineEstimate:
    """A straight line of the step time over the logarithm of the number of devices, by least squares."""
    known = smaller_runs(asked)
    if len({one.spec.devices for one in known}) < _PAIR_DEVICES:
        return BaselineEstimate(reason=f"{_no_run_reason(asked)} at two scales")
    line = linear_regression([log2(one.spec.devices) for one in known], [one.step_time_s for one in known])
    step_time_s = line.intercept + line.slope * log2(asked.spec.devices)
    if step_time_s <= 0:
        return BaselineEstimate(
            reason=f"the line through {len(known)} smaller runs is below zero at {asked.spec.devices}"
        )
    return BaselineEstimate(step_time_s)


def smaller_runs(asked: BaselineRequest) -> list[MeasuredRun]:
    """The runs that are known of the same on fewer devices."""
    return [
        one
        for one in asked.known
        if one.spec.devices < asked.spec.devices and _differs_only_in_scale(one.spec, asked.spec)
    ]


def _differs_only_in_scale(one: RunSpec, other: RunSpec) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _SCALE_INDEPENDENT_KEYS)


def _no_run_reason(asked: BaselineRequest) -> str:
    spec = asked.spec
    return f"no smaller run of {spec.strategy}, {spec.model}, batch {spec.batch_size} was measured"


BASELINES: dict[str, Callable[[BaselineRequest], BaselineEstimate]] = {
    "paradl": paradl_baseline,
    "ddlbench": ddlbench_baseline,
    "compute_only": compute_only_baseline,
    "flat": constant_time_baseline,
    "perfect": perfect_scaling_baseline,
    "log_p": log_devices_baseline,
}
"""By name. ``docs/formulas.md`` has a section on each."""
