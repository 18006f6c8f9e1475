"""One `up` or `down` at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from . import paths
from .errors import BoxError
from .shell import wait_for

TIMEOUT = 240.0


@contextlib.contextmanager
def locked(path: Path = paths.LOCK, timeout: float = TIMEOUT) -> Iterator[None]:
    """Hold the box's lock; the file is removed with it, since `down` leaves nothing behind."""
    held: list[int] = []

    def take() -> bool:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before us may have removed the file that we opened: then the lock is on nothing.
            if os.path.samestat(os.fstat(fd), path.stat()):
                held.append(fd)
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
        return False

    try:
        if not take():
            print("slurm box: another call is at work on the box, waiting for it", file=sys.stderr, flush=True)
            wait_for("the other call at work on the box", take, timeout, lambda: f"its lock is {path}")
    except OSError as err:
        raise BoxError(f"cannot lock {path}: {err.strerror}") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(held[0])
