"""ParaDL's formulas for a run: which of them it is, and what the machine's profile puts into it.

As the paper does it: layers are timed on one device and their times divided, nothing overlaps, a link is its nominal
latency and bandwidth. One step is an epoch of one global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from hpcbench.oracle.clock import Clock
from hpcbench.oracle.estimates import Asked, Estimate, alone
from hpcbench.oracle.kernels import number_bytes, row_pass, update_kernels
from hpcbench.oracle.pipeline_run import PipelineRun
from hpcbench.oracle.placement import Group, group_of
from hpcbench.oracle.published import paradl as formulas
from hpcbench.oracle.published.paradl import Job, Layer, Wire
from hpcbench.oracle.tensors import FP32_BYTES
from hpcbench.parallel import layers
from hpcbench.parallel.spatial_limits import split_of
from hpcbench.parallel.strategies.pipeline import layout_of

_WEIGHTED = ("Conv1d", "Conv2d", "Conv3d", "Linear")
"""Kinds of layers that filter and channel split; all others run whole, as in the authors' lists of layers."""


def paradl(asked: Asked) -> Estimate:
    """What the paper's table III says of the run, with its memory; why it says nothing, where it has no row for it."""
    spec = asked.spec
    formula = _FORMULAS.get(spec.strategy)
    if formula is None:
        return Estimate(reason=f"ParaDL has no formula for {spec.strategy}")
    if formula in (_pipeline, _model) and (spec.dp_degree * spec.tp_degree > 1 or layout_of(spec).replicas):
        return Estimate(reason="ParaDL has no formula for pipelines with replicas or split layers")
    found = formula(asked)
    return Estimate(found.epoch_s, found.compute_s, found.comm_s, found.memory_bytes)


def rows(asked: Asked, split: Sequence[bool]) -> list[Layer]:
    """The table's rows as layers: times of one device at the run's micro-batch, per sample.

    ``split`` tells which rows the strategy splits.
    """
    spec = alone(asked.spec)
    clock, samples = Clock(asked.machine, spec), spec.batch_size / spec.micro_batches
    found = []
    for row, is_split in zip(asked.table.layers, split, strict=True):
        passes = row_pass(spec, row, samples)
        found.append(
            Layer(
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


def halo_items(row: layers.Layer) -> float:
    """Of the input and of the output's gradient, what one neighbour needs of a sample that is split along its last dim.

    C floor((K - 1) / 2) times the extents of the other dims, of each.
    """
    kernel = row.attributes.get("kernel_size", 1)
    width = int(kernel[-1] if isinstance(kernel, list) else kernel) - 1
    return width // 2 * (prod(row.input_shape[:-1]) + prod(row.output_shape[:-1]))


def _job(asked: Asked, split: Sequence[bool] | None = None) -> Job:
    batch = asked.spec.global_batch_size
    whole = [True] * len(asked.table.layers)
    return Job(batch, batch, rows(asked, whole if split is None else split), int(number_bytes(asked.spec)))


def _wire(asked: Asked, group: Group) -> Wire:
    """The narrowest link of a ring."""
    comm = asked.machine.comm
    return Wire(*(comm.intra_node if group.nodes == 1 else comm.inter_node))


def _serial(asked: Asked) -> formulas.Estimate:
    return formulas.serial(_job(asked))


def _data(asked: Asked) -> formulas.Estimate:
    return formulas.data(_job(asked), asked.spec.dp_degree, _wire(asked, group_of(asked.spec, "dp")))


def _filter(asked: Asked) -> formulas.Estimate:
    spec = asked.spec
    job = _job(asked, [row.kind in _WEIGHTED for row in asked.table.layers])
    outer, inner = group_of(spec, "dp"), _wire(asked, group_of(spec, "tp"))
    return formulas.data_filter(job, spec.dp_degree, spec.tp_degree, inner, _wire(asked, outer), outer.rivals)


def _spatial(asked: Asked) -> formulas.Estimate:
    spec = asked.spec
    end = split_of(spec, asked.table).end if spec.sp_degree > 1 else len(asked.table.layers)
    job = _job(asked, [place < end for place in range(len(asked.table.layers))])
    outer, inner = group_of(spec, "dp"), _wire(asked, group_of(spec, "sp"))
    return formulas.data_spatial(job, spec.dp_degree, spec.sp_degree, inner, _wire(asked, outer), outer.rivals)


def _stages(asked: Asked, job: Job) -> list[list[Layer]]:
    return [[job.layers[row] for row in own] for own in PipelineRun(asked.spec, asked.table, 0).rows]


def _pipeline(asked: Asked) -> formulas.Estimate:
    job = _job(asked)
    wire = _wire(asked, group_of(asked.spec, "pp"))
    return formulas.pipeline(job, _stages(asked, job), asked.spec.micro_batches, wire)


def _model(asked: Asked) -> formulas.Estimate:
    """One segment after another, and one update."""
    job, parts = _job(asked), asked.spec.micro_batches
    still = [[layer._replace(update_s=0.0) for layer in stage] for stage in _stages(asked, job)]
    part = job._replace(samples=job.samples / parts, batch=job.batch / parts)
    wire = _wire(asked, group_of(asked.spec, "pp"))
    one = formulas.pipeline(part, still, 1, wire)
    update_s = max(sum(layer.update_s for layer in stage) for stage in _stages(asked, job))
    return formulas.Estimate(parts * one.compute_s + update_s, parts * one.comm_s, one.memory_bytes)


_FORMULAS: dict[str, Callable[[Asked], formulas.Estimate]] = {
    "single": _serial,
    "ddp": _data,
    "horovod": _data,
    "filter": _filter,
    "channel": _filter,
    "spatial": _spatial,
    "model": _model,
    "gpipe": _pipeline,
    "1f1b": _pipeline,
    "fairscale_pipe": _pipeline,
}
