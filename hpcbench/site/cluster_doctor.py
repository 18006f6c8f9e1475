"""Checks of everything that the jobs of a cluster need, made from this machine and inside a job."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.toml_tables import TomlSource
from hpcbench.errors import INSTALL_WORKER, HpcbenchError, SubmitError
from hpcbench.fileio import printable_text
from hpcbench.paths import cache_folder, data_folder, expand_path, is_visible
from hpcbench.results.data_folder import list_datasets
from hpcbench.site.node_probe import NodeProbe, decode_report, parse_probe, render_probe, run_probe
from hpcbench.site.profile_check import compare_profile
from hpcbench.site.slurm_facts import query_site
from hpcbench.submit.scheduler import (
    Notify,
    account_error,
    find_command,
    run_program,
    scrubbed_environment,
    scrubbed_names,
)
from hpcbench.submit.slurm_queue import first_cluster, hides_jobs, private_data


class DoctorCheck(msgspec.Struct):
    """The result of one check."""

    what: str
    works: bool
    needed: bool = True
    detail: str = ""
    mend: str = ""


def _check(what: str, works: bool, detail: str, mend: str = "", *, needed: bool = True) -> DoctorCheck:
    """``mend``: advice for a check that fails."""
    return DoctorCheck(what, works, needed, detail, "" if works else mend)


def check_cluster(
    profile: ClusterProfile, source: TomlSource, results: Path, notify: Notify | None = None
) -> list[DoctorCheck]:
    """Check everything that a run on ``profile`` needs, in the order in which it would fail.

    With ``notify`` a job inspects a node from inside, if everything before it works; the wait for it is announced.
    """
    traits = profile.scheduler.traits
    checks = [_check_results_tree(results)]
    if traits.is_slurm:
        checks += _check_slurm(profile, source)
    else:
        unused = find_command("sbatch", profile) if traits.runs_here else None
        detail = f"{traits.note}, although it has {unused}" if unused else traits.note
        mend = "hpcbench cluster init NAME writes a profile that submits to the nodes"
        checks.append(_check("scheduler", unused is None, detail, mend, needed=False))
    # The comparison with the scheduler has found it already, if the scheduler answered.
    if (missing := account_error(profile)) and not any(check.detail.startswith(missing.message) for check in checks):
        checks.append(_check("profile", False, missing.message, missing.hint or ""))
    if notify and traits.is_slurm and all(check.works or not check.needed for check in checks):
        checks += _check_from_node(profile, notify)
    else:
        checks += _check_worker(profile)
    checks.append(_check_data_folder(profile))
    leaking = scrubbed_names()
    if leaking:
        detail = f"{len(leaking)} variables of another job are kept from the jobs: {', '.join(leaking[:5])}"
        checks.append(_check("environment", True, detail, needed=False))
    return checks


def _check_results_tree(results: Path) -> DoctorCheck:
    """Create a file in the nearest folder that exists, and remove it."""
    folder = next(path for path in (results, *results.parents) if is_visible(path))
    probe = folder / f".hpcbench-{secrets.token_hex(4)}"
    try:
        probe.touch(exist_ok=False)
    except OSError as error:
        return _check("results", False, f"{results}: {error.strerror}", "--results or $HPCBENCH_RESULTS")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return _check("results", True, str(results))


def _check_data_folder(profile: ClusterProfile) -> DoctorCheck:
    """List the data sets for runs with ``data = "files"`` or ``"real"``."""
    folder = expand_path(data_folder(None, profile.data_folder))
    try:
        datasets = list_datasets(folder)
    except OSError as error:
        return _check("data", False, f"{folder}: {error.strerror}", "--folder or $HPCBENCH_DATA", needed=False)
    complete = [dataset for dataset in datasets if dataset.complete]
    names = ", ".join(f"{each.dataset}{f'-{each.size}' if each.size else ''} ({each.kind})" for each in complete)
    mend = "hpcbench data make DATASET, where runs are to read files"
    if not profile.partition(None).node.internet:
        mend += "; here and before they are submitted, as nodes have no internet"
    return _check("data", bool(datasets), f"{folder}: {names or 'nothing'}", mend, needed=False)


def _check_slurm(profile: ClusterProfile, source: TomlSource) -> list[DoctorCheck]:
    named = {"bin_folder": profile.scheduler.bin_folder, "config_file": profile.scheduler.config_file}
    absent = [key for key, path in named.items() if path and not is_visible(path)]
    checks = [
        _check(
            key, False, f"{named[key]} does not exist", f"correct scheduler.{key}; without it the site's own is used"
        )
        for key in absent
    ]
    for command, needed in (("sbatch", True), ("squeue", True), ("scancel", True), ("sacct", False)):
        path = find_command(command, profile)
        mend = "run on a login node, or set scheduler.bin_folder in the profile"
        checks.append(_check(command, path is not None, str(path or "not on PATH"), mend, needed=needed))
    if absent:
        # With a wrong configuration SLURM's commands look for a controller for a minute each.
        return [*checks, _check("scheduler", False, f"not queried: scheduler.{absent[0]} does not exist", "correct it")]
    private = private_data(profile, first_cluster(profile))
    if private is not None and hides_jobs(private):
        detail = f"{private}: jobs that other users of a results tree submitted count as queued or running"
        checks.append(_check("PrivateData", True, detail, needed=False))
    try:
        facts = query_site(profile, first_cluster(profile))
    except SubmitError:
        mend = "make slurm-up" if profile.name == "slurmbox" else "is the controller up? try: scontrol ping"
        return [*checks, _check("scheduler", False, "scontrol does not answer", mend)]
    checks.append(_check("scheduler", True, f"partitions {', '.join(sorted(facts.partitions))}"))
    found = compare_profile(profile, facts, source)
    for each, needed in ((found.problems, True), (found.warnings, False)):
        checks += [_check("profile", False, str(problem), problem.hint or "", needed=needed) for problem in each]
    return checks


def _check_worker(profile: ClusterProfile) -> list[DoctorCheck]:
    """Check the jobs' default interpreter. An environment that only exists on the nodes cannot be seen from here."""
    environment = profile.environment(None)
    if environment.modules and profile.scheduler.traits.runs_here:
        # Without a scheduler this machine is the node.
        script = render_probe(profile, cache_folder())
        result = run_program(["bash", "-c", script], scrubbed_environment(), timeout_s=300)
        return _check_probe(profile, parse_probe(result.output))
    if environment.is_made_in_job:
        detail = "made by modules, setup lines or a container: it can only be examined in a job"
        return [_check("job environment", True, detail, needed=False)]
    python = environment.python
    command = [python, "-m", "hpcbench.worker", "doctor", "--json"]
    result = run_program(command, scrubbed_environment(), timeout_s=300)
    if result.exit_code is None:
        return [_check("python", False, f"{python}: {result.complaint}", INSTALL_WORKER)]
    try:
        report = decode_report(result.output)
    except msgspec.DecodeError:
        complaint = result.complaint.strip().splitlines() or [f"exit code {result.exit_code}"]
        return [_check("python", False, f"{python}: {printable_text(complaint[-1])}", INSTALL_WORKER)]
    return [_check("python", True, f"{python} {report.get('python', '')}"), *_check_packages(profile, report)]


def _check_from_node(profile: ClusterProfile, notify: Notify) -> list[DoctorCheck]:
    """Check the inside of a job, in its own environment."""
    try:
        probe = run_probe(profile, notify)
    except HpcbenchError as error:
        return [_check("job", False, printable_text(error.message), error.hint or "")]
    host = str((probe.worker or {}).get("host", "a node"))
    return [_check("job", True, f"ran on {host}"), *_check_probe(profile, probe)]


def _check_probe(profile: ClusterProfile, probe: NodeProbe) -> list[DoctorCheck]:
    """Check the node against the profile, and the packages of the jobs' interpreter."""
    report, checks = probe.worker, compare_probe(profile, probe)
    if report is None:
        output = printable_text(" ".join(probe.sections.get("worker", []))[-300:]) or "no output"
        return [*checks, _check("python", False, output, INSTALL_WORKER)]
    python = f"{report.get('executable', '')} {report.get('python', '')}"
    return [*checks, _check("python", True, python), *_check_packages(profile, report)]


def compare_probe(profile: ClusterProfile, probe: NodeProbe) -> list[DoctorCheck]:
    """Compare the profile with the inside of a node."""
    node, interface = profile.partition(None).node, profile.network.interface
    names = probe.interfaces
    checks = []
    if interface:
        works = any(name.startswith(interface) for name in names)
        detail = f"{interface}; a node has {', '.join(names) or 'none'}"
        checks.append(_check("interface", works, detail, "set network.interface"))
    if profile.device == "cuda":
        requested = node.devices or 1
        detail = f"{len(probe.devices)} in a job that asked for {requested}"
        mend = "set request.gpus and node.devices; the driver's own tool lists no more"
        checks.append(_check("devices", len(probe.devices) >= requested, detail, mend))
    if probe.tmp_in_memory != node.tmp_in_memory:
        detail = f"the folder /tmp is {'memory' if probe.tmp_in_memory else 'a disk'}, the profile states the opposite"
        mend = f"node.tmp_in_memory = {str(probe.tmp_in_memory).lower()}"
        checks.append(_check("tmp", False, detail, mend, needed=False))
    if modules := probe.sections.get("modules"):
        text = printable_text(" ".join(modules))
        mend = "see `module avail`; correct `modules` of the profile's environment"
        checks.append(_check("modules", text.startswith("loaded: "), text, mend))
    for folder in filter(None, (node.scratch_folder, node.local_folder)):
        output = " ".join(probe.sections.get(f"folder {folder}", []))
        mend = "make it, or correct node.scratch_folder and node.local_folder"
        checks.append(_check("folder", output == "writable", f"{folder}: {output}", mend))
    return checks


_PLATFORMS = {"hip": "ROCm (HIP)", "cuda": "CUDA"}


def _check_packages(profile: ClusterProfile, report: dict[str, Any]) -> list[DoctorCheck]:
    python = report.get("executable", "python")
    required = dict.fromkeys(("torch", "msgspec", "psutil"), INSTALL_WORKER)
    optional = {
        **dict.fromkeys(("torchvision", "sklearn", "PIL", "h5py"), INSTALL_WORKER),
        "fairscale": f"{python} -m pip install --no-deps fairscale==0.4.13",
        "horovod.torch": f"{python} -m hpcbench.tools.build_horovod",
    }
    checks = []
    for name, mend in {**required, **optional}.items():
        package = report.get("modules", {}).get(name, {})
        detail = printable_text(str(package.get("version") or package.get("error") or "not installed"))
        checks.append(_check(name, bool(package.get("works")), detail, mend, needed=name in required))
    if profile.device == "cuda":
        torch = report.get("torch", {})
        count, reason = len(torch.get("devices", [])), torch.get("no_counters")
        built = next((f"{name} {torch[key]}" for key, name in _PLATFORMS.items() if torch.get(key)), "processors alone")
        detail = printable_text(f"{count} visible from here, torch is built for {built}")
        checks.append(_check("accelerators", count > 0, detail, needed=False))
        if count:
            mend = "pip install nvidia-ml-py, or for ROCm the amdsmi of its own release (docs/amd.md)"
            checks.append(_check("counters", not reason, printable_text(reason or "read"), mend, needed=False))
    return checks
