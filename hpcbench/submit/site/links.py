"""What a node says of its links: which devices are near which cores, and the rates of its network ports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"GPU\d+")


@dataclass(frozen=True)
class Topology:
    """The matrix of ``nvidia-smi topo -m``."""

    between_devices: frozenset[str] = frozenset()
    """How devices reach each other: ``NV12`` is twelve NVLinks, ``SYS`` goes from one processor to the other."""
    cores: tuple[str, ...] = ()
    """Per device the CPUs next to it, as ``48-63,112-127``; empty where it does not tell."""

    @property
    def device_order(self) -> list[int]:
        """The devices in the order of the cores next to them; empty where that is their own, or not to be told."""
        found = [re.match(r"\d+", text) for text in self.cores]
        first = [int(match[0]) for match in found if match]
        if len(set(first)) < len(self.cores) or first == sorted(first):
            return []
        return sorted(range(len(first)), key=first.__getitem__)


def parse_topology(lines: Sequence[str]) -> Topology:
    """The rows of devices; a tab ends a cell, and the first cell of the heading is empty."""
    rows = [[cell.strip() for cell in _ESCAPE.sub("", line).split("\t")] for line in lines]
    head = next((row for row in rows if not row[0] and "GPU0" in row), None)
    if head is None:
        return Topology()
    devices = [place for place, name in enumerate(head) if _DEVICE.fullmatch(name)]
    near = head.index("CPU Affinity") if "CPU Affinity" in head else len(head)
    own = [row for row in rows if _DEVICE.fullmatch(row[0]) and len(row) > devices[-1]]
    between = frozenset(row[place] for row in own for place in devices) - {"X", ""}
    return Topology(between, tuple(row[near] if near < len(row) else "" for row in own))


def parse_ports(lines: Sequence[str]) -> dict[str, float]:
    """Lines such as ``mlx5_0 InfiniBand 4: ACTIVE 200 Gb/sec (4X HDR)``: bit/s of each adapter that is up."""
    found: dict[str, float] = {}
    for line in lines:
        match = re.match(r"(?P<name>\S+) InfiniBand \d+: ACTIVE (?P<rate>[\d.]+) Gb/sec", line)
        if match:
            found[match["name"]] = found.get(match["name"], 0.0) + float(match["rate"]) * 1e9
    return found
