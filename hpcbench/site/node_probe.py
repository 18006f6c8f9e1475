"""A short job that inspects a node in the jobs' own environment: devices, links, interfaces, cores, memory and
packages.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.fileio import make_folder, printable_text
from hpcbench.paths import cache_folder
from hpcbench.render.job_script import template_context
from hpcbench.render.launch_step import JobShape
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.submit.sbatch import SbatchExecutor
from hpcbench.submit.scheduler import Notify
from hpcbench.submit.scheduler_settings import command_environment, run_command
from hpcbench.submit.slurm_queue import QueueQuery

_ESCAPE_PATTERN = re.compile(r"\x1b\[[0-9;]*m")
_GPU_NAME_PATTERN = re.compile(r"GPU\d+")


@dataclass(frozen=True)
class DeviceTopology:
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


def parse_topology(lines: Sequence[str]) -> DeviceTopology:
    """The rows of devices; a tab ends a cell, and the first cell of the heading is empty."""
    rows = [[cell.strip() for cell in _ESCAPE_PATTERN.sub("", line).split("\t")] for line in lines]
    head = next((row for row in rows if not row[0] and "GPU0" in row), None)
    if head is None:
        return DeviceTopology()
    devices = [place for place, name in enumerate(head) if _GPU_NAME_PATTERN.fullmatch(name)]
    near = head.index("CPU Affinity") if "CPU Affinity" in head else len(head)
    own = [row for row in rows if _GPU_NAME_PATTERN.fullmatch(row[0]) and len(row) > devices[-1]]
    between = frozenset(row[place] for row in own for place in devices) - {"X", ""}
    return DeviceTopology(between, tuple(row[near] if near < len(row) else "" for row in own))


def parse_infiniband_ports(lines: Sequence[str]) -> dict[str, float]:
    """Lines such as ``mlx5_0 InfiniBand 4: ACTIVE 200 Gb/sec (4X HDR)``: bit/s of each adapter that is up."""
    found: dict[str, float] = {}
    for line in lines:
        match = re.match(r"(?P<name>\S+) InfiniBand \d+: ACTIVE (?P<rate>[\d.]+) Gb/sec", line)
        if match:
            found[match["name"]] = found.get(match["name"], 0.0) + float(match["rate"]) * 1e9
    return found


_SECTION_PREFIX = "=== hpcbench "
_PROBE_LIMIT_S = 300.0
_POLL_S = 1.0
_FABRIC_PREFIXES = ("hsn", "ib")


@dataclass(frozen=True)
class NodeProbe:
    """What the job saw, by section."""

    sections: dict[str, list[str]]

    @property
    def interfaces(self) -> dict[str, str]:
        """Names and addresses (IPv4 where there is one), without loopback."""
        found: dict[str, str] = {}
        for line in self.sections.get("interfaces", []):
            match = re.match(r"\d+:\s+(\S+?)(?:@\S+)?\s+inet6?\s+([0-9a-fA-F.:]+)", line)
            if match and match[1] != "lo":
                found.setdefault(match[1], match[2])
        return found

    @property
    def fabric(self) -> str | None:
        """The prefix of the interfaces that are named like a fast network's; ``None`` where none is."""
        return next((name for name in _FABRIC_PREFIXES if any(one.startswith(name) for one in self.interfaces)), None)

    @property
    def devices(self) -> list[str]:
        """The accelerators, in their vendors' words."""
        nvidia = [line for line in self.sections.get("nvidia", []) if line.startswith("GPU ")]
        amd = [line for line in self.sections.get("amd", []) if "Card series" in line or "Card Series" in line]
        return nvidia or amd

    @property
    def topology(self) -> DeviceTopology:
        """How devices reach each other, and which cores are next to them."""
        return parse_topology(self.sections.get("topology", []))

    @property
    def ports(self) -> dict[str, float]:
        """InfiniBand's adapters that are up, and their bit/s."""
        return parse_infiniband_ports(self.sections.get("infiniband", []))

    @property
    def cpus(self) -> int | None:
        """CPUs that the job, which asked for a whole node's, could use."""
        listed = " ".join(self.sections.get("cores", [])).rpartition(": ")[2]
        if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", listed):
            return None
        ends = [one.split("-") for one in listed.split(",")]
        return sum(int(one[-1]) - int(one[0]) + 1 for one in ends)

    @property
    def tmp_in_memory(self) -> bool:
        """Whether ``/tmp`` is memory."""
        return self.sections.get("tmp", [""])[:1] == ["tmpfs"]

    @property
    def memory_bytes(self) -> int | None:
        """The host's."""
        match = re.search(r"(\d+) kB", " ".join(self.sections.get("memory", [])))
        return int(match[1]) * 1024 if match else None

    @property
    def runtimes(self) -> list[str]:
        """Container runtimes on the node's PATH."""
        return [Path(line).name for line in self.sections.get("runtimes", [])]

    @property
    def worker(self) -> dict[str, Any] | None:
        """What the worker's own doctor said; ``None`` where it could not start."""
        try:
            report: dict[str, Any] = msgspec.json.decode("\n".join(self.sections.get("worker", [])))
        except msgspec.DecodeError:
            return None
        return report


def parse_probe(text: str) -> NodeProbe:
    """The job's output, cut into sections."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(_SECTION_PREFIX):
            lines = sections.setdefault(line.removeprefix(_SECTION_PREFIX), [])
        elif line.strip():
            lines.append(line)
    return NodeProbe(sections)


def render_probe(profile: ClusterProfile, folder: Path) -> str:
    """The script of a job on one node with all its devices; on more, where the partition takes no such job."""
    devices = profile.node_of(None).devices or 1
    nodes = profile.partition(None).min_nodes or 1
    longest_min = profile.partition(None).longest_min(nodes)
    limit_s = _PROBE_LIMIT_S if longest_min is None else min(_PROBE_LIMIT_S, longest_min * 60)
    shape = JobShape(profile.default_partition, profile.default_environment, nodes, devices, 1, limit_s)
    values = template_context(profile, shape, "probe", folder, 0)
    node = profile.node_of(None)
    values["folders"] = [one for one in (node.scratch_folder, node.local_folder) if one]
    log = str(folder / "log")
    values["directives"] = [
        (name, log if name in ("output", "error") else value)
        for name, value in values["directives"]
        if name != "signal"
    ]
    return TemplateEngine().render("probe.sh.j2", values)


def run_probe(profile: ClusterProfile, tell: Notify, wait_s: float = 900.0) -> NodeProbe:
    """Submit the job, wait for its end, read what it saw.

    Raises ``SubmitError`` where it is refused, dies, or does not end in time; then it is cancelled.
    """
    folder = cache_folder() / "probes" / f"{profile.name}-{secrets.token_hex(4)}"
    make_folder(folder)
    (folder / "probe.sh").write_text(render_probe(profile, folder), encoding="utf-8")
    job_id = SbatchExecutor(folder, command_environment(profile)).submit_script(folder / "probe.sh", [], 0)
    tell(f"job {job_id} looks at a node; waiting for it ...")
    try:
        text = _wait_for_output(profile, job_id, folder / "log", wait_s)
    except KeyboardInterrupt:
        _cancel_probe(profile, job_id)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return parse_probe(text)


def _wait_for_output(profile: ClusterProfile, job_id: str, log: Path, wait_s: float) -> str:
    give_up = time.monotonic() + wait_s
    since = time.time()
    gone = 0
    reason = "it did not begin"
    while time.monotonic() < give_up:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if f"{_SECTION_PREFIX}end" in text:
            return text
        state = QueueQuery([job_id], profile).job_states([job_id], since).get(job_id)
        reason = state.reason if state else "the scheduler knows nothing of it"
        # What the job wrote last comes late over a network's file system.
        gone = gone + 1 if state is None or state.state not in ("pending", "running") else 0
        if gone > 10:
            last = printable_text(" ".join(text.splitlines()[-3:]))
            raise SubmitError(f"the probe, job {job_id}, ended early ({reason}): {last}", hint=f"see {log.parent}")
        time.sleep(_POLL_S)
    _cancel_probe(profile, job_id)
    raise SubmitError(f"the probe, job {job_id}, has not ended after {wait_s:g} s ({reason}): it is cancelled")


def _cancel_probe(profile: ClusterProfile, job_id: str) -> None:
    run_command(["scancel", job_id], profile)
