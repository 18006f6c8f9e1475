"""Which address other nodes reach this one by."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import NamedTuple

from hpcbench.errors import WorkerError

_NOT_A_FABRIC = ("docker", "virbr", "veth", "br-", "cni", "podman", "flannel", "tun", "tap")


class Interface(NamedTuple):
    """An interface that is up, with its usable addresses, IPv4 first."""

    name: str
    addresses: list[str]


def interfaces() -> list[Interface]:
    """Interfaces that are up and have an address, in the system's order; link-local addresses are left out."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        v4 = [entry.address for entry in entries if entry.family == socket.AF_INET]
        v6 = [entry.address for entry in entries if entry.family == socket.AF_INET6]
        usable = [text for text in v4 + v6 if not ipaddress.ip_address(text.partition("%")[0]).is_link_local]
        if usable:
            found.append(Interface(name, usable))
    return found


def choose(
    present: list[Interface], wanted: str | None, own_names: Mapping[str, str] | None = None
) -> tuple[str, str] | None:
    """(interface, address) for rank 0 of a world over several nodes; ``None`` where nothing but loopback is up.

    ``wanted`` is the profile's interface: a name, or the beginning of one (``ib``). Without it, the interface that
    holds the address of this host's own name (``own_names``: address -> name) goes before the first one that is up.
    Raises ``WorkerError`` naming what there is where ``wanted`` is absent.
    """
    if wanted:
        matching = [one for one in present if one.name == wanted] or [
            one for one in present if one.name.startswith(wanted)
        ]
        if not matching:
            listed = ", ".join(f"{one.name} {one.addresses[0]}" for one in present) or "none"
            raise WorkerError(
                f"the profile names the network interface {wanted!r}, but {socket.gethostname()} has: {listed}",
                hint="set `interface` in the cluster's profile to one of them, or leave it out",
            )
        return matching[0].name, matching[0].addresses[0]
    outward = [one for one in present if not ipaddress.ip_address(one.addresses[0].partition("%")[0]).is_loopback]
    for one in outward:
        for address in one.addresses:
            if address in (own_names or {}):
                return one.name, address
    outward.sort(key=lambda one: one.name.startswith(_NOT_A_FABRIC))
    return (outward[0].name, outward[0].addresses[0]) if outward else None


def resolve(name: str) -> list[str]:
    """Addresses of a host name, IPv4 first; empty where it has none."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def interface_of(address: str, present: list[Interface]) -> str | None:
    """The interface that holds ``address``."""
    return next((one.name for one in present if address in one.addresses), None)


def own_address(single_node: bool, wanted: str | None, host_suffix: str) -> tuple[str | None, str]:
    """(interface, address) by which the other ranks reach this one.

    A world on one node talks over loopback. ``host_suffix`` (JUWELS' ``i``) names the fast network's host name.
    """
    if single_node:
        return "lo", "127.0.0.1"
    present, host = interfaces(), socket.gethostname()
    if host_suffix and not wanted:
        short, _, domain = host.partition(".")
        name = short + host_suffix + (f".{domain}" if domain else "")
        addresses = resolve(name)
        if not addresses:
            raise WorkerError(
                f"{name!r} (this host's name with the profile's host_suffix {host_suffix!r}) has no address",
                hint="set `host_suffix` in the cluster's profile to what the fast network's names end in",
            )
        return interface_of(addresses[0], present), addresses[0]
    chosen = choose(present, wanted, dict.fromkeys(resolve(host), host))
    if chosen is not None:
        return chosen
    addresses = resolve(host)
    if addresses:
        return None, addresses[0]
    raise WorkerError(f"{host} has no address that another node could reach", hint="set `interface` in the profile")
