"""An exclusive lock with a lease on a results tree that several users share.

The lock is a file created with O_EXCL (or a hard link), because ``flock`` does not work on every shared file system."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpcbench.errors import StorageError
from hpcbench.fileio import join_without_links, make_folder, read_regular, write_atomic, write_exclusive
from hpcbench.results.decode import decode_record
from hpcbench.submit.journal import account_name


class LockHeldError(StorageError):
    """Another process has held a lock for longer than this one waits."""


class LockHolder(msgspec.Struct):
    """The content of a lock file: the holder, and how long its lease lasts without a renewal."""

    owner: str
    host: str
    pid: int
    since_unix_s: float
    lease_s: float


class LeaseLock:
    """A lock that this process holds."""

    def __init__(self, path: Path, lease_s: float) -> None:
        self._path, self._lease_s = path, lease_s
        self.data = self._encode_holder()

    def _encode_holder(self) -> bytes:
        return msgspec.json.encode(
            LockHolder(account_name(), socket.gethostname(), os.getpid(), time.time(), self._lease_s)
        )

    def renew(self) -> None:
        """Write the lock file anew once a quarter of the lease has passed: its holder is alive."""
        if time.time() - msgspec.json.decode(self.data, type=LockHolder).since_unix_s > self._lease_s / 4:
            self.data = self._encode_holder()
            write_atomic(self._path, self.data)


@contextlib.contextmanager
def exclusive_lock(path: Path, *, lease_s: float = 120.0, wait_s: float = 150.0) -> Iterator[LeaseLock]:
    """Hold the lock ``path`` while the body runs; a body that takes long calls ``renew``.

    A lock whose file has not changed for its lease is taken over: its holder died. There is no other sign of that on
    another host, so ``wait_s`` is longer than the lease. Raises ``LockHeldError`` naming the holder after ``wait_s``.
    """
    make_folder(path.parent)
    lock = LeaseLock(path, lease_s)
    deadline = time.monotonic() + wait_s
    watched: tuple[bytes, float] | None = None
    while not write_exclusive(path, lock.data):
        join_without_links(path.parent, path.name)
        watched = _remove_if_stale(path, watched)
        if time.monotonic() > deadline:
            raise LockHeldError(f"waited {wait_s:g} s for {_describe_holder(path)}", hint=f"lock file: {path}")
        time.sleep(0.05)
    try:
        yield lock
    finally:
        with contextlib.suppress(OSError):
            if read_regular(path) == lock.data:
                path.unlink()


def _remove_if_stale(path: Path, watched: tuple[bytes, float] | None) -> tuple[bytes, float] | None:
    """Remove a lock that this process has seen unchanged for the whole lease; clocks of other hosts do not count."""
    try:
        data = read_regular(path)
    except OSError:
        return None
    now = time.monotonic()
    if watched is None or watched[0] != data:
        watched = (data, now)
    holder = _decode_holder(data)
    dead = holder is not None and holder.host == socket.gethostname() and not _is_process_alive(holder.pid)
    if dead or now - watched[1] > (holder.lease_s if holder else 10.0):
        with contextlib.suppress(OSError):
            _remove_stale_file(path, data)
        return None
    return watched


def _remove_stale_file(path: Path, dead: bytes) -> None:
    """Remove the lock with the content ``dead``.

    Of several processes that do so one gets the file; a late one that gets the successor's file puts it back.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.dead")
    path.rename(aside)
    try:
        if read_regular(aside) != dead:
            write_exclusive(path, read_regular(aside))
    finally:
        aside.unlink(missing_ok=True)


def _decode_holder(data: bytes) -> LockHolder | None:
    try:
        return decode_record(data, LockHolder)
    except msgspec.MsgspecError:
        return None


def _is_process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _describe_holder(path: Path) -> str:
    try:
        holder = _decode_holder(read_regular(path))
    except OSError:
        holder = None
    return f"{holder.owner} (process {holder.pid} on {holder.host}) to finish" if holder else "another submit"
