"""The lock by which the local queues of one user take turns on a machine, and the run that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path
from typing import IO

import msgspec

from hpcbench.errors import StorageError
from hpcbench.identity import ProcessId, find_process
from hpcbench.results.decode import read_record


class MachineHolder(msgspec.Struct):
    """The content of the lock file: the queue that has the machine, and its first run."""

    process: ProcessId
    folder: str
    """The submission's folder."""
    run_id: str


def _lock_path() -> Path:
    """Return the path that all queues of this user with one TMPDIR share."""
    return Path(tempfile.gettempdir()) / f"hpcbench-{os.getuid()}" / "machine"


def take_machine(folder: Path, run_id: str) -> IO[bytes] | None:
    """The lock, held until it is closed or this process ends; ``None`` if another queue has it now.

    Args:
        folder: the submission's folder, and
        run_id: its run, both for those who wait.

    Raises:
        StorageError: the folder of the lock is not this user's.
    """
    path = _lock_path()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    state = path.parent.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
        raise StorageError(f"{path.parent} is not a folder of this user", hint="remove it, or set TMPDIR")
    file: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115 - held until the run has ended
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    process = find_process(os.getpid())
    assert process is not None
    # A full file system must not stop the queue: only the name of the run is lost.
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(msgspec.json.encode(MachineHolder(process, str(folder), run_id)))
    return file


def machine_holder() -> MachineHolder | None:
    """The queue that has this machine; ``None`` if it is free, or the lock is in another TMPDIR."""
    holder = read_record(_lock_path(), MachineHolder)
    return holder if holder is not None and find_process(holder.process.pid) == holder.process else None
