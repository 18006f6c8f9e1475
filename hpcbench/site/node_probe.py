"""A short job that inspects a node in the jobs' own environment: devices, interfaces, cores, memory and packages."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.fileio import make_folder, printable_text
from hpcbench.paths import cache_folder
from hpcbench.render.job_script import make_job_shape, template_context
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.submit.sbatch import SbatchExecutor
from hpcbench.submit.scheduler import Notify, command_environment
from hpcbench.submit.slurm_queue import first_cluster, query_job_states, run_on_cluster

_SECTION_PREFIX = "=== hpcbench "
_PROBE_LIMIT_S = 300.0
_POLL_S = 1.0
_QUEUE_POLL_S = 10.0
"""The job's output is read often, because that costs little; the scheduler is queried rarely."""
_MAX_PROBE_AGE_S = 86400.0
_FABRIC_PREFIXES = ("hsn", "ib")


@dataclass(frozen=True)
class NodeProbe:
    """The output of the probe's job, by section."""

    sections: dict[str, list[str]]

    @property
    def interfaces(self) -> dict[str, str]:
        """Names and addresses (IPv4 where there is one), without loopback."""
        addresses: dict[str, str] = {}
        for line in self.sections.get("interfaces", []):
            match = re.match(r"\d+:\s+(\S+?)(?:@\S+)?\s+inet6?\s+([0-9a-fA-F.:]+)", line)
            if match and match[1] != "lo":
                addresses.setdefault(match[1], match[2])
        return addresses

    @property
    def fabric(self) -> str | None:
        """The prefix of the names of a fast network's interfaces; ``None`` if there is none."""
        names = list(self.interfaces)
        return next((prefix for prefix in _FABRIC_PREFIXES if any(name.startswith(prefix) for name in names)), None)

    @property
    def devices(self) -> list[str]:
        """The accelerators, as their vendors' tools list them."""
        nvidia = [line for line in self.sections.get("nvidia", []) if line.startswith("GPU ")]
        amd = [line for line in self.sections.get("amd", []) if re.search(r"Card [sS]eries|^\s*GPU: \d", line)]
        return nvidia or amd

    @property
    def cpus(self) -> int | None:
        """The number of CPUs that the job, which requested a whole node, could use; ``None`` if it reported none."""
        listed = " ".join(self.sections.get("cores", [])).rpartition(": ")[2]
        if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", listed):
            return None
        ranges = [part.split("-") for part in listed.split(",")]
        return sum(int(bounds[-1]) - int(bounds[0]) + 1 for bounds in ranges)

    @property
    def tmp_in_memory(self) -> bool:
        return self.sections.get("tmp", [""])[:1] == ["tmpfs"]

    @property
    def memory_bytes(self) -> int | None:
        """The memory of the host in bytes; ``None`` if the job did not report it."""
        match = re.search(r"(\d+) kB", " ".join(self.sections.get("memory", [])))
        return int(match[1]) * 1024 if match else None

    @property
    def runtimes(self) -> list[str]:
        """Container runtimes on the node's PATH."""
        return [Path(line).name for line in self.sections.get("runtimes", [])]

    @property
    def worker(self) -> dict[str, Any] | None:
        """The report of the worker's own doctor; ``None`` if it could not start."""
        try:
            return decode_report("\n".join(self.sections.get("worker", [])))
        except msgspec.DecodeError:
            return None


def decode_report(output: str) -> dict[str, Any]:
    """The JSON of the worker's doctor in its output, in which wrappers of the interpreter may print, too."""
    begin = max(output.find("{\n"), 0) or output.find("{")
    return msgspec.json.decode(output[begin : output.rfind("}") + 1], type=dict[str, Any])


def parse_probe(text: str) -> NodeProbe:
    """Split the job's output into sections."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(_SECTION_PREFIX):
            lines = sections.setdefault(line.removeprefix(_SECTION_PREFIX), [])
        elif line.strip():
            lines.append(line)
    return NodeProbe(sections)


def render_probe(profile: ClusterProfile, folder: Path) -> str:
    """The script of a job on one node with all its devices; on more if the partition requires more nodes."""
    partition = profile.partition(None)
    node, nodes = partition.node, partition.min_nodes or 1
    longest_min = partition.longest_min(nodes)
    limit_s = _PROBE_LIMIT_S if longest_min is None else min(_PROBE_LIMIT_S, longest_min * 60)
    shape = make_job_shape(profile, nodes, node.devices or 1, 1, limit_s)
    values = template_context(shape, "probe", folder, 0)
    values["folders"] = [folder for folder in (node.scratch_folder, node.local_folder) if folder]
    log = str(folder / "log")
    values["directives"] = [
        (name, log if name in ("output", "error") else value)
        for name, value in values["directives"]
        if name != "signal"
    ]
    return TemplateEngine().render("probe.sh.j2", values)


def run_probe(profile: ClusterProfile, notify: Notify, wait_s: float = 900.0) -> NodeProbe:
    """Submit the job, wait for its end, parse its output.

    Raises ``SubmitError`` if it is refused, dies, or does not end within ``wait_s``. No job and no folder is left,
    also where this process is interrupted or receives a signal to end.
    """
    probes = cache_folder() / "probes"
    _remove_old_folders(probes)
    folder = probes / f"{profile.name}-{secrets.token_hex(4)}"
    make_folder(folder)
    try:
        script = folder / "probe.sh"
        script.write_text(render_probe(profile, folder), encoding="utf-8")
        job_id, answering = SbatchExecutor(folder, command_environment(profile)).submit_script(script, [], 0)
        cluster = answering or first_cluster(profile)
        notify(f"job {job_id} looks at a node; waiting for it ...")
        try:
            with _exit_on_sigterm():
                return parse_probe(_wait_for_output(profile, job_id, cluster, folder / "log", wait_s))
        except BaseException:
            run_on_cluster(["scancel", job_id], cluster, profile)
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_old_folders(probes: Path) -> None:
    """Remove the folders of probes that were killed: no probe takes a day."""
    for folder in probes.glob("*/"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _MAX_PROBE_AGE_S:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise ``SystemExit`` where SIGTERM would end this process without further ado."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_for_output(profile: ClusterProfile, job_id: str, cluster: str, log: Path, wait_s: float) -> str:
    give_up = time.monotonic() + wait_s
    since = time.time()
    absent, next_query_s = 0, 0.0
    reason = "it did not begin"
    while time.monotonic() < give_up:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if f"{_SECTION_PREFIX}end" in text:
            return text
        if time.monotonic() >= next_query_s:
            next_query_s = time.monotonic() + _QUEUE_POLL_S
            state = query_job_states([job_id], since, profile, cluster).get(job_id)
            reason = state.reason if state else "the scheduler knows nothing of it"
            # A network file system shows the job's last lines late.
            absent = absent + 1 if state is None or state.state not in ("pending", "running", "waiting") else 0
            if absent > 1:
                last = printable_text(" ".join(text.splitlines()[-3:]))
                hint = "the last lines of its log:\n  " + printable_text("\n  ".join(text.splitlines()[-10:]))
                raise SubmitError(f"the probe, job {job_id}, ended early ({reason}): {last}", hint=hint)
        time.sleep(_POLL_S)
    raise SubmitError(f"the probe, job {job_id}, has not ended after {wait_s:g} s ({reason}): it is cancelled")
