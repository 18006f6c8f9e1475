"""How the ranks of one launch find each other: a store that rank 0 opens, and a file that says where."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path

import msgspec

from hpcbench.config.task import TaskHeader
from hpcbench.errors import WorkerError
from hpcbench.fileio import read_regular, write_atomic
from hpcbench.results.decode import decode
from hpcbench.worker.environ import raise_open_files
from hpcbench.worker.network import own_address
from hpcbench.worker.rank import RankInfo
from hpcbench.worker.stores import Store, TCPStore, seconds

_POLL_S = 0.05
_CONNECT_S = 10.0
_NONCE_KEY = "nonce"
_EVERYONE_KEY = "everyone"


class Meeting(msgspec.Struct):
    """``rendezvous.json``. ``nonce`` begins with run and attempt: a file of another launch is never joined."""

    address: str
    port: int
    nonce: str


def join(info: RankInfo, header: TaskHeader, path: Path, launch: str, single_node: bool) -> TCPStore:
    """The store that all ranks of ``launch`` (``run_id/attempt``) share, once all of them are there.

    Waits ``header.wait_s`` at most; ``WorkerError`` then names the file, the seconds, and on rank 0 who is missing.
    """
    interface, address = own_address(single_node, header.interface, header.host_suffix)
    name_interfaces(interface, header.interface is not None, single_node)
    if header.meet_by_host_name:
        _, address = own_address(single_node, None, header.host_suffix)
    store = _open(address, path, launch, header.wait_s) if info.rank == 0 else _find(path, launch, header.wait_s)
    store.set(f"joined/{info.rank}", socket.gethostname())
    if info.rank == 0:
        _await_everyone(store, info, header.wait_s, f"{address} port {store.port}", path)
        store.set(_EVERYONE_KEY, "1")
    elif absent_after(store, [_EVERYONE_KEY], header.wait_s):
        raise WorkerError(
            f"rank {info.rank} joined through {path}, but rank 0 did not see all {info.world_size} ranks "
            f"within {header.wait_s:g} s"
        )
    return store


def _await_everyone(store: Store, info: RankInfo, wait_s: float, where: str, path: Path) -> None:
    missing = absent_after(store, [f"joined/{rank}" for rank in range(info.world_size)], wait_s)
    if missing:
        ranks = ", ".join(key.partition("/")[2] for key in missing)
        raise WorkerError(
            f"rank 0 waited {wait_s:g} s at {where} for rank{'s' * (len(missing) > 1)} {ranks} of "
            f"{info.world_size} to read {path} and join",
            hint="did they start? can their nodes read this file, and reach this address?",
        )


def name_interfaces(interface: str | None, named_by_profile: bool, single_node: bool) -> None:
    """Tell gloo (and NCCL where the profile names one) the interface; what the user set stays."""
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if named_by_profile and not single_node:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _open(address: str, path: Path, launch: str, wait_s: float) -> TCPStore:
    raise_open_files()
    # Port 0: the system hands out a free one, so that two tasks of an array on one node never meet.
    store = TCPStore(address, 0, None, True, seconds(wait_s), wait_for_workers=False)
    nonce = f"{launch}/{secrets.token_hex(8)}"
    store.set(_NONCE_KEY, nonce)
    write_atomic(path, msgspec.json.encode(Meeting(address, store.port, nonce)) + b"\n")
    return store


def _find(path: Path, launch: str, wait_s: float) -> TCPStore:
    give_up = time.monotonic() + wait_s
    seen = "the file did not appear"
    while (left := give_up - time.monotonic()) > 0:
        meeting = _read(path)
        if meeting is not None:
            if not meeting.nonce.startswith(f"{launch}/"):
                seen = f"it belongs to another launch ({meeting.nonce!r})"
            else:
                store = _connect(meeting, wait_s, min(left, _CONNECT_S))
                if store is not None:
                    return store
                seen = f"nobody who knows its nonce answers at {meeting.address} port {meeting.port}"
        time.sleep(_POLL_S)
    raise WorkerError(
        f"waited {wait_s:g} s for rank 0's address in {path}: {seen}",
        hint="is rank 0 running, and is the results tree on a file system that all nodes share?",
    )


def _read(path: Path) -> Meeting | None:
    with contextlib.suppress(OSError):
        # Listing the folder makes NFS look again where it remembers that the file was absent.
        os.listdir(path.parent)
    try:
        return decode(read_regular(path), Meeting)
    except (OSError, msgspec.MsgspecError):
        return None


def _connect(meeting: Meeting, wait_s: float, limit_s: float) -> TCPStore | None:
    try:
        # A socket of our own first: torch's client writes a warning for every refusal.
        with socket.create_connection((meeting.address, meeting.port), limit_s):
            pass
        store = TCPStore(meeting.address, meeting.port, None, False, seconds(limit_s), wait_for_workers=False)
        if store.check([_NONCE_KEY]) and store.get(_NONCE_KEY) == meeting.nonce.encode():
            store.set_timeout(seconds(wait_s))
            return store
    except (OSError, RuntimeError):
        return None
    return None


def absent_after(store: Store, keys: list[str], wait_s: float) -> list[str]:
    """Which of ``keys`` are still absent when all are there or ``wait_s`` has passed."""
    give_up = time.monotonic() + wait_s
    pause = 0.002
    missing = keys
    while True:
        missing = [key for key in missing if not store.check([key])]
        if not missing or time.monotonic() > give_up:
            return missing
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S)
