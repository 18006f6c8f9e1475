"""The lock by which the local queues of one user take turns on a machine, and the run that holds it."""

from __future__ import annotations

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


def lock_folder() -> Path:
    """The folder of the lock, the same one for all of this user's queues that have the same TMPDIR.

    Raises ``StorageError`` if it is not this user's.
    """
    folder = Path(tempfile.gettempdir()) / f"hpcbench-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
        raise StorageError(f"{folder} is not a folder of this user", hint="remove it, or set TMPDIR")
    return folder


def take_machine(folder: Path, run_id: str) -> IO[bytes] | None:
    """The lock, held until it is closed or this process ends; ``None`` if another queue has it now.

    Args:
        folder: the submission's folder, and
        run_id: its run, both for those who wait.
    """
    file: IO[bytes] = open(lock_folder() / "machine", "ab")  # noqa: SIM115 - held until the run has ended
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    process = find_process(os.getpid())
    assert process is not None
    file.truncate(0)
    file.write(msgspec.json.encode(MachineHolder(process, str(folder), run_id)))
    file.flush()
    return file


def machine_holder() -> MachineHolder | None:
    """The queue that has this machine; ``None`` if it is free, or another user's TMPDIR has the lock."""
    holder = read_record(Path(tempfile.gettempdir()) / f"hpcbench-{os.getuid()}" / "machine", MachineHolder)
    return holder if holder is not None and find_process(holder.process.pid) == holder.process else None
