"""The local queue process of a submission: its start, its record ``queue.json``, and whether it is alive.

psutil and socket are imported on use, because queries about SLURM jobs do not need them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcbench.fileio import read_regular, write_atomic
from hpcbench.results.decode import decode_record

if TYPE_CHECKING:
    import psutil


class LocalQueueRecord(msgspec.Struct):
    """``queue.json``: which process works a submission off."""

    pid: int
    created: float
    warning_s: float
    host: str = ""


def start_local_queue(folder: Path, environment: dict[str, str], warning_s: float) -> None:
    """Start the queue of ``folder`` as a process of its own, which outlives this one."""
    with open(folder / "queue.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hpcbench.submit.local_queue", str(folder), str(warning_s)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True,
        )  # fmt: skip
    import psutil

    created = psutil.Process(process.pid).create_time()
    write_atomic(
        folder / "queue.json",
        msgspec.json.encode(LocalQueueRecord(process.pid, created, warning_s, _host_name())) + b"\n",
    )


def _host_name() -> str:
    import socket

    return socket.gethostname()


def queue_was_started(folder: Path) -> bool:
    """Whether the submission ever had a queue."""
    return (folder / "queue.json").exists()


def is_queue_alive(folder: Path) -> bool:
    """Whether ``folder`` is being worked off. What another machine that shares the tree does cannot be seen from here:
    its queue counts as alive.
    """
    state = _read_queue_record(folder)
    return state is not None and (state.host != _host_name() or queue_process(folder) is not None)


def _read_queue_record(folder: Path) -> LocalQueueRecord | None:
    try:
        return decode_record(read_regular(folder / "queue.json"), LocalQueueRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def queue_process(folder: Path) -> psutil.Process | None:
    """The process of this machine that works ``folder`` off, if it is alive."""
    state = _read_queue_record(folder)
    if state is None or state.host != _host_name():
        return None
    import psutil

    try:
        process = psutil.Process(state.pid)
        alive = abs(process.create_time() - state.created) < 1 and process.status() != psutil.STATUS_ZOMBIE
        # Somebody else may have written the file: only a queue of this very folder is ever told to stop.
        alive = alive and process.cmdline()[1:4] == ["-m", "hpcbench.submit.local_queue", str(folder)]
    except psutil.Error:
        return None
    return process if alive else None
