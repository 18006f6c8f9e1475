"""Rendezvous of the ranks of one launch over a store that rank 0 opens, and the control messages between them."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from hpcbench.config.run_spec import TaskFileHeader
from hpcbench.errors import WorkerError, unsupported
from hpcbench.fileio import read_regular, write_atomic
from hpcbench.results.attempts import Attempt
from hpcbench.results.decode import decode_record
from hpcbench.results.schema import RankResult
from hpcbench.worker.distributed.process_groups import Store, TCPStore, clone_connection, to_timedelta
from hpcbench.worker.distributed.rank_environment import RankInfo, raise_open_file_limit
from hpcbench.worker.failure import FailureCause

_VIRTUAL_PREFIXES = ("docker", "virbr", "veth", "br-", "cni", "podman", "flannel", "tun", "tap")


class NetworkInterface(NamedTuple):
    """An interface that is up, with its usable addresses, IPv4 first."""

    name: str
    addresses: list[str]


def list_interfaces() -> list[NetworkInterface]:
    """Interfaces that are up and have an address, in the system's order; link-local addresses are left out."""
    states = psutil.net_if_stats()
    interfaces = []
    for name, entries in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        texts = [e.address for family in (socket.AF_INET, socket.AF_INET6) for e in entries if e.family == family]
        usable = [text for text in texts if not ipaddress.ip_address(text.partition("%")[0]).is_link_local]
        if usable:
            interfaces.append(NetworkInterface(name, usable))
    return interfaces


def choose_interface(
    present: list[NetworkInterface], wanted: str | None, own_names: Mapping[str, str] | None = None
) -> tuple[str, str] | None:
    """(interface, address) for rank 0 of a world over several nodes; ``None`` where nothing but loopback is up.

    ``wanted`` is the profile's interface: a name, or the beginning of one (``ib``). Without it, the interface that
    holds the address of this host's own name (``own_names``: address -> name) goes before the first one that is up.
    Raises ``WorkerError`` naming what there is where ``wanted`` is absent.
    """
    if wanted:
        matching = [interface for interface in present if interface.name.startswith(wanted)]
        matching.sort(key=lambda interface: interface.name != wanted)
        if not matching:
            listed = ", ".join(f"{interface.name} {interface.addresses[0]}" for interface in present) or "none"
            message = f"the profile names the network interface {wanted!r}, but {socket.gethostname()} has: {listed}"
            raise unsupported(message, "set `interface` in the cluster's profile to one of them, or leave it out")
        return matching[0].name, matching[0].addresses[0]
    outward = [
        interface
        for interface in present
        if not ipaddress.ip_address(interface.addresses[0].partition("%")[0]).is_loopback
    ]
    named = [(name, address) for name, addresses in outward for address in addresses if address in (own_names or {})]
    outward.sort(key=lambda interface: interface.name.startswith(_VIRTUAL_PREFIXES))
    return next(iter([*named, *((name, addresses[0]) for name, addresses in outward)]), None)


def resolve_addresses(name: str) -> list[str]:
    """Addresses of a host name, IPv4 first; empty where it has none."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def interface_holding(address: str, present: list[NetworkInterface]) -> str | None:
    """Return the name of the interface that has ``address``; ``None`` if none has it."""
    return next((interface.name for interface in present if address in interface.addresses), None)


def reachable_address(single_node: bool, wanted: str | None, host_suffix: str) -> tuple[str | None, str]:
    """Return the interface and the address by which the other ranks reach this one.

    The interface is ``None`` if the host has an address but no interface that is up.

    Args:
        single_node: whether all ranks are on one node: they use loopback.
        wanted: the profile's interface, or the beginning of its name; ``None`` if the profile names none.
        host_suffix: suffix of this host's name in the fast network (JUWELS: ``i``); empty for none.

    Raises:
        WorkerError: there is no such interface or no address that another node could reach.
    """
    if single_node:
        return "lo", "127.0.0.1"
    present, host = list_interfaces(), socket.gethostname()
    if host_suffix and not wanted:
        short, _, domain = host.partition(".")
        name = short + host_suffix + (f".{domain}" if domain else "")
        addresses = resolve_addresses(name)
        if not addresses:
            raise WorkerError(
                f"{name!r} (this host's name with the profile's host_suffix {host_suffix!r}) has no address",
                hint="set `host_suffix` in the cluster's profile to what the fast network's names end in",
            )
        return interface_holding(addresses[0], present), addresses[0]
    chosen = choose_interface(present, wanted, dict.fromkeys(resolve_addresses(host), host))
    if chosen is not None:
        return chosen
    addresses = resolve_addresses(host)
    if addresses:
        return None, addresses[0]
    raise WorkerError(f"{host} has no address that another node could reach", hint="set `interface` in the profile")


_STORE_POLL_S = 0.05
_CONNECT_S = 10.0
_NONCE_KEY = "nonce"
_ALL_JOINED_KEY = "everyone"


class RendezvousFile(msgspec.Struct):
    """``rendezvous.json``. ``nonce`` begins with run and attempt: a file of another launch is never joined."""

    address: str
    port: int
    nonce: str


def join_store(info: RankInfo, header: TaskFileHeader, path: Path, launch: str, single_node: bool) -> TCPStore:
    """Return the store that all ranks of a launch share, once all of them have joined.

    Args:
        info: this rank; rank 0 opens the store.
        header: the submission's header: time limit (``wait_s``), network interface and host names.
        path: the file in which rank 0 writes its address (``Attempt.rendezvous_path``).
        launch: ``run_id/attempt``, by which a file of another launch is recognised.
        single_node: whether all ranks are on one node, where they use loopback.

    Raises:
        WorkerError: a rank did not join within ``header.wait_s``; the message has the file, the seconds and, on
            rank 0, the missing ranks. Also if this host has no usable address.
    """
    interface, address = reachable_address(single_node, header.interface, header.host_suffix)
    set_interface_variables(interface, header.interface is not None, single_node)
    if header.meet_by_host_name:
        _, address = reachable_address(single_node, None, header.host_suffix)
    if info.rank == 0:
        store = _open_store(address, path, launch, header.wait_s)
        store.set("joined/0", socket.gethostname())
        missing = wait_for_keys(store, [f"joined/{rank}" for rank in range(info.world_size)], header.wait_s)
        if missing:
            ranks = ", ".join(key.partition("/")[2] for key in missing)
            raise WorkerError(
                f"rank 0 waited {header.wait_s:g} s at {address} port {store.port} for rank{'s' * (len(missing) > 1)} "
                f"{ranks} of {info.world_size} to read {path} and join",
                hint="did they start? can their nodes read this file, and reach this address?",
            )
        store.set(_ALL_JOINED_KEY, "1")
        return store
    store = _find_store(path, launch, header.wait_s)
    store.set(f"joined/{info.rank}", socket.gethostname())
    if wait_for_keys(store, [_ALL_JOINED_KEY], header.wait_s):
        raise WorkerError(
            f"rank {info.rank} joined through {path}, but rank 0 did not see all {info.world_size} ranks "
            f"within {header.wait_s:g} s"
        )
    return store


def set_interface_variables(interface: str | None, named_by_profile: bool, single_node: bool) -> None:
    """Set the interface for gloo (and NCCL where the profile names one); what the user set stays."""
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if named_by_profile and not single_node:
            # NCCL takes a name for a prefix unless it follows "="; gloo takes whole names alone.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _open_store(address: str, path: Path, launch: str, wait_s: float) -> TCPStore:
    raise_open_file_limit()
    # Port 0: the system hands out a free one, so that two tasks of an array on one node never meet.
    store = TCPStore(address, 0, None, True, to_timedelta(wait_s), wait_for_workers=False)
    nonce = f"{launch}/{secrets.token_hex(8)}"
    store.set(_NONCE_KEY, nonce)
    write_atomic(path, msgspec.json.encode(RendezvousFile(address, store.port, nonce)) + b"\n")
    return store


def _find_store(path: Path, launch: str, wait_s: float) -> TCPStore:
    give_up = time.monotonic() + wait_s
    seen = "the file did not appear"
    while (left := give_up - time.monotonic()) > 0:
        meeting = _read_rendezvous(path)
        if meeting is not None:
            if not meeting.nonce.startswith(f"{launch}/"):
                seen = f"it belongs to another launch ({meeting.nonce!r})"
            else:
                store = _connect_store(meeting, wait_s, min(left, _CONNECT_S))
                if store is not None:
                    return store
                seen = f"no process with its nonce answers at {meeting.address} port {meeting.port}"
        time.sleep(_STORE_POLL_S)
    message = f"waited {wait_s:g} s for rank 0's address in {path}: {seen}"
    raise WorkerError(message, hint="is rank 0 running, and is the results tree on a file system that all nodes share?")


def _read_rendezvous(path: Path) -> RendezvousFile | None:
    with contextlib.suppress(OSError):
        # Listing the folder makes NFS look again where it remembers that the file was absent.
        os.listdir(path.parent)
    try:
        return decode_record(read_regular(path), RendezvousFile)
    except (OSError, msgspec.MsgspecError):
        return None


def _connect_store(meeting: RendezvousFile, wait_s: float, limit_s: float) -> TCPStore | None:
    try:
        # A socket of our own first: torch's client writes a warning for every refusal.
        with socket.create_connection((meeting.address, meeting.port), limit_s):
            pass
        store = TCPStore(meeting.address, meeting.port, None, False, to_timedelta(limit_s), wait_for_workers=False)
        if store.check([_NONCE_KEY]) and store.get(_NONCE_KEY) == meeting.nonce.encode():
            store.set_timeout(to_timedelta(wait_s))
            return store
    except (OSError, RuntimeError):
        return None
    return None


def wait_for_keys(store: Store, keys: list[str], wait_s: float) -> list[str]:
    """Wait until ``store`` has all ``keys``, at most ``wait_s`` seconds; return the keys that are still absent."""
    give_up = time.monotonic() + wait_s
    pause = 0.002
    missing = keys
    while True:
        missing = [key for key in missing if not store.check([key])]
        if not missing or time.monotonic() > give_up:
            return missing
        time.sleep(pause)
        pause = min(2 * pause, _STORE_POLL_S)


_NO_TIMEOUT = datetime.timedelta(days=7)
_PROGRESS_POLL_S = 0.5
_LARGEST_VALUE_BYTES = 4 * 2**20
_ABORT_KEY = "abort"
_CAUSE_KEY = "cause"


class ControlChannel:
    """Messages between the ranks of a run outside the process groups: ends, causes, progress and results.

    They pass through the store that rank 0 opened, so they also arrive while a collective hangs. No method waits
    without a time limit. A lost store is no error in ``announce_abort``, ``cause``, ``send`` and ``collect``, which a
    rank calls as it ends; other methods raise torch's ``RuntimeError`` (``DistStoreError``).

    Example::

        channel = ControlChannel(store, rank=1, world_size=4)
        channel.watch_peers(on_abort=stop, on_lost=stop)
        channel.send(result)  # rank 0: channel.collect(attempt, wait_s=60.0)
    """

    def __init__(self, store: TCPStore, rank: int, world_size: int) -> None:
        """``store`` is the result of ``join_store``; ``rank`` is this rank, 0 to ``world_size - 1``."""
        self.store = store
        self.rank = rank
        self.world_size = world_size

    def watch_peers(self, on_abort: Callable[[], None], on_lost: Callable[[], None]) -> None:
        """Start a thread that calls one of the functions once, when another rank ends.

        The thread sleeps in the store until then: it costs the measured steps nothing.

        Args:
            on_abort: called when a rank has announced its end.
            on_lost: called when the store is gone, and with it rank 0.
        """
        store = clone_connection(self.store)

        def wait() -> None:
            try:
                store.wait([_ABORT_KEY], _NO_TIMEOUT)
            except RuntimeError:
                on_lost()
            else:
                on_abort()

        threading.Thread(target=wait, name="peers", daemon=True).start()

    def announce_abort(self, cause: FailureCause | None) -> None:
        """Announce that this rank ends before the others. The first announced cause counts.

        Args:
            cause: the failure of this rank; ``None`` if its end only follows from another rank's.
        """
        with contextlib.suppress(RuntimeError):
            if cause is not None:
                self.store.compare_set(_CAUSE_KEY, "", msgspec.json.encode(cause).decode())
            self.store.set(_ABORT_KEY, "1")

    def cause(self) -> FailureCause | None:
        """Return the cause that the first failed rank announced; ``None`` if no rank did, or the store is gone."""
        try:
            if self.store.check([_CAUSE_KEY]):
                return msgspec.json.decode(self.store.get(_CAUSE_KEY), type=FailureCause)
        except (RuntimeError, msgspec.MsgspecError):
            return None
        return None

    def publish(self, key: str, text: str) -> None:
        """Set ``key`` to ``text`` for all ranks."""
        self.store.set(key, text)

    def wait_while_progressing(
        self, progress_key: str, done_key: str, patience_s: float, check: Callable[[], None], awaited: str
    ) -> None:
        """Wait for ``done_key`` as long as the value of ``progress_key`` changes at least every ``patience_s``.

        Args:
            progress_key: a key whose value another rank changes as it gets on (``publish``).
            done_key: the key that it sets at the end.
            patience_s: seconds without a change after which the wait fails.
            check: called at every poll; may raise.
            awaited: name of the work, for the message.

        Raises:
            WorkerError: no progress for ``patience_s``.
        """
        pause, progress, changed_s = 0.002, "nothing yet", time.monotonic()
        while not self.store.check([done_key]):
            check()
            current = self.store.get(progress_key).decode() if self.store.check([progress_key]) else progress
            if current != progress:
                progress, changed_s = current, time.monotonic()
            if time.monotonic() - changed_s > patience_s:
                raise WorkerError(
                    f"rank {self.rank} waited {patience_s:g} s for {awaited} to get any further; last heard: {progress}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _PROGRESS_POLL_S)

    def send(self, result: RankResult) -> None:
        """Send ``result`` to rank 0. Rank 0 reads one that is too large for the store from the rank's file."""
        data = msgspec.json.encode(result)
        with contextlib.suppress(RuntimeError):
            self.store.set(f"result/{self.rank}", data.decode() if len(data) <= _LARGEST_VALUE_BYTES else "")

    def collect(self, attempt: Attempt, wait_s: float) -> dict[int, RankResult]:
        """Wait for the results of all ranks and return them by rank. Called on rank 0.

        Args:
            attempt: the attempt whose rank files stand in for results that were not sent.
            wait_s: seconds until a missing result is read from the rank's file; ranks without one are left out.
        """
        keys = {f"result/{rank}": rank for rank in range(self.world_size)}
        results: dict[int, RankResult] = {}
        with contextlib.suppress(RuntimeError):
            missing = wait_for_keys(self.store, list(keys), wait_s)
            for key, rank in keys.items():
                data = b"" if key in missing else self.store.get(key)
                if data:
                    results[rank] = msgspec.json.decode(data, type=RankResult)
        return results if len(results) == self.world_size else {**attempt.read_ranks(), **results}
