"""What works for the jobs of a cluster, from where this command runs."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.config.cluster import ClusterProfile
from hpcbench.errors import HpcbenchError
from hpcbench.fileio import printable
from hpcbench.paths import data_folder, expanded
from hpcbench.render.script import python_of
from hpcbench.results.datafolder import survey
from hpcbench.submit import scheduler
from hpcbench.submit.account import check_account
from hpcbench.submit.environment import clean_environment, scrubbed_names
from hpcbench.submit.live import live_partitions
from hpcbench.submit.offer import Tell
from hpcbench.submit.site.probe import Probe, run_probe

_INSTALL = "pip install 'hpcbench[worker]'"


class Finding(msgspec.Struct, kw_only=True):
    """One thing that was looked at."""

    what: str
    works: bool
    needed: bool = True
    detail: str = ""
    mend: str = ""


def examine(profile: ClusterProfile, results: Path, tell: Tell | None = None) -> list[Finding]:
    """Everything that a run on ``profile`` needs, in the order in which it would fail.

    With ``tell`` a job looks at a node from inside, if the cluster takes one, and the wait for it is announced.
    """
    findings = [_results_tree(results)]
    if profile.scheduler.kind == "slurm":
        findings += _slurm(profile)
    elif profile.scheduler.kind != "local":
        detail = "PBS: render writes jobs for qsub" if profile.scheduler.kind == "pbs" else "none: predictions alone"
        findings.append(Finding(what="scheduler", works=True, needed=False, detail=detail))
    if tell and profile.scheduler.kind == "slurm" and all(one.works or not one.needed for one in findings):
        findings += _from_a_node(profile, tell)
    else:
        findings += _worker(profile)
    findings.append(_samples(profile))
    leaking = scrubbed_names()
    if leaking:
        detail = f"{len(leaking)} variables of another job are kept from the jobs: {', '.join(leaking[:5])}"
        findings.append(Finding(what="environment", works=True, needed=False, detail=detail))
    return findings


def _results_tree(results: Path) -> Finding:
    """Whether a file can be made there, in the nearest folder that exists; nothing is left behind."""
    folder = next(path for path in (results, *results.parents) if path.exists())
    probe = folder / f".hpcbench-{secrets.token_hex(4)}"
    try:
        probe.touch(exist_ok=False)
    except OSError as error:
        return Finding(
            what="results",
            works=False,
            detail=f"{results}: {error.strerror}",
            mend="--results or $HPCBENCH_RESULTS",
        )
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return Finding(what="results", works=True, detail=str(results))


def _samples(profile: ClusterProfile) -> Finding:
    """What runs with ``data = "files"`` or ``"real"`` find; none needs to."""
    folder = expanded(data_folder(None, profile.data_folder))
    found = survey(folder)
    names = ", ".join(
        f"{one.dataset}{f'-{one.size}' if one.size else ''} ({one.kind})" for one in found if one.complete
    )
    mend = "" if found else "hpcbench data make DATASET, where runs are to read files"
    if mend and not profile.node_of(None).internet:
        mend += "; here and before they are submitted, as nodes have no internet"
    return Finding(what="data", works=bool(found), needed=False, detail=f"{folder}: {names or 'nothing'}", mend=mend)


def _slurm(profile: ClusterProfile) -> list[Finding]:
    findings = []
    for command, needed in (("sbatch", True), ("squeue", True), ("scancel", True), ("sacct", False)):
        path = scheduler.which(command, profile)
        mend = "" if path else "run on a login node, or set scheduler.bin_folder in the profile"
        findings.append(
            Finding(
                what=command,
                works=path is not None,
                needed=needed,
                detail=str(path or "not on PATH"),
                mend=mend,
            )
        )
    partitions = live_partitions(profile)
    if partitions is None:
        mend = "make slurm-up" if profile.name == "slurmbox" else "is the controller up? try: scontrol ping"
        findings.append(Finding(what="scheduler", works=False, detail="scontrol does not answer", mend=mend))
    else:
        detail = f"partitions {', '.join(sorted(partitions))}"
        findings.append(Finding(what="scheduler", works=True, detail=detail))
    return findings


def _worker(profile: ClusterProfile) -> list[Finding]:
    """What the jobs' default interpreter has. An environment that only exists on the nodes cannot be seen from here."""
    environment = profile.environment(None)
    if environment.modules or environment.container or environment.setup:
        detail = "made by modules, setup lines or a container: it can only be examined in a job"
        return [Finding(what="job environment", works=True, needed=False, detail=detail)]
    python = python_of(environment)
    try:
        done = subprocess.run(
            [python, "-m", "hpcbench.worker", "doctor", "--json"],
            env=clean_environment(), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        report: dict[str, Any] = msgspec.json.decode(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding(what="python", works=False, detail=f"{python}: {error}", mend=_INSTALL)]
    except msgspec.DecodeError:
        said = printable(
            done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        )
        return [Finding(what="python", works=False, detail=f"{python}: {said}", mend=_INSTALL)]
    return [
        Finding(what="python", works=True, detail=f"{python} {report.get('python', '')}"),
        *_packages(profile, report),
    ]


def _from_a_node(profile: ClusterProfile, tell: Tell) -> list[Finding]:
    """What a job saw in its own environment."""
    try:
        check_account(profile)
        probe = run_probe(profile, tell)
    except HpcbenchError as error:
        return [Finding(what="job", works=False, detail=printable(error.message), mend=error.hint or "")]
    report = probe.worker
    findings = [Finding(what="job", works=True, detail=f"ran on {_named(report)}"), *probe_findings(profile, probe)]
    if report is None:
        said = printable(" ".join(probe.sections.get("worker", []))[-300:]) or "it said nothing"
        return [*findings, Finding(what="python", works=False, detail=said, mend=_INSTALL)]
    python = f"{report.get('executable', '')} {report.get('python', '')}"
    return [*findings, Finding(what="python", works=True, detail=python), *_packages(profile, report)]


def _named(report: dict[str, Any] | None) -> str:
    return str((report or {}).get("host", "a node"))


def probe_findings(profile: ClusterProfile, probe: Probe) -> list[Finding]:
    """The profile's words against what a node has."""
    node, wanted = profile.node_of(None), profile.network.interface
    names = probe.interfaces
    findings = []
    if wanted:
        works = any(name.startswith(wanted) for name in names)
        detail = f"{wanted}; a node has {', '.join(names) or 'none'}"
        findings.append(
            Finding(what="interface", works=works, detail=detail, mend="" if works else "set network.interface")
        )
    if profile.device == "cuda":
        works = len(probe.devices) >= (node.devices or 1)
        detail = f"{len(probe.devices)} in a job that asked for {node.devices or 1}"
        mend = "" if works else "set request.gpus and node.devices; the driver's own tool said no more"
        findings.append(Finding(what="devices", works=works, detail=detail, mend=mend))
    if probe.tmp_in_memory != node.tmp_in_memory:
        detail = f"the folder /tmp is {'memory' if probe.tmp_in_memory else 'a disk'}, the profile says otherwise"
        mend = f"node.tmp_in_memory = {str(probe.tmp_in_memory).lower()}"
        findings.append(Finding(what="tmp", works=False, needed=False, detail=detail, mend=mend))
    for folder in (node.scratch_folder, node.local_folder):
        if folder:
            said = " ".join(probe.sections.get(f"folder {folder}", []))
            findings.append(Finding(what="folder", works=said == "writable", needed=False, detail=f"{folder}: {said}"))
    return findings


def _packages(profile: ClusterProfile, report: dict[str, Any]) -> list[Finding]:
    needed = {"torch": _INSTALL, "msgspec": _INSTALL, "psutil": _INSTALL}
    build = f"{report.get('executable', 'python')} -m hpcbench.worker.build_horovod"
    fairscale = f"{report.get('executable', 'python')} -m pip install --no-deps fairscale==0.4.13"
    optional = {
        **dict.fromkeys(("torchvision", "sklearn", "PIL", "h5py"), _INSTALL),
        "fairscale": fairscale, "horovod.torch": build,
    }  # fmt: skip
    findings = []
    for name, mend in {**needed, **optional}.items():
        entry = report.get("modules", {}).get(name, {})
        works = bool(entry.get("works"))
        findings.append(
            Finding(
                what=name, works=works, needed=name in needed,
                detail=printable(str(entry.get("version") or entry.get("error") or "not installed")),
                mend="" if works else mend,
            )
        )  # fmt: skip
    if profile.device == "cuda":
        count = len(report.get("torch", {}).get("devices", []))
        findings.append(
            Finding(what="accelerators", works=count > 0, needed=False, detail=f"{count} visible from here")
        )
    return findings
