"""A short job that looks at a node from inside, in the jobs' own environment."""

from __future__ import annotations

import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.config.cluster import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.fileio import make_folder, printable
from hpcbench.paths import cache_folder
from hpcbench.render.engine import TemplateEngine
from hpcbench.render.script import context
from hpcbench.render.shape import Shape
from hpcbench.submit.executor import ScriptExecutor
from hpcbench.submit.offer import Tell
from hpcbench.submit.scheduler import QueueLook, slurm_environment
from hpcbench.submit.site.links import Topology, parse_ports, parse_topology

_SECTION = "=== hpcbench "
_LIMIT_S = 300.0
_POLL_S = 1.0
_FABRICS = ("hsn", "ib")


@dataclass(frozen=True)
class Probe:
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
        return next((name for name in _FABRICS if any(one.startswith(name) for one in self.interfaces)), None)

    @property
    def devices(self) -> list[str]:
        """The accelerators, in their vendors' words."""
        nvidia = [line for line in self.sections.get("nvidia", []) if line.startswith("GPU ")]
        amd = [line for line in self.sections.get("amd", []) if "Card series" in line or "Card Series" in line]
        return nvidia or amd

    @property
    def topology(self) -> Topology:
        """How devices reach each other, and which cores are next to them."""
        return parse_topology(self.sections.get("topology", []))

    @property
    def ports(self) -> dict[str, float]:
        """InfiniBand's adapters that are up, and their bit/s."""
        return parse_ports(self.sections.get("infiniband", []))

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


def parse_probe(text: str) -> Probe:
    """The job's output, cut into sections."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(_SECTION):
            lines = sections.setdefault(line.removeprefix(_SECTION), [])
        elif line.strip():
            lines.append(line)
    return Probe(sections)


def render_probe(profile: ClusterProfile, folder: Path) -> str:
    """The script of a job on one node with all its devices; on more, where the partition takes no such job."""
    devices = profile.node_of(None).devices or 1
    nodes = profile.partition(None).min_nodes or 1
    longest_min = profile.partition(None).longest_min(nodes)
    limit_s = _LIMIT_S if longest_min is None else min(_LIMIT_S, longest_min * 60)
    shape = Shape(profile.default_partition, profile.default_environment, nodes, devices, 1, limit_s)
    values = context(profile, shape, "probe", folder, 0)
    node = profile.node_of(None)
    values["folders"] = [one for one in (node.scratch_folder, node.local_folder) if one]
    log = str(folder / "log")
    values["directives"] = [
        (name, log if name in ("output", "error") else value)
        for name, value in values["directives"]
        if name != "signal"
    ]
    return TemplateEngine().render("probe.sh.j2", values)


def run_probe(profile: ClusterProfile, tell: Tell, wait_s: float = 900.0) -> Probe:
    """Submit the job, wait for its end, read what it saw.

    Raises ``SubmitError`` where it is refused, dies, or does not end in time; then it is cancelled.
    """
    folder = cache_folder() / "probes" / f"{profile.name}-{secrets.token_hex(4)}"
    make_folder(folder)
    (folder / "probe.sh").write_text(render_probe(profile, folder), encoding="utf-8")
    environment = slurm_environment(profile)
    job_id = ScriptExecutor(folder, environment).submit_script(folder / "probe.sh", [], 0)
    tell(f"job {job_id} looks at a node; waiting for it ...")
    try:
        text = _wait(profile, job_id, folder / "log", wait_s)
    except KeyboardInterrupt:
        _cancel(profile, job_id)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return parse_probe(text)


def _wait(profile: ClusterProfile, job_id: str, log: Path, wait_s: float) -> str:
    give_up = time.monotonic() + wait_s
    since = time.time()
    gone = 0
    reason = "it did not begin"
    while time.monotonic() < give_up:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if f"{_SECTION}end" in text:
            return text
        state = QueueLook([job_id], profile).job_states([job_id], since).get(job_id)
        reason = state.reason if state else "the scheduler knows nothing of it"
        # What the job wrote last comes late over a network's file system.
        gone = gone + 1 if state is None or state.state not in ("pending", "running") else 0
        if gone > 10:
            last = printable(" ".join(text.splitlines()[-3:]))
            raise SubmitError(f"the probe, job {job_id}, ended early ({reason}): {last}", hint=f"see {log.parent}")
        time.sleep(_POLL_S)
    _cancel(profile, job_id)
    raise SubmitError(f"the probe, job {job_id}, has not ended after {wait_s:g} s ({reason}): it is cancelled")


def _cancel(profile: ClusterProfile, job_id: str) -> None:
    import contextlib
    import subprocess

    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["scancel", job_id], env=slurm_environment(profile), timeout=60, check=False)
