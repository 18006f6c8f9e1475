"""DDLBench's equations for a run: one device's time as the thesis measures it, links by their nominal numbers."""

from __future__ import annotations

from hpcbench.oracle.collectives import Wire
from hpcbench.oracle.estimates import Asked, Estimate, serial_step
from hpcbench.oracle.pipeline_run import PipelineRun
from hpcbench.oracle.placement import group_of, is_within_node
from hpcbench.oracle.published.ddlbench import Link, gpipe_comm_s, gpipe_compute_s, horovod_step_s
from hpcbench.oracle.tensors import parameter_bytes
from hpcbench.parallel.buckets import MIB
from hpcbench.parallel.catalog import chosen_options
from hpcbench.parallel.strategies.pipeline import layout_of

_DATA, _PIPES = ("ddp", "horovod"), ("gpipe", "fairscale_pipe", "model")
_THRESHOLD_MB = {"ddp": "bucket_cap_mb", "horovod": "fusion_threshold_mb"}


def ddlbench(asked: Asked) -> Estimate:
    """Equation 5.1 for replicas, 6.1 and 6.2 for GPipe, and of one micro-batch for layers that are split over ranks."""
    spec = asked.spec
    if spec.strategy in _DATA:
        return _replicas(asked)
    if spec.strategy not in _PIPES:
        return Estimate(reason=f"DDLBench has no equation for {spec.strategy}")
    if spec.dp_degree * spec.tp_degree > 1 or layout_of(spec).replicas:
        return Estimate(reason="DDLBench has no equation for pipelines with replicas or split layers")
    return _pipe(asked)


def _replicas(asked: Asked) -> Estimate:
    """The links of the ring are all taken to be its slowest, which is what its steps wait for."""
    spec = asked.spec
    workers = spec.dp_degree
    group = group_of(spec, "dp")
    comm = asked.machine.comm
    link = _link(comm.intra_node if group.nodes == 1 else comm.inter_node)
    threshold = float(chosen_options(spec)[_THRESHOLD_MB[spec.strategy]]) * MIB
    replica_s, sent = serial_step(asked).step_time_s, sum(parameter_bytes(spec, asked.table))
    step_s = horovod_step_s(replica_s * workers, [link] * workers, sent, threshold)
    return Estimate(step_s, replica_s, step_s - replica_s)


def _pipe(asked: Asked) -> Estimate:
    spec = asked.spec
    sequential_s, parts = serial_step(asked).step_time_s, spec.micro_batches
    run, comm = PipelineRun(spec, asked.table, 0), asked.machine.comm
    transfers_s = []
    for place in range(spec.pp_degree - 1):
        wire = comm.intra_node if is_within_node(spec, "pp", place, place + 1) else comm.inter_node
        link = _link(wire)
        size = spec.batch_size / parts * run.boundary_bytes(place)
        transfers_s.append(link.latency_s + size / link.bandwidth_bytes_per_s)
    if spec.strategy == "model":
        compute_s, comm_s = sequential_s, parts * gpipe_comm_s(transfers_s, 1)
    else:
        compute_s = gpipe_compute_s(sequential_s, spec.pp_degree, parts)
        comm_s = gpipe_comm_s(transfers_s, parts)
    return Estimate(compute_s + comm_s, compute_s, comm_s)


def _link(wire: Wire) -> Link:
    return Link(wire.latency_s, 1.0 / wire.beta_s_per_byte if wire.beta_s_per_byte else float("inf"))
