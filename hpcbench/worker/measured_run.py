"""The measured run of one rank: it joins the other ranks, trains, and takes the further measurements after the timed
steps.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from hpcbench.config.run_spec import RunSpec, TaskFileHeader
from hpcbench.errors import WorkerError
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.layer_table import LayerTableRequest, read_shipped_table
from hpcbench.paths import expand_path
from hpcbench.worker.data.feed import DataFeed, DataSource, make_feed
from hpcbench.worker.distributed.process_groups import (
    HashStore,
    PrefixStore,
    RankContext,
    Store,
    clone_connection,
    to_timedelta,
)
from hpcbench.worker.distributed.rank_environment import (
    RankInfo,
    core_warnings,
    cpu_mask,
    torch_thread_count,
    user_performance_environment,
)
from hpcbench.worker.distributed.rendezvous import ControlChannel, join_store, set_interface_variables, wait_for_keys
from hpcbench.worker.emulation_mode import apply_emulation
from hpcbench.worker.finalize import RunFinalizer
from hpcbench.worker.measure.counters import RegionCounters
from hpcbench.worker.measure.environment_record import collect_provenance, environment_digest
from hpcbench.worker.measure.gpu import device_uuid
from hpcbench.worker.measure.host import keep_freed_memory, read_peak_memory
from hpcbench.worker.measure.step_profiler import run_profiled_steps
from hpcbench.worker.measure.traffic_recorder import run_recorded_step
from hpcbench.worker.model_execution import wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.shutdown import PeerEnded, StopController
from hpcbench.worker.strategies.base import ProbingStrategy, Strategy, resolve_runtime
from hpcbench.worker.strategies.pipeline.action_timeline import record_timeline, watch_pipeline
from hpcbench.worker.training_loop import LoopProgress, make_evaluate_hook, run_training_loop
from hpcbench.worker.verification.verify import VerificationInputs, verify_run


def set_torch_threads(env: Mapping[str, str], header: TaskFileHeader, info: RankInfo) -> list[str]:
    """Set torch's threads where ``env`` (the variables as given) has not; returns warnings about the rank's cores."""
    cores = len(cpu_mask())
    threads = torch_thread_count(env, cores, header.cores_per_task, info)
    if threads is not None:
        torch.set_num_threads(threads)
    return core_warnings(cores, header.cores_per_task, info.local_world_size, os.cpu_count() or cores)


MAX_LOADER_THREADS = 8
"""Threads that read samples: beyond these the interpreter's lock is what they wait for."""


def loader_thread_count(header: TaskFileHeader, info: RankInfo) -> int:
    """Threads of a rank that may read samples: its cores but one, which drives the device."""
    cores = len(cpu_mask())
    share = min(cores, header.cores_per_task or max(1, cores // info.local_world_size))
    return max(1, min(MAX_LOADER_THREADS, share - 1))


def choose_device(kind: str, info: RankInfo) -> torch.device:
    """The device of this rank: the cpu, or among the GPUs that it sees the one of its local rank.

    A rank that sees a single GPU was given it by the launcher. ``WorkerError`` where there are too few.
    """
    if kind == "cpu":
        return torch.device("cpu")
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    if seen == 0:
        raise WorkerError(
            f"the profile's device is cuda, but torch {torch.__version__} sees no GPU on {socket.gethostname()} "
            f"(CUDA_VISIBLE_DEVICES {visible})",
            hint="does the job ask for GPUs, and is this torch built for CUDA?",
        )
    if 1 < seen < info.local_world_size:
        raise WorkerError(
            f"{info.local_world_size} ranks on {socket.gethostname()} see {seen} GPUs (CUDA_VISIBLE_DEVICES {visible})",
            hint="one rank per GPU: let tasks_per_node be at most the GPUs of a node",
        )
    device = torch.device("cuda", 0 if seen == 1 else info.local_rank)
    torch.cuda.set_device(device)
    return device


def ranks_sharing_devices(uuids: list[str]) -> list[list[int]]:
    """Ranks that were given the same GPU, in groups; ``uuids`` is by rank."""
    by_uuid: dict[str, list[int]] = {}
    for rank, uuid in enumerate(uuids):
        by_uuid.setdefault(uuid, []).append(rank)
    return [ranks for ranks in by_uuid.values() if len(ranks) > 1]


def join_world(closing: RunFinalizer, device: torch.device) -> RankContext:
    """Meet the other ranks and make the default process group; ``closing`` can then talk to them.

    A lone rank gets a group only where its strategy asks for one.
    """
    spec, info, wait_s = closing.task.spec, closing.info, closing.header.wait_s
    place = RankContext(info.rank, info.world_size, device, wait_s=wait_s)
    if info.world_size == 1:
        if get_strategy(spec.strategy).own_degree is not None:
            set_interface_variables("lo", named_by_profile=False, single_node=True)
            _init_process_group(HashStore(), place, wait_s)
        return place
    launch = f"{closing.task.run_id}/{closing.attempt.number}"
    store = join_store(info, closing.header, closing.attempt.rendezvous_path, launch, spec.nodes == 1)
    closing.link = ControlChannel(store, info.rank, info.world_size)
    stop = closing.stop
    closing.link.watch(
        told=lambda: stop.request(PeerEnded("another rank gave up")),
        lost=lambda: stop.request(PeerEnded("rank 0's process has ended")),
    )
    if device.type == "cuda":
        _refuse_shared_devices(store, place, wait_s)
    # A connection of its own: while a collective is set up, the other one must stay free for the stop thread.
    _init_process_group(PrefixStore("group", clone_connection(store)), place, wait_s)
    return place


def _init_process_group(store: Store, place: RankContext, wait_s: float) -> None:
    dist.init_process_group(
        "nccl" if place.device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=to_timedelta(wait_s),
    )


def _refuse_shared_devices(store: Store, place: RankContext, wait_s: float) -> None:
    store.set(f"device/{place.rank}", device_uuid(place.device))
    if place.rank != 0:
        return
    keys = [f"device/{rank}" for rank in range(place.world_size)]
    absent = wait_for_keys(store, keys, wait_s)
    shared = [] if absent else ranks_sharing_devices([store.get(key).decode() for key in keys])
    if shared:
        listed = "; ".join(", ".join(str(rank) for rank in ranks) for ranks in shared)
        raise WorkerError(
            f"ranks share a GPU: {listed}",
            hint="give every rank its own: srun --gpus-per-task=1, or no CUDA_VISIBLE_DEVICES of one device for all",
        )


def barrier(place: RankContext) -> None:
    """Wait for all ranks of the default group; nothing to wait for where there is none."""
    if dist.is_initialized():
        dist.barrier(device_ids=[place.device.index] if place.device.type == "cuda" else None)


def any_rank(place: RankContext, flag: bool) -> bool:
    """Whether any rank of the default group says so; the same answer on all of them, which wait for each other."""
    if not dist.is_initialized():
        return flag
    said = torch.tensor(int(flag), dtype=torch.int32, device=place.device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return bool(said.item())


def model_flops_per_sample(spec: RunSpec, model_folder: str | None, warnings: list[str]) -> float | None:
    """Forward and backward FLOPs of a run's model: from the shipped table, else measured here and now.

    Where that fails the run has no such figure, and ``warnings`` says why.
    """
    try:
        table = read_shipped_table(spec.model, spec.dataset, spec.input_size, spec.model_options)
        if table is None:
            # Fake tensors take a second to import, which no run should wait for before its first step.
            from hpcbench.worker.layers import make_layer_table

            request = LayerTableRequest(
                model=spec.model,
                dataset=spec.dataset,
                input_size=spec.input_size,
                model_options=spec.model_options,
                model_folder=model_folder,
            )
            table = make_layer_table(request)
    except Exception as error:  # noqa: BLE001 - what was measured counts, whatever is wrong with the table
        warnings.append(f"no FLOP/s: {getattr(error, 'message', None) or f'{type(error).__name__}: {error}'}")
        return None
    return float(table.flops_per_sample())


def measure_run(closing: RunFinalizer) -> None:
    """Train as the run says; ``closing`` is given what was found as soon as it is."""
    header, spec, info = closing.header, closing.task.spec, closing.info
    closing.warnings += set_torch_threads(closing.given_env | spec.env, header, info)
    device = closing.device = choose_device(header.device, info)
    if device.type == "cpu":
        keep_freed_memory(closing.given_env | spec.env)
    place = join_world(closing, device)
    _record_provenance(closing, device)
    closing.stop.check()
    runtime: type[Strategy] = resolve_runtime(spec.strategy)
    strategy = runtime()
    source = DataSource(
        expand_path(header.data_folder) if header.data_folder else None, loader_thread_count(header, info)
    )
    feed = make_feed(spec, device, source)
    closing.provenance["data"] = feed.described()
    try:
        strategy.setup(wrap_blocks(build_model(spec, header.model_folder), spec), spec, place)
        apply_emulation(closing, strategy, device)
        closing.replica = strategy.replica
        closing.state = getattr(strategy, "state", None)
        closing.predicted = getattr(strategy, "predicted", None)
        with watch_pipeline(strategy, place, closing.abandon):
            _time_and_profile(closing, strategy, feed, place)
    finally:
        feed.close()
    if spec.verify:
        # The measured model must be gone before two others are there.
        closing.state = None
        del strategy, feed
        given = VerificationInputs(source, header.model_folder)
        closing.verification = verify_run(spec, place, given, closing.stop, closing.link, header.wait_s)
        closing.owes = False
    runtime.close()


def _record_provenance(closing: RunFinalizer, device: torch.device) -> None:
    header, spec = closing.header, closing.task.spec
    closing.provenance = collect_provenance(header, spec, closing.info, device)
    given = user_performance_environment(closing.given_env, spec.env)
    digest = environment_digest(closing.provenance, header, given)
    if digest is not None:
        closing.provenance["environment_digest"] = digest


def _check_all_ranks(stop: StopController, agree: Callable[[bool], bool]) -> None:
    """Raise on all ranks where one was told to stop."""
    if agree(stop.due()):
        stop.check()
        raise PeerEnded("another rank was told to stop")


def _time_and_profile(closing: RunFinalizer, strategy: Strategy, feed: DataFeed, place: RankContext) -> None:
    """Timed steps first; whatever else is to be known comes after them."""
    spec, info, stop, device = closing.task.spec, closing.info, closing.stop, place.device
    closing.progress = progress = LoopProgress(spec, device)
    closing.owes = closing.owes or isinstance(strategy, ProbingStrategy)
    watch = closing.watch = RegionCounters(device, info)
    if watch.energy_absent is not None:
        closing.provenance["energy_absent"] = watch.energy_absent

    def edge() -> None:
        # All ranks look at their counters while none has begun, so that looking is in nobody's first step.
        barrier(place)
        watch.begin()
        barrier(place)

    agree = partial(any_rank, place)
    evaluate = None if spec.rehearse else make_evaluate_hook(strategy, feed, spec, progress, info.rank, agree)
    run_training_loop(strategy, feed, spec, progress, stop, edge, evaluate, watch.end)
    arithmetic = getattr(strategy, "arithmetic", None)
    closing.warnings += [*progress.notes(), *(arithmetic.notes() if arithmetic is not None else [])]
    closing.peak = read_peak_memory(device)
    profiled = run_profiled_steps(strategy, feed, spec, device, stop, agree, len(progress.losses))
    closing.phases = profiled.phases
    closing.warnings += profiled.warnings
    recorded = run_recorded_step(strategy, feed, spec, device, stop, agree, len(progress.losses) + spec.profile_steps)
    closing.traffic = recorded.calls
    closing.warnings += recorded.warnings
    closing.timeline = record_timeline(
        strategy, feed, spec, place, stop, agree, len(progress.losses) + spec.profile_steps + 2
    )
    if isinstance(strategy, ProbingStrategy):
        closing.probe = strategy.measure(feed, partial(_check_all_ranks, stop, agree))
        closing.owes = False
    if info.rank == 0:
        closing.flops_per_sample = model_flops_per_sample(spec, closing.header.model_folder, closing.warnings)
