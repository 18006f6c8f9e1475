"""Checks of everything that the jobs of a cluster need, made from this machine and inside a job."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import HpcbenchError
from hpcbench.fileio import printable_text
from hpcbench.paths import data_folder, expand_path
from hpcbench.render.job_script import rank_python
from hpcbench.results.data_folder import list_datasets
from hpcbench.site.node_probe import NodeProbe, run_probe
from hpcbench.site.profile_check import scheduler_partitions
from hpcbench.submit.scheduler import Notify, account_error
from hpcbench.submit.scheduler_settings import find_command, scrubbed_environment, scrubbed_names

_INSTALL_WORKER = "pip install 'hpcbench[worker]'"


class DoctorCheck(msgspec.Struct, kw_only=True):
    """One thing that was looked at."""

    what: str
    works: bool
    needed: bool = True
    detail: str = ""
    mend: str = ""


def check_cluster(profile: ClusterProfile, results: Path, tell: Notify | None = None) -> list[DoctorCheck]:
    """Everything that a run on ``profile`` needs, in the order in which it would fail.

    With ``tell`` a job looks at a node from inside, if the cluster takes one, and the wait for it is announced.
    """
    findings = [_check_results_tree(results)]
    if profile.scheduler.kind == "slurm":
        findings += _check_slurm(profile)
    elif profile.scheduler.kind != "local":
        detail = "PBS: render writes jobs for qsub" if profile.scheduler.kind == "pbs" else "none: predictions alone"
        findings.append(DoctorCheck(what="scheduler", works=True, needed=False, detail=detail))
    if tell and profile.scheduler.kind == "slurm" and all(one.works or not one.needed for one in findings):
        findings += _check_from_node(profile, tell)
    else:
        findings += _check_worker(profile)
    findings.append(_check_data_folder(profile))
    leaking = scrubbed_names()
    if leaking:
        detail = f"{len(leaking)} variables of another job are kept from the jobs: {', '.join(leaking[:5])}"
        findings.append(DoctorCheck(what="environment", works=True, needed=False, detail=detail))
    return findings


def _check_results_tree(results: Path) -> DoctorCheck:
    """Whether a file can be made there, in the nearest folder that exists; nothing is left behind."""
    folder = next(path for path in (results, *results.parents) if path.exists())
    probe = folder / f".hpcbench-{secrets.token_hex(4)}"
    try:
        probe.touch(exist_ok=False)
    except OSError as error:
        return DoctorCheck(
            what="results",
            works=False,
            detail=f"{results}: {error.strerror}",
            mend="--results or $HPCBENCH_RESULTS",
        )
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return DoctorCheck(what="results", works=True, detail=str(results))


def _check_data_folder(profile: ClusterProfile) -> DoctorCheck:
    """What runs with ``data = "files"`` or ``"real"`` find; none needs to."""
    folder = expand_path(data_folder(None, profile.data_folder))
    found = list_datasets(folder)
    names = ", ".join(
        f"{one.dataset}{f'-{one.size}' if one.size else ''} ({one.kind})" for one in found if one.complete
    )
    mend = "" if found else "hpcbench data make DATASET, where runs are to read files"
    if mend and not profile.node_of(None).internet:
        mend += "; here and before they are submitted, as nodes have no internet"
    return DoctorCheck(
        what="data", works=bool(found), needed=False, detail=f"{folder}: {names or 'nothing'}", mend=mend
    )


def _check_slurm(profile: ClusterProfile) -> list[DoctorCheck]:
    findings = []
    for command, needed in (("sbatch", True), ("squeue", True), ("scancel", True), ("sacct", False)):
        path = find_command(command, profile)
        mend = "" if path else "run on a login node, or set scheduler.bin_folder in the profile"
        findings.append(
            DoctorCheck(
                what=command,
                works=path is not None,
                needed=needed,
                detail=str(path or "not on PATH"),
                mend=mend,
            )
        )
    partitions = scheduler_partitions(profile)
    if partitions is None:
        mend = "make slurm-up" if profile.name == "slurmbox" else "is the controller up? try: scontrol ping"
        findings.append(DoctorCheck(what="scheduler", works=False, detail="scontrol does not answer", mend=mend))
    else:
        detail = f"partitions {', '.join(sorted(partitions))}"
        findings.append(DoctorCheck(what="scheduler", works=True, detail=detail))
    return findings


def _check_worker(profile: ClusterProfile) -> list[DoctorCheck]:
    """What the jobs' default interpreter has. An environment that only exists on the nodes cannot be seen from here."""
    environment = profile.environment(None)
    if environment.modules or environment.container or environment.setup:
        detail = "made by modules, setup lines or a container: it can only be examined in a job"
        return [DoctorCheck(what="job environment", works=True, needed=False, detail=detail)]
    python = rank_python(environment)
    try:
        done = subprocess.run(
            [python, "-m", "hpcbench.worker", "doctor", "--json"],
            env=scrubbed_environment(), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        report: dict[str, Any] = msgspec.json.decode(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [DoctorCheck(what="python", works=False, detail=f"{python}: {error}", mend=_INSTALL_WORKER)]
    except msgspec.DecodeError:
        said = printable_text(
            done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        )
        return [DoctorCheck(what="python", works=False, detail=f"{python}: {said}", mend=_INSTALL_WORKER)]
    return [
        DoctorCheck(what="python", works=True, detail=f"{python} {report.get('python', '')}"),
        *_check_packages(profile, report),
    ]


def _check_from_node(profile: ClusterProfile, tell: Notify) -> list[DoctorCheck]:
    """What a job saw in its own environment."""
    try:
        if error := account_error(profile):
            raise error
        probe = run_probe(profile, tell)
    except HpcbenchError as error:
        return [DoctorCheck(what="job", works=False, detail=printable_text(error.message), mend=error.hint or "")]
    report = probe.worker
    findings = [
        DoctorCheck(what="job", works=True, detail=f"ran on {_host_of_report(report)}"),
        *compare_probe(profile, probe),
    ]
    if report is None:
        said = printable_text(" ".join(probe.sections.get("worker", []))[-300:]) or "it said nothing"
        return [*findings, DoctorCheck(what="python", works=False, detail=said, mend=_INSTALL_WORKER)]
    python = f"{report.get('executable', '')} {report.get('python', '')}"
    return [*findings, DoctorCheck(what="python", works=True, detail=python), *_check_packages(profile, report)]


def _host_of_report(report: dict[str, Any] | None) -> str:
    return str((report or {}).get("host", "a node"))


def compare_probe(profile: ClusterProfile, probe: NodeProbe) -> list[DoctorCheck]:
    """The profile's words against what a node has."""
    node, wanted = profile.node_of(None), profile.network.interface
    names = probe.interfaces
    findings = []
    if wanted:
        works = any(name.startswith(wanted) for name in names)
        detail = f"{wanted}; a node has {', '.join(names) or 'none'}"
        findings.append(
            DoctorCheck(what="interface", works=works, detail=detail, mend="" if works else "set network.interface")
        )
    if profile.device == "cuda":
        works = len(probe.devices) >= (node.devices or 1)
        detail = f"{len(probe.devices)} in a job that asked for {node.devices or 1}"
        mend = "" if works else "set request.gpus and node.devices; the driver's own tool said no more"
        findings.append(DoctorCheck(what="devices", works=works, detail=detail, mend=mend))
    if probe.tmp_in_memory != node.tmp_in_memory:
        detail = f"the folder /tmp is {'memory' if probe.tmp_in_memory else 'a disk'}, the profile says otherwise"
        mend = f"node.tmp_in_memory = {str(probe.tmp_in_memory).lower()}"
        findings.append(DoctorCheck(what="tmp", works=False, needed=False, detail=detail, mend=mend))
    for folder in (node.scratch_folder, node.local_folder):
        if folder:
            said = " ".join(probe.sections.get(f"folder {folder}", []))
            findings.append(
                DoctorCheck(what="folder", works=said == "writable", needed=False, detail=f"{folder}: {said}")
            )
    return findings


def _check_packages(profile: ClusterProfile, report: dict[str, Any]) -> list[DoctorCheck]:
    needed = {"torch": _INSTALL_WORKER, "msgspec": _INSTALL_WORKER, "psutil": _INSTALL_WORKER}
    build = f"{report.get('executable', 'python')} -m hpcbench.tools.build_horovod"
    fairscale = f"{report.get('executable', 'python')} -m pip install --no-deps fairscale==0.4.13"
    optional = {
        **dict.fromkeys(("torchvision", "sklearn", "PIL", "h5py"), _INSTALL_WORKER),
        "fairscale": fairscale, "horovod.torch": build,
    }  # fmt: skip
    findings = []
    for name, mend in {**needed, **optional}.items():
        entry = report.get("modules", {}).get(name, {})
        works = bool(entry.get("works"))
        findings.append(
            DoctorCheck(
                what=name, works=works, needed=name in needed,
                detail=printable_text(str(entry.get("version") or entry.get("error") or "not installed")),
                mend="" if works else mend,
            )
        )  # fmt: skip
    if profile.device == "cuda":
        count = len(report.get("torch", {}).get("devices", []))
        findings.append(
            DoctorCheck(what="accelerators", works=count > 0, needed=False, detail=f"{count} visible from here")
        )
    return findings
