"""Which device and how many threads a rank has."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import torch

from hpcbench.config.task import TaskHeader
from hpcbench.errors import WorkerError
from hpcbench.worker.environ import core_warnings, cpu_mask, thread_count
from hpcbench.worker.rank import RankInfo


def settle_threads(env: Mapping[str, str], header: TaskHeader, info: RankInfo) -> list[str]:
    """Set torch's threads where ``env`` (the variables as given) has not; returns warnings about the rank's cores."""
    cores = len(cpu_mask())
    threads = thread_count(env, cores, header.cores_per_task, info)
    if threads is not None:
        torch.set_num_threads(threads)
    return core_warnings(cores, header.cores_per_task, info.local_world_size, os.cpu_count() or cores)


MOST_LOADERS = 8
"""Threads that read samples: beyond these the interpreter's lock is what they wait for."""


def loader_threads(header: TaskHeader, info: RankInfo) -> int:
    """Threads of a rank that may read samples: its cores but one, which drives the device."""
    cores = len(cpu_mask())
    share = min(cores, header.cores_per_task or max(1, cores // info.local_world_size))
    return max(1, min(MOST_LOADERS, share - 1))


def choose(kind: str, info: RankInfo) -> torch.device:
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


def shared_devices(uuids: list[str]) -> list[list[int]]:
    """Ranks that were given the same GPU, in groups; ``uuids`` is by rank."""
    by_uuid: dict[str, list[int]] = {}
    for rank, uuid in enumerate(uuids):
        by_uuid.setdefault(uuid, []).append(rank)
    return [ranks for ranks in by_uuid.values() if len(ranks) > 1]
