"""Baseline predictors against which the oracle is scored: published models, simple scaling rules and constant choices.

The published models are evaluated as in their papers: layers are timed on one device and their times divided,
nothing overlaps, and a link has its nominal latency and bandwidth. Constant choices of a strategy predict no time: a
predictor of step times is worth nothing as a recommender where it loses to one of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2, prod
from operator import attrgetter
from statistics import linear_regression, median
from typing import NamedTuple

import msgspec

from benchmarks.oracle.published_formulas import (
    ParadlEstimate,
    ParadlJob,
    ParadlLayer,
    ddlbench_gpipe_comm_s,
    ddlbench_gpipe_compute_s,
    ddlbench_horovod_step_s,
    paradl_data,
    paradl_data_filter,
    paradl_data_spatial,
    paradl_pipeline,
)
from benchmarks.oracle.scoring import CasePredictor, PredictorResult, ScoredConfiguration
from hpcbench.config.run_spec import DEGREE_NAMES, RunSpec
from hpcbench.errors import HpcbenchError
from hpcbench.predict.cluster_forecasts import ClusterForecasts
from hpcbench.predict.collective_formulas import HockneyLink
from hpcbench.predict.cost_model import CostModel, StepBreakdown, row_kernels, update_kernels
from hpcbench.predict.machine import Machine
from hpcbench.predict.placement import are_on_one_node, place_group
from hpcbench.predict.prediction import NotPredicted
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.predict.tensor_sizes import FP32_BYTES, activation_number_bytes, parameter_bytes, parameter_number_bytes
from hpcbench.strategies import layer_table
from hpcbench.strategies.catalog import SINGLE_DEVICE, options_with_defaults
from hpcbench.strategies.gradient_buckets import MIB
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.pipeline.entry import pipeline_layout
from hpcbench.strategies.pipeline.rank_cost import PipelineRank
from hpcbench.strategies.spatial.spatial_split import spatial_split_of_run


class MeasuredRun(NamedTuple):
    """A configuration that was measured."""

    spec: RunSpec
    step_time_s: float


class BaselineEstimate(NamedTuple):
    """The estimate of one step (seconds) and of the largest rank's memory; ``None`` where a baseline has no formula."""

    step_time_s: float | None = None
    compute_s: float | None = None
    comm_s: float | None = None
    memory_bytes: float | None = None
    reason: str = ""
    """The reason why there is no prediction."""


class BaselineRequest(NamedTuple):
    """A configuration, and the measurements that a baseline may use."""

    spec: RunSpec
    table: LayerTable
    machine: Machine
    known: Sequence[MeasuredRun] = ()
    """Measured runs at small scale; none of them may be the run itself."""


def single_device_spec(spec: RunSpec) -> RunSpec:
    """Return the run of one replica's samples on one device."""
    degrees = dict.fromkeys(DEGREE_NAMES, 1)
    return msgspec.structs.replace(
        spec, strategy=SINGLE_DEVICE, options={}, nodes=1, tasks_per_node=1, devices_per_task=1, **degrees
    )


def single_device_step(request: BaselineRequest) -> StepBreakdown:
    """Return the oracle's step of ``single_device_spec``."""
    spec = single_device_spec(request.spec)
    return resolve_cost(spec.strategy).step(spec, request.table, CostModel(request.machine, spec))


PARADL_ROWS = {
    **dict.fromkeys(("single", "ddp", "horovod"), "data"), **dict.fromkeys(("filter", "channel"), "channels"),
    "spatial": "samples", "model": "layer", **dict.fromkeys(("gpipe", "1f1b", "fairscale_pipe"), "pipeline"),
}  # fmt: skip
"""Rows of ParaDL's table III by strategy."""
FUSION_OPTIONS = {"ddp": "bucket_cap_mb", "horovod": "fusion_threshold_mb"}
"""Options with the MiB up to which gradients are sent together, by the strategies of DDLBench's equation 5.1."""
DDLBENCH_PIPELINES = ("gpipe", "fairscale_pipe")
"""Strategies of DDLBench's equations 6.1 and 6.2."""
_PARADL_SPLIT_KINDS = ("Conv1d", "Conv2d", "Conv3d", "Linear")
"""Kinds of layers that filter and channel split; all others run whole, as in the authors' lists of layers."""


def paradl_baseline(request: BaselineRequest) -> BaselineEstimate:
    """Return the paper's table III for the run, with its memory; the reason where it has no row for the run."""
    spec = request.spec
    row = PARADL_ROWS.get(spec.strategy)
    if row is None:
        return BaselineEstimate(reason=f"ParaDL has no formula for {spec.strategy}")
    if row in ("pipeline", "layer") and _is_hybrid_pipeline(spec):
        return BaselineEstimate(reason="ParaDL has no formula for pipelines with replicas or split layers")
    estimate = _PARADL_ESTIMATES[row](request)
    return BaselineEstimate(estimate.epoch_s, estimate.compute_s, estimate.comm_s, estimate.memory_bytes)


def _is_hybrid_pipeline(spec: RunSpec) -> bool:
    return spec.dp_degree * spec.tp_degree > 1 or bool(pipeline_layout(spec).replicas)


def halo_items(row: layer_table.LayerRow) -> float:
    """Return the halo of one sample split along its last dim: values of the input and of the output's gradient.

    C floor((K - 1) / 2) times the extents of the other dims, of each.
    """
    kernel = row.attributes.get("kernel_size", 1)
    width = int(kernel[-1] if isinstance(kernel, list) else kernel) - 1
    return width // 2 * (prod(row.input_shape[:-1]) + prod(row.output_shape[:-1]))


def _paradl_job(request: BaselineRequest, split: Sequence[bool] | None = None) -> ParadlJob:
    """Return the table's rows as layers: times of one device at the run's micro-batch, per sample.

    ``split`` selects the rows that the strategy splits; all of them by default.
    """
    spec, batch = single_device_spec(request.spec), request.spec.global_batch_size
    cost_model, samples = CostModel(request.machine, spec), spec.batch_size / spec.micro_batches
    layers = []
    for row, is_split in zip(request.table.layers, split or [True] * len(request.table.layers), strict=True):
        passes = row_kernels(spec, row, samples)
        layers.append(
            ParadlLayer(
                input_items=prod(row.input_shape),
                output_items=row.output_bytes / FP32_BYTES,
                weight_items=row.parameters,
                forward_s=cost_model.kernel_s(passes.forward) / samples,
                backward_s=cost_model.kernel_s(passes.backward) / samples,
                update_s=sum(
                    map(cost_model.kernel_s, update_kernels(spec, [row.parameters * parameter_number_bytes(spec)]))
                ),
                halo_items=halo_items(row),
                is_split=is_split,
            )
        )
    return ParadlJob(batch, batch, layers, activation_number_bytes(request.spec))


def _ring_link(request: BaselineRequest, axis: str) -> HockneyLink:
    """Return the narrowest link of a ring along ``axis``, which its steps wait for."""
    comm = request.machine.comm
    return comm.intra_node if place_group(request.spec, axis).nodes == 1 else comm.inter_node


def _paradl_data(request: BaselineRequest) -> ParadlEstimate:
    return paradl_data(_paradl_job(request), request.spec.dp_degree, _ring_link(request, "dp"))


def _paradl_hybrid(request: BaselineRequest) -> ParadlEstimate:
    """Replicas of ranks that split filters, channels or samples."""
    spec, rows = request.spec, request.table.layers
    if PARADL_ROWS[spec.strategy] == "samples":
        end = spatial_split_of_run(spec, request.table).end if spec.sp_degree > 1 else len(rows)
        formula, axis, split = paradl_data_spatial, "sp", [number < end for number in range(len(rows))]
    else:
        formula, axis, split = paradl_data_filter, "tp", [row.kind in _PARADL_SPLIT_KINDS for row in rows]
    inner, outer, job = _ring_link(request, axis), _ring_link(request, "dp"), _paradl_job(request, split)
    # One of the two inner degrees is 1.
    parts, flows = spec.tp_degree * spec.sp_degree, place_group(spec, "dp").rivals
    return formula(job, spec.dp_degree, parts, inner, outer, flows)


def _paradl_pipeline(request: BaselineRequest) -> ParadlEstimate:
    """Stages of one pipeline; in the row ``layer`` one segment after another, and one update."""
    job, link, parts = _paradl_job(request), _ring_link(request, "pp"), request.spec.micro_batches
    stages = [[job.layers[row] for row in rows] for rows in PipelineRank(request.spec, request.table, 0).rows]
    if PARADL_ROWS[request.spec.strategy] == "pipeline":
        return paradl_pipeline(job, stages, parts, link)
    without_update = [[layer._replace(update_s=0.0) for layer in stage] for stage in stages]
    part = job._replace(samples=job.samples / parts, batch=job.batch / parts)
    estimate = paradl_pipeline(part, without_update, 1, link)
    update_s = max(sum(layer.update_s for layer in stage) for stage in stages)
    return ParadlEstimate(parts * estimate.compute_s + update_s, parts * estimate.comm_s, estimate.memory_bytes)


_PARADL_ESTIMATES: dict[str, Callable[[BaselineRequest], ParadlEstimate]] = {
    "data": _paradl_data,
    **dict.fromkeys(("channels", "samples"), _paradl_hybrid),
    **dict.fromkeys(("pipeline", "layer"), _paradl_pipeline),
}
"""Formulas by row of ``PARADL_ROWS``."""


def ddlbench_baseline(request: BaselineRequest) -> BaselineEstimate:
    """Equation 5.1 for replicas, 6.1 and 6.2 for GPipe, and of one micro-batch for layers that are split over ranks.

    All links of a ring are taken to be its slowest.
    """
    spec, comm, parts = request.spec, request.machine.comm, request.spec.micro_batches
    if spec.strategy in FUSION_OPTIONS:
        threshold = float(options_with_defaults(spec)[FUSION_OPTIONS[spec.strategy]]) * MIB
        replica_s, sent = single_device_step(request).step_time_s, sum(parameter_bytes(spec, request.table))
        links = [_ring_link(request, "dp")] * spec.dp_degree
        step_s = ddlbench_horovod_step_s(replica_s * spec.dp_degree, links, sent, threshold)
        return BaselineEstimate(step_s, replica_s, step_s - replica_s)
    if spec.strategy not in (*DDLBENCH_PIPELINES, "model"):
        return BaselineEstimate(reason=f"DDLBench has no equation for {spec.strategy}")
    if _is_hybrid_pipeline(spec):
        return BaselineEstimate(reason="DDLBench has no equation for pipelines with replicas or split layers")
    pipeline, transfers_s = PipelineRank(spec, request.table, 0), []
    for stage in range(spec.pp_degree - 1):
        link = comm.intra_node if are_on_one_node(spec, "pp", stage, stage + 1) else comm.inter_node
        transfers_s.append(link.message_s(spec.batch_size / parts * pipeline.boundary_bytes(stage)))
    compute_s = single_device_step(request).step_time_s
    if spec.strategy == "model":
        comm_s = parts * ddlbench_gpipe_comm_s(transfers_s, 1)
    else:
        compute_s = ddlbench_gpipe_compute_s(compute_s, spec.pp_degree, parts)
        comm_s = ddlbench_gpipe_comm_s(transfers_s, parts)
    return BaselineEstimate(compute_s + comm_s, compute_s, comm_s)


_SCALE_INDEPENDENT_KEYS = (
    "model", "model_options", "dataset", "input_size", "strategy", "options", "batch_size", "micro_batches",
    "precision", "compile", "activation_checkpointing", "channels_last", "optimizer", "momentum", "data",
)  # fmt: skip
"""Parameters in which a run and a smaller one must agree to be the same at two scales."""
_PAIR_DEVICES = 2
"""Ranks from which perfect scaling is reckoned."""


def compute_only_baseline(request: BaselineRequest) -> BaselineEstimate:
    """A replica's computation on one device, shared evenly by its devices: as if nothing had to be passed."""
    spec = request.spec
    compute_s = single_device_step(request).compute_s / (spec.devices / spec.dp_degree)
    return BaselineEstimate(compute_s, compute_s, 0.0)


def constant_time_baseline(request: BaselineRequest) -> BaselineEstimate:
    """The step time of the largest scale that was measured stays."""
    known = smaller_runs(request)
    if not known:
        return BaselineEstimate(reason=_no_run_reason(request.spec))
    largest = max(run.spec.devices for run in known)
    return BaselineEstimate(median(run.step_time_s for run in known if run.spec.devices == largest))


def perfect_scaling_baseline(request: BaselineRequest) -> BaselineEstimate:
    """The samples per second and device of two devices stay."""
    known = [run for run in smaller_runs(request) if run.spec.devices == _PAIR_DEVICES]
    if not known:
        return BaselineEstimate(reason=f"{_no_run_reason(request.spec)} on {_PAIR_DEVICES} devices")
    device_s = median(run.step_time_s * _PAIR_DEVICES / run.spec.global_batch_size for run in known)
    return BaselineEstimate(device_s * request.spec.global_batch_size / request.spec.devices)


def log_devices_baseline(request: BaselineRequest) -> BaselineEstimate:
    """A straight line of the step time over the logarithm of the number of devices, by least squares."""
    known, devices = smaller_runs(request), request.spec.devices
    if len({run.spec.devices for run in known}) < _PAIR_DEVICES:
        return BaselineEstimate(reason=f"{_no_run_reason(request.spec)} at two scales")
    line = linear_regression([log2(run.spec.devices) for run in known], [run.step_time_s for run in known])
    step_time_s = line.intercept + line.slope * log2(devices)
    if step_time_s <= 0:
        return BaselineEstimate(reason=f"the line through {len(known)} smaller runs is below zero at {devices}")
    return BaselineEstimate(step_time_s)


def smaller_runs(request: BaselineRequest) -> list[MeasuredRun]:
    """The runs that are known of the same on fewer devices."""
    key, spec = attrgetter(*_SCALE_INDEPENDENT_KEYS), request.spec
    return [run for run in request.known if run.spec.devices < spec.devices and key(run.spec) == key(spec)]


def _no_run_reason(spec: RunSpec) -> str:
    return f"no smaller run of {spec.strategy}, {spec.model}, batch {spec.batch_size} was measured"


BASELINES: dict[str, Callable[[BaselineRequest], BaselineEstimate]] = {
    "paradl": paradl_baseline,
    "ddlbench": ddlbench_baseline,
    "compute_only": compute_only_baseline,
    "flat": constant_time_baseline,
    "perfect": perfect_scaling_baseline,
    "log_p": log_devices_baseline,
}
"""Functions of the baselines by name; each has a section in ``docs/formulas.md``."""


CHOICE_BASELINES: dict[str, tuple[str, ...]] = {"always_ddp": ("ddp",), "ddp_else_fsdp": ("ddp", "fsdp")}
"""Strategies of each baseline, the preferred one first. A baseline with several chooses only runs that fit into
memory."""


def choice_results(strategy: str, fits: bool | None) -> dict[str, PredictorResult]:
    """Return the choice of each of ``CHOICE_BASELINES`` for a run.

    Args:
        strategy: of the run.
        fits: whether the oracle predicts that it fits into memory; ``None``, unknown, counts as yes.
    """
    results = {}
    for name, order in CHOICE_BASELINES.items():
        if strategy not in order:
            results[name] = PredictorResult(reason=f"it chooses only {' or '.join(order)}")
        elif fits is False and len(order) > 1:
            results[name] = PredictorResult(reason="it does not fit, by the oracle", fits=False)
        else:
            results[name] = PredictorResult(preference=order.index(strategy))
    return results


def baseline_predictor(
    forecasts: ClusterForecasts, baseline: Callable[[BaselineRequest], BaselineEstimate],
    measured: Sequence[ScoredConfiguration],
) -> CasePredictor:  # fmt: skip
    """Return one of ``BASELINES`` as a predictor that may use all of ``measured`` on fewer devices."""
    runs: dict[str, list[MeasuredRun]] = {}
    for other in measured:
        if other.step_time_s is not None:
            runs.setdefault(other.cluster, []).append(MeasuredRun(other.spec, other.step_time_s))

    def predict(measured: ScoredConfiguration) -> PredictorResult:
        forecast = forecasts.forecast(measured.cluster)
        if isinstance(forecast, NotPredicted):
            return PredictorResult(reason=forecast.reason)
        table = forecast.table(measured.spec)
        if isinstance(table, NotPredicted):
            return PredictorResult(reason=table.reason)
        machine = forecast.machine(measured.spec)
        try:
            estimate = baseline(BaselineRequest(measured.spec, table, machine, runs.get(measured.cluster, [])))
        except HpcbenchError as error:
            return PredictorResult(reason=error.message)
        parts = {"compute_s": estimate.compute_s, "comm_s": estimate.comm_s, "peak_memory_bytes": estimate.memory_bytes}
        figures = {name: value for name, value in parts.items() if value is not None}
        return PredictorResult(step_time_s=estimate.step_time_s, figures=figures, reason=estimate.reason)

    return predict
