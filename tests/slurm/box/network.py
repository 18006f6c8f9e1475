"""A bridge, and per node a network namespace whose eth0 is shaped in both directions."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
from pathlib import Path

from . import machine, paths
from .errors import BoxError
from .options import Options
from .shell import run, succeeds

_BRIDGE_FILTER = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
_FORWARD_RULE = ("FORWARD", "-i", paths.BRIDGE, "-o", paths.BRIDGE, "-j", "ACCEPT")


def tbf_args(rate: int) -> list[str]:
    """Token bucket for one end of a link.

    The burst holds 2 ms of traffic, and never less than a few of the 64 KiB packets that the stack hands down.
    """
    burst = max(256 * 1024, rate // 8 // 500)
    return ["root", "tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "latency", "50ms"]


def host_end(node: str) -> str:
    """The machine's end of a node's veth pair; interface names have at most 15 characters."""
    return f"sbx-{node}"


def check(subnet: str) -> None:
    """Refuse a machine without namespaces, bridges or tbf, and a network that is in use."""
    for tool in ("ip", "tc"):
        if not succeeds([tool, "-V"]):
            raise BoxError(f"command `{tool}` is missing: install iproute2")
    if not succeeds(["unshare", "--net", "--uts", "true"]):
        raise BoxError(
            "this machine allows no network namespaces: run on one with CAP_SYS_ADMIN (not a plain container)"
        )
    wanted = ipaddress.ip_network(subnet)
    for route in json.loads(run(["ip", "-json", "-4", "route", "show", "table", "main"])[1] or "[]"):
        if route["dst"] == "default" or route.get("dev") == paths.BRIDGE:
            continue
        if wanted.overlaps(ipaddress.ip_network(route["dst"])):
            raise BoxError(
                f"network {subnet} is in use: {route['dst']} on {route.get('dev')}; "
                "give another one with --subnet, such as 10.78.0.0/24"
            )


def create(options: Options) -> None:
    """Bridge, namespaces and links of all nodes, in one batch each for `ip` and `tc`."""
    length = options.prefix_length
    _batch(
        ["ip"],
        [
            f"link add {paths.BRIDGE} type bridge",
            f"addr add {options.controller_address}/{length} dev {paths.BRIDGE}",
            f"link set {paths.BRIDGE} up",
        ],
    )
    tbf = " ".join(tbf_args(options.link))
    for node in options.names:
        space, end = paths.netns(node), host_end(node)
        run(["ip", "netns", "add", space])
        _batch(
            ["ip"],
            [
                f"link add {end} type veth peer name eth0 netns {space}",
                f"link set {end} master {paths.BRIDGE} up",
            ],
        )
        _batch(
            ["ip", "-n", space],
            [
                "link set lo up",
                f"addr add {options.address(node)}/{length} dev eth0",
                # No default route: where there is none, a look-up at a DNS server fails at once and not after 10 s.
                "link set eth0 up",
            ],
        )
        _shape(["tc"], end, tbf)
        _shape(["tc", "-n", space], "eth0", tbf)
    _allow_forwarding()


def _shape(tc: list[str], device: str, tbf: str) -> None:
    try:
        _batch(tc, [f"qdisc add dev {device} {tbf}"])
    except BoxError as err:
        raise BoxError(f"cannot shape {device}: does this kernel have sch_tbf? {err}") from None


def _batch(tool: list[str], lines: list[str]) -> None:
    run([*tool, "-batch", "-"], stdin="\n".join(lines) + "\n")


def _allow_forwarding() -> None:
    """Docker filters bridged traffic and drops what it does not know: let the nodes reach each other."""
    if _filtered():
        run(["iptables", "-I", *_FORWARD_RULE])


def _filtered() -> bool:
    if machine.find("iptables") is None:
        return False
    with contextlib.suppress(OSError):
        return _BRIDGE_FILTER.read_text().strip() == "1"
    return False


def remove_all() -> None:
    """Delete what `create` made, whatever is left of it."""
    while _filtered() and succeeds(["iptables", "-D", *_FORWARD_RULE]):
        pass
    for space in namespaces():
        run(["ip", "netns", "delete", space], check=False)
    for name in os.listdir("/sys/class/net"):
        if name.startswith("sbx-n"):
            run(["ip", "link", "delete", name], check=False)
    if Path("/sys/class/net", paths.BRIDGE).exists():
        run(["ip", "link", "delete", paths.BRIDGE])
    _remove_netns_folder()


def namespaces() -> list[str]:
    """The box's network namespaces that exist."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(n for n in os.listdir(paths.NETNS_DIR) if n.startswith(paths.NETNS_PREFIX))
    return []


def _remove_netns_folder() -> None:
    """`ip netns` leaves its folder, mounted on itself: an empty one is of no use to anybody."""
    if not paths.NETNS_DIR.is_dir() or any(paths.NETNS_DIR.iterdir()):
        return
    while _is_mounted(paths.NETNS_DIR) and succeeds(["umount", str(paths.NETNS_DIR)]):
        pass
    with contextlib.suppress(OSError):
        paths.NETNS_DIR.rmdir()


def _is_mounted(folder: Path) -> bool:
    """os.path.ismount does not see a folder that is mounted on itself."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == str(folder) for line in lines)
