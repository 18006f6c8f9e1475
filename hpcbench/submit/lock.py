"""An exclusive lock with a lease on a results tree that several users share, and messages while a user waits for it.

The lock is a file created with O_EXCL (or a hard link), because ``flock`` does not work on every shared file system."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcbench.errors import StorageError
from hpcbench.fileio import join_without_links, make_folder, read_error, read_regular, write_exclusive
from hpcbench.identity import account_name, owner_name, process_namespace
from hpcbench.results.decode import decode_record

SILENCE_S = 3.0
"""Seconds without an answer of the scheduler or of a lock's holder after which a message is printed."""
_listeners: list[Callable[[str], None]] = []


@contextlib.contextmanager
def announce_silence(notify: Callable[[str], None]) -> Iterator[None]:
    """Call ``notify`` with a message whenever the scheduler, or the holder of a lock, lets the body wait."""
    _listeners.append(notify)
    try:
        yield
    finally:
        _listeners.remove(notify)


def has_listeners() -> bool:
    """Whether anybody reads the messages."""
    return bool(_listeners)


def announce(message: str) -> None:
    """Send ``message`` to everyone who waits."""
    for notify in _listeners:
        notify(message)


class LockHeldError(StorageError):
    """Another process has held a lock for longer than this one waits."""


class LockHolder(msgspec.Struct):
    """The content of a lock file: the holder, and how long its lease lasts without a renewal."""

    owner: str
    host: str
    pid: int
    since_unix_s: float
    """Read from the clock of ``host``: for people, and never compared."""
    lease_s: float
    machine: str = ""
    """``process_namespace()`` of the holder, in which ``pid`` is a process; empty: any on ``host``."""
    token: str = ""
    """Random: two locks of one process differ."""


class LeaseLock:
    """A lock that this process holds. A thread renews it, whatever the body waits for."""

    def __init__(self, path: Path, lease_s: float) -> None:
        self._path, self._lease_s = path, lease_s
        holder = LockHolder(
            account_name(), socket.gethostname(), os.getpid(), time.time(), lease_s, process_namespace(),
            secrets.token_hex(4),
        )  # fmt: skip
        self.data = msgspec.json.encode(holder)
        self._is_released = threading.Event()
        self._renewer = threading.Thread(target=self._renew, daemon=True)

    def start_renewing(self) -> None:
        self._renewer.start()

    def _renew(self) -> None:
        while not self._is_released.wait(self._lease_s / 4):
            with contextlib.suppress(OSError):
                if not self._is_own():
                    return
                # Others see a new time of modification. Unlike new content it needs no space on the file system.
                os.utime(self._path, follow_symlinks=False)

    def _is_own(self) -> bool:
        return read_regular(self._path) == self.data

    def check_held(self) -> None:
        """Raise ``LockHeldError`` if another process has taken the lock over: this one was stopped for too long.

        Raises ``StorageError`` if the file system refuses to show the lock.
        """
        try:
            is_own = self._is_own()
        except FileNotFoundError:
            is_own = False
        except OSError as error:
            raise read_error(error, self._path) from error
        if not is_own:
            message = f"{self._path} was taken over by another process while this one was stopped"
            raise LockHeldError(message, hint="run the command again: it continues after the other process")

    def release(self) -> None:
        self._is_released.set()
        self._renewer.join()
        with contextlib.suppress(OSError):
            if self._is_own():
                self._path.unlink()


class _Sight(NamedTuple):
    """A lock file as a waiting process sees it."""

    state: tuple[int, int, int]
    """Inode, modification time (ns) and size: a renewal changes them."""
    owner: str
    data: bytes | None
    """``None`` if this account may not read it."""

    @property
    def holder(self) -> LockHolder | None:
        """``None`` if its content is unknown."""
        if self.data is None:
            return None
        try:
            return decode_record(self.data, LockHolder)
        except msgspec.MsgspecError:
            return None

    def lease_s(self, own_lease_s: float) -> float:
        """Seconds for which the file may stay unchanged until its holder counts as dead."""
        if self.data is None:
            return own_lease_s
        return self.holder.lease_s if self.holder else _BROKEN_LEASE_S

    def describe(self, unchanged_s: float) -> str:
        if holder := self.holder:
            who = f"{holder.owner} (process {holder.pid} on {holder.host})"
        else:
            who = f"another submit, of account {self.owner}"
        return f"{who}, whose lock has not changed for {unchanged_s:.0f} s"


_BROKEN_LEASE_S = 10.0
"""The lease of a file that is no record of a holder: its writer ended while it wrote."""


@contextlib.contextmanager
def exclusive_lock(path: Path, *, lease_s: float = 120.0, wait_s: float = 150.0) -> Iterator[LeaseLock]:
    """Hold the lock ``path`` while the body runs; before it writes what two must not, it calls ``check_held``.

    A lock whose file this process has seen unchanged for its lease is taken over: its holder died. There is no other
    sign of that on another host, so ``wait_s`` is longer than the lease. Raises ``LockHeldError`` naming the holder
    after ``wait_s``.
    """
    make_folder(path.parent)
    lock = LeaseLock(path, lease_s)
    began_s = time.monotonic()
    watched: tuple[_Sight, float] | None = None
    is_announced = False
    while not write_exclusive(path, lock.data):
        join_without_links(path.parent, path.name)
        now_s, sight = time.monotonic(), _look_at(path)
        if sight is not None and (watched is None or watched[0].state != sight.state):
            watched = (sight, now_s)
        if sight is not None and watched is not None:
            unchanged_s = now_s - watched[1]
            if _is_dead(sight, unchanged_s, lease_s):
                _remove_stale_file(path, sight)
            elif now_s - began_s > wait_s:
                message = f"waited {wait_s:g} s for {sight.describe(unchanged_s)}"
                raise LockHeldError(message, hint=f"lock file: {path}")
            elif not is_announced and now_s - began_s > SILENCE_S:
                announce(f"waiting for {sight.describe(unchanged_s)}: {path}")
                is_announced = True
        time.sleep(0.05)
    lock.start_renewing()
    try:
        yield lock
    finally:
        lock.release()


def _look_at(path: Path) -> _Sight | None:
    """The lock file; ``None`` if it has gone."""
    try:
        state = path.lstat()
    except OSError:
        return None
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return None
    except OSError:
        data = None
    return _Sight((state.st_ino, state.st_mtime_ns, state.st_size), owner_name(state.st_uid), data)


def _is_dead(sight: _Sight, unchanged_s: float, own_lease_s: float) -> bool:
    holder = sight.holder
    if holder is not None:
        is_here = process_namespace() == holder.machine if holder.machine else socket.gethostname() == holder.host
        if is_here and not _is_process_alive(holder.pid):
            return True
    return unchanged_s > sight.lease_s(own_lease_s)


def _remove_stale_file(path: Path, dead: _Sight) -> None:
    """Remove the lock that was seen as ``dead``.

    Of several processes that do so one gets the file; a late one that gets the successor's file puts it back.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.dead")
    with contextlib.suppress(OSError):
        path.rename(aside)
        try:
            found = _look_at(aside)
            if found is not None and found.state != dead.state:
                aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)


def _is_process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
