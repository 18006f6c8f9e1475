"""One measured run of one rank, from its device to its verification.

    device -> control channel -> process group -> data feed -> model -> warm-up and timed steps
           -> profiled steps -> recorded step -> timeline of a pipeline -> probes -> verification

Everything that is not timed comes after the timed steps. Each result goes into ``RankMeasurements`` at once, so that a
run that ends early keeps it."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial

import torch

from hpcbench.config.run_spec import RunSpec, TaskFileHeader
from hpcbench.paths import expand_path
from hpcbench.results.probe_records import ProbeResults
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.layer_table import LayerTable, LayerTableRequest, read_shipped_table
from hpcbench.worker.data.feed import DataFeed, DataSource
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed import rank_environment
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.distributed.world import any_rank, barrier, choose_device, join_world, open_control_channel
from hpcbench.worker.finalize import RankMeasurements, RunFinalizer
from hpcbench.worker.measure.counters import RegionCounters
from hpcbench.worker.measure.environment_record import record_provenance
from hpcbench.worker.measure.host import keep_freed_memory, read_peak_memory
from hpcbench.worker.measure.step_profiler import run_profiled_steps
from hpcbench.worker.measure.traffic_recorder import run_recorded_step
from hpcbench.worker.microbench.message_probes import measure_collectives
from hpcbench.worker.model_execution import choose_convolution_algorithms, wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.shutdown import PeerEnded, StopController
from hpcbench.worker.strategy import Strategy, resolve_runtime
from hpcbench.worker.training_loop import LoopProgress, make_evaluate_hook, run_training_loop
from hpcbench.worker.verification.verify import VerificationInputs, verify_run

MAX_LOADER_WORKERS = 8
"""Processes of a rank that read samples: each holds batches in shared memory."""


def measure_run(finalizer: RunFinalizer) -> None:
    """Train and measure as the run's spec asks; results go into ``finalizer.measurements``.

    Raises:
        WorkerError: the run is impossible here (device, packages, model, other ranks).
        Stopped, PeerEnded: a signal, the time limit or another rank ended it.
    """
    context, measurements, stop = finalizer.context, finalizer.measurements, finalizer.stop
    header, spec, info, result = context.header, context.spec, context.info, measurements.result
    rank_context = join_ranks(finalizer)
    device, channel, provenance = rank_context.device, finalizer.channel, result.provenance
    choose_convolution_algorithms(spec.cudnn_benchmark, device)
    if device.type == "cpu":
        keep_freed_memory(context.user_env | spec.env)

    runtime = resolve_runtime(spec.strategy)
    strategy = runtime()
    # Modules stay: no collection of garbage, in a timed step or later, searches them: 0.35 s each on a slow core.
    gc.freeze()
    data_folder = expand_path(header.data_folder) if header.data_folder else None
    source = DataSource(data_folder, loader_worker_count(header, info))
    with closing(make_feed(spec, device, source)) as feed:
        provenance["data"] = feed.description()
        strategy.setup(wrap_blocks(build_model(spec, header.model_folder), spec), spec, rank_context)
        # Copies that only the setup needed are no part of the steps' peak.
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        result.replica = strategy.replica
        result.predicted = strategy.predicted
        measurements.pipeline_state = strategy.progress_report
        with strategy.watchdog(rank_context, finalizer.abort):
            _time_steps(measurements, strategy, feed, spec, info, rank_context, stop)
            _measure_after_timing(measurements, strategy, feed, spec, rank_context, stop)
    if info.rank == 0:
        table = model_table(spec, header.model_folder, result.warnings)
        if table is not None:
            result.flops_per_sample = float(table.flops_per_sample())
            result.recomputed_flops_per_sample = recomputed_share(spec) * table.totals().forward_flops
    if spec.verify:
        # The measured model must be freed before verification builds two others.
        measurements.pipeline_state = None
        del strategy, feed
        inputs = VerificationInputs(source, header.model_folder)
        result.verification = verify_run(spec, rank_context, inputs, stop, channel, header.wait_s)
        measurements.pending.discard("verification")
    runtime.close()


def join_ranks(finalizer: RunFinalizer) -> RankContext:
    """Choose this rank's threads and device, meet the other ranks and record the provenance; raises ``WorkerError``."""
    context, measurements, stop = finalizer.context, finalizer.measurements, finalizer.stop
    header, spec, info, result = context.header, context.spec, context.info, measurements.result
    result.warnings += set_torch_threads(context.user_env | spec.env, header, info)
    device = measurements.device = choose_device(header.device, info, header.ranks_per_device)
    # The device is idle: the next calls start its work.
    measurements.counters = RegionCounters(device, info)
    launch = f"{context.task.run_id}/{context.attempt.number}"
    # Attached before the process group exists: a rank that fails to join it must reach the others.
    channel = finalizer.channel = open_control_channel(
        info, header, context.attempt.rendezvous_path, launch, spec.nodes == 1, stop
    )
    rank_context = join_world(spec, info, device, channel, header.wait_s, header.ranks_per_device)
    result.provenance = record_provenance(header, spec, info, device, context.user_env)
    stop.raise_if_stopped()
    return rank_context


def run_collectives(finalizer: RunFinalizer) -> None:
    """Check and time the collectives of a run without a model; raises as ``measure_run``, and for wrong results."""
    context, result = finalizer.context, finalizer.measurements.result
    rank_context, counters = join_ranks(finalizer), finalizer.measurements.counters
    assert counters is not None, "join_ranks makes them"
    counters.begin()
    probes = measure_collectives(
        context.spec, rank_context, partial(_raise_if_any_stopped, rank_context, finalizer.stop)
    )
    counters.end()
    result.probe = ProbeResults(collectives=probes)


def _raise_if_any_stopped(context: RankContext, stop: StopController) -> None:
    if any_rank(context, stop.should_stop()):
        stop.raise_if_stopped()
        raise PeerEnded("another rank received a signal to stop")


def _time_steps(
    measurements: RankMeasurements, strategy: Strategy, feed: DataFeed, spec: RunSpec, info: rank_environment.RankInfo,
    context: RankContext, stop: StopController,
) -> None:  # fmt: skip
    """Run the warm-up and the timed steps, with counters around the timed ones."""
    result = measurements.result
    progress = measurements.progress = LoopProgress(spec, context.device)
    counters = measurements.counters
    assert counters is not None, "join_ranks makes them"
    if strategy.measures_machine:
        measurements.pending.add("probe")

    def begin_counters() -> None:
        # All ranks read their counters while none has begun, so that reading delays no rank's first step.
        barrier(context)
        counters.begin()
        if not progress.losses[spec.warmup_steps :]:
            with suppress(OSError):
                measurements.setup_peak = read_peak_memory(context.device, restarts=True)
        barrier(context)

    evaluate = make_evaluate_hook(strategy, feed, spec, progress, info.rank, partial(any_rank, context))
    run_training_loop(strategy, feed, spec, progress, stop, begin_counters, evaluate, counters.end)
    result.warnings += [*progress.warnings(), *strategy.arithmetic.notes()]
    measurements.peak = read_peak_memory(context.device)


def _measure_after_timing(
    measurements: RankMeasurements, strategy: Strategy, feed: DataFeed, spec: RunSpec, context: RankContext,
    stop: StopController,
) -> None:  # fmt: skip
    """Run the profiled steps, the recorded step, the step of a pipeline's timeline and the probes, on all ranks."""
    assert measurements.progress is not None, "the timed steps come first"
    result, first = measurements.result, len(measurements.progress.losses)
    agree = partial(any_rank, context)

    profiled = run_profiled_steps(strategy, feed, spec, context.device, stop, agree, first, result.warnings)
    result.phases, result.host_syncs = profiled.phases, profiled.host_syncs
    first += spec.profile_steps
    result.traffic = run_recorded_step(strategy, feed, spec, context.device, stop, agree, first, result.warnings)
    if spec.profile_steps and get_strategy(spec.strategy).pipeline.records_timeline and not agree(stop.should_stop()):
        result.timeline = strategy.record_actions(feed, first + 2, context.device)
    if strategy.measures_machine:
        result.probe = strategy.measure(feed, partial(_raise_if_any_stopped, context, stop))
        measurements.pending.discard("probe")


def set_torch_threads(env: Mapping[str, str], header: TaskFileHeader, info: rank_environment.RankInfo) -> list[str]:
    """Set torch's number of threads unless ``env`` (the user's variables) does; return warnings about the cores."""
    cores = len(rank_environment.cpu_mask())
    threads = rank_environment.torch_thread_count(env, cores, header.cores_per_task, info)
    if threads is not None:
        torch.set_num_threads(threads)
    return rank_environment.core_warnings(cores, header.cores_per_task, info.local_world_size, os.cpu_count() or cores)


def loader_worker_count(header: TaskFileHeader, info: rank_environment.RankInfo) -> int:
    """Return how many processes of a rank may read samples: its cores but one, which drives the device."""
    cores = len(rank_environment.cpu_mask())
    share = min(cores, header.cores_per_task or max(1, cores // info.local_world_size))
    return max(1, min(MAX_LOADER_WORKERS, share - 1))


def recomputed_share(spec: RunSpec) -> float:
    """Return the share of the forward pass that is computed again in the backward pass."""
    if spec.activation_checkpointing:
        return 1.0
    recompute = spec.options.get("recompute", "never")
    if recompute == "except_last":
        return (spec.micro_batches - 1) / spec.micro_batches
    return float(recompute == "always")


def model_table(spec: RunSpec, model_folder: str | None, warnings: list[str]) -> LayerTable | None:
    """Return the layer table that FLOPs are counted from: the shipped one, or one made now.

    If both fail, return ``None`` and append the reason to ``warnings``.
    """
    try:
        table = read_shipped_table(spec.model, spec.dataset, spec.input_size, spec.model_options)
        if table is None:
            # Fake tensors take a second to import, which must not delay a run's first step.
            from hpcbench.worker.layers import make_layer_table

            fields = ("model", "dataset", "input_size", "model_options")
            request = {name: getattr(spec, name) for name in fields}
            table = make_layer_table(LayerTableRequest(**request, model_folder=model_folder))
    except Exception as error:  # noqa: BLE001 - the measurements count, whatever is wrong with the table
        warnings.append(f"no FLOP/s: {getattr(error, 'message', None) or f'{type(error).__name__}: {error}'}")
        return None
    return table
