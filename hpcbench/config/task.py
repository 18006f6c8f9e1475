"""The task file: what a job script cannot know and a worker must. One header line, then one line a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError


class TaskHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs of one task file share."""

    task_version: int = 1
    cluster: str
    device: str
    """``cpu`` or ``cuda``."""
    tree: str
    """Absolute path of ``results/<cluster>``."""
    submission: str
    interface: str | None = None
    """Network interface of the rendezvous and of gloo; found by the worker where absent."""
    host_suffix: str = ""
    """Appended to rank 0's host name (JUWELS' ``i``)."""
    meet_by_host_name: bool = False
    """The others reach rank 0 by what its host name stands for, not by ``interface``."""
    wait_s: float = 300.0
    """How long a rank waits for the others before it gives up."""
    data_folder: str | None = None
    """Where samples lie in files; ``~`` and variables are the job's."""
    rehearsed: dict[str, Any] = {}
    """By the clusters that runs rehearse: how fast these compute, see ``parallel.kernel.Rehearsed``."""
    peak_flops_per_s: dict[str, float] = {}
    """Per precision, of one device; empty where the profile does not say."""
    cores_per_task: int | None = None
    pack: int = 1
    """Consecutive runs that one job carries, one after another."""
    environment_key: str | None = None
    """What the submitter knew of the jobs' software; kept in the results, so that a change can be seen."""
    model_folder: str | None = None
    """Absolute path of the folder that users' own models are in."""
    scrubbed: list[str] = []
    """Names of the submitter's variables that were kept from the job."""


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run of a task file."""

    run_id: str
    config_id: str
    sweep: str
    spec: RunSpec
    time_limit_s: float
    stop_groups: list[int] = []
    """Lines (from 0) of ``stop.jsonl`` beside the task file: a run is skipped where a smaller one there ended so."""
    supersedes: str | None = None
    """The ``environment_key`` whose ok result this run is to replace; that one is kept in the archive."""


def write_lines(header: TaskHeader, tasks: list[Task]) -> bytes:
    """The bytes of a task file."""
    encoder = msgspec.json.Encoder()
    return b"".join(encoder.encode(line) + b"\n" for line in (header, *tasks))


def read_task(path: Path, index: int) -> tuple[TaskHeader, Task]:
    """The header and the run number ``index`` (from 0) of a task file.

    Raises ``WorkerError`` where the file is absent, cut short, or not a task file.
    """
    try:
        with open(path, "rb") as file:
            header = msgspec.json.decode(file.readline(), type=TaskHeader)
            for number, line in enumerate(file):
                if number == index:
                    return header, msgspec.json.decode(line, type=Task)
    except OSError as error:
        raise WorkerError(f"cannot read the task file {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WorkerError(f"{path} is not a task file of this version of hpcbench: {error}") from error
    raise WorkerError(f"{path} has no run number {index}")
