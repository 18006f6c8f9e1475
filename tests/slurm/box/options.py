"""The options of the box, and the numbers of texts such as `3g` and `1gbit`."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import re

from .errors import BoxError

MIB = 1024**2
GIB = 1024**3
_MEM = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_LINK = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])bit", re.IGNORECASE)
_MEM_UNIT = {"": 1, "k": 1024, "m": MIB, "g": GIB, "t": 1024 * GIB}
_LINK_UNIT = {"k": 10**3, "m": 10**6, "g": 10**9}

RELEASES = {"22.05": "bookworm", "24.11": "trixie"}
"""Releases of SLURM that the box can fetch, and Debian's suite of each."""
MAX_NODES = 64
MIN_MEM = 256 * MIB  # slurmd, slurmstepd and one small shell must fit
MIN_CPUS = 0.05


@dataclasses.dataclass(frozen=True)
class Options:
    """The values of one box; two boxes with equal options are the same box."""

    nodes: int = 4
    gpus: int = 4
    """Pretend GPUs of each node."""
    gpu_type: str = ""
    """What SLURM calls them beside `gpu`, as `a100` in `gpu:a100:4`."""
    cpus: float = 0.4
    """Cores of the machine that each node may use, enforced by a cgroup quota."""
    mem: int = 3 * GIB
    """Bytes of memory of each node, enforced by a cgroup."""
    link: int = 10**9
    """Bits per second of each node's link, in each direction."""
    slots: int = 8
    """CPUs of each node as SLURM counts them; they share `cpus` real cores."""
    max_array_size: int = 1001
    grace_time: int = 10
    """Seconds between the SIGTERM and the SIGKILL of a preempted job."""
    subnet: str = "10.77.0.0/24"
    slurm: str = dataclasses.field(default_factory=lambda: os.environ.get("SLURMBOX_RELEASE", ""))
    """Release of SLURM, as `24.11`; empty is the machine's own. The variable chooses it for all boxes of the tests."""

    def __post_init__(self) -> None:
        _between("nodes", self.nodes, 1, MAX_NODES)
        _between("gpus", self.gpus, 0, 64)
        _between("slots", self.slots, 1, 256)
        _between("max-array-size", self.max_array_size, 2, 4_000_001)
        _between("grace-time", self.grace_time, 0, 3600)
        if self.slurm and self.slurm not in RELEASES:
            raise BoxError(f"slurm is {self.slurm!r}: one of {', '.join(RELEASES)}, or nothing for the machine's own")
        if self.cpus < MIN_CPUS:
            raise BoxError(f"cpus is {self.cpus:g}, the least is {MIN_CPUS:g}: give each node more")
        if self.mem < MIN_MEM:
            raise BoxError(f"mem is {self.mem // MIB} MiB, the least is {MIN_MEM // MIB} MiB: give each node more")
        if self.link < 10**5:
            raise BoxError(f"link is {self.link} bit/s, the least is 100kbit: give each node more")
        try:
            net = ipaddress.ip_network(self.subnet)
        except ValueError as err:
            raise BoxError(f"subnet {self.subnet!r} is not a network ({err}): give one such as 10.77.0.0/24") from None
        if net.version != 4 or net.num_addresses < self.nodes + 3:
            raise BoxError(
                f"subnet {self.subnet} has room for {max(net.num_addresses - 3, 0)} nodes, "
                f"{self.nodes} are wanted: give a larger IPv4 network"
            )

    @property
    def names(self) -> list[str]:
        """n1, n2, ... in order."""
        return [f"n{i}" for i in range(1, self.nodes + 1)]

    @property
    def prefix_length(self) -> int:
        return ipaddress.ip_network(self.subnet).prefixlen

    @property
    def controller_address(self) -> str:
        """The machine's own address on the bridge: the last one of the network."""
        return str(ipaddress.ip_network(self.subnet)[-2])

    def address(self, node: str) -> str:
        """Address of a node: n1 has the first one of the network."""
        return str(ipaddress.ip_network(self.subnet)[int(node[1:])])

    def describe(self) -> str:
        return (
            f"{f'SLURM {self.slurm}, ' if self.slurm else ''}{self.nodes} nodes, each with {self.cpus:g} cores, {self.mem / GIB:.3g} GiB, "
            f"{self.gpus} pretend GPUs and a link of {format_link(self.link)}"
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Options | None:
        """None when the text is damaged or was written by another version of the box."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, BoxError):
            return None


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BoxError(f"{name} is {value}, allowed is {low} to {high}")


def parse_mem(text: str) -> int:
    """Bytes in `3g`, `512m` or `3GiB` (powers of 1024, rounded down to a whole MiB)."""
    match = _MEM.fullmatch(text.strip())
    if not match:
        raise BoxError(f"mem {text!r} is not a size: write it like 3g or 512m")
    size = int(float(match[1]) * _MEM_UNIT[match[2].lower()])
    return size // MIB * MIB


def parse_link(text: str) -> int:
    """Bits per second in `1gbit`, `200mbit` or `64kbit` (powers of 1000, as tc counts)."""
    match = _LINK.fullmatch(text.strip())
    if not match:
        raise BoxError(f"link {text!r} is not a rate: write it like 1gbit or 200mbit")
    return int(float(match[1]) * _LINK_UNIT[match[2].lower()])


def format_link(rate: int) -> str:
    """The shortest text that parse_link reads back."""
    for unit, size in (("gbit", 10**9), ("mbit", 10**6)):
        if rate >= size and rate % (size // 1000) == 0:
            return f"{rate / size:g}{unit}"
    return f"{rate / 1000:g}kbit"
