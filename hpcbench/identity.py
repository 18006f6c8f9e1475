"""Accounts, the place in which a process id means one process, and processes that are found again."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pwd
import signal
import socket
from pathlib import Path

import msgspec

_PR_SET_PDEATHSIG = 1
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
"""Looked up once and not in each child process; only Linux has it."""


def account_name() -> str:
    """The account of this process, whatever USER is; its number if it has no name."""
    return owner_name(os.getuid())


def owner_name(uid: int) -> str:
    """The name of an account; its number if it has no name here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@functools.cache
def process_namespace() -> str:
    """The place in which a process id means one process: this boot of this machine, and its container.

    A host's name is not enough, as containers and login nodes may share one.
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}:{boot.read_text().strip()}:{namespace.readlink()}"
    return f"{socket.gethostname()}::"


class ProcessId(msgspec.Struct, frozen=True):
    """A process that another one on its machine can find again: process ids are used anew."""

    machine: str
    """``process_namespace()`` of the process."""
    pid: int
    created: float
    """Clock ticks since the machine's start."""


def find_process(pid: int) -> ProcessId | None:
    """The identity of a live process of this machine; ``None`` if there is none."""
    try:
        # The fields after the command's name, which may hold anything, begin with the state; the start is the 22nd.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ProcessId(process_namespace(), pid, float(fields[19])) if fields[0] != "Z" else None
    except (OSError, IndexError, ValueError):
        return None


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. For a child right after its fork; Linux alone does it."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
