"""Submit what a sweep still lacks: decide under a lock, write one folder, hand it to the scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from hpcbench.config.cluster import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.fileio import make_folder, write_atomic
from hpcbench.results.store import ClusterTree
from hpcbench.submit import scheduler
from hpcbench.submit.executor import ScriptExecutor, check_parameters
from hpcbench.submit.local_queue import queue_process, start_queue
from hpcbench.submit.lock import exclusive
from hpcbench.submit.plan import RERUN_ON_SUBMIT, Plan
from hpcbench.submit.state import ACTIVE, run_states
from hpcbench.submit.submission import (
    Array,
    Submission,
    next_submission_folder,
    render_submission,
    save_record,
    write_submission,
)


@dataclass(frozen=True)
class Submitted:
    """What one submit did."""

    folder: Path | None
    record: Submission | None
    run_ids: list[str]
    active: list[str]
    """Runs that an earlier submission is taking care of."""


class SweepRecord(msgspec.Struct, kw_only=True):
    """``sweeps/<name>.json``: which runs a sweep means."""

    sweep: str
    cluster: str
    description: str
    run_ids: list[str]
    dropped: int
    written_unix_s: float


def submit(
    plan: Plan, tree: ClusterTree, again: frozenset[str] = frozenset(), *, only_again: bool = False
) -> Submitted:
    """Submit the runs of ``plan`` that have no result and that nobody is taking care of.

    ``again`` names further states (``timeout``, ``lost``, ...) whose runs are submitted once more;
    ``only_again`` leaves out all others.

    Raises ``SubmitError`` where the scheduler refuses: what it had taken until then stays submitted, the folder of a
    submission of which it took nothing is removed.
    """
    check_scheduler(plan.profile)
    make_folder(tree.submissions)
    with exclusive(tree.submissions / ".lock"):
        write_sweep(plan, tree)
        missing = {key: spec for key, spec in plan.runs.items() if plan.finished.get(key) in (None, *again)}
        states = run_states(tree, missing, plan.profile, time.time())
        active = [key for key, state in states.items() if state.state in ACTIVE]
        wanted = again if only_again else {"planned", *RERUN_ON_SUBMIT, *again}
        chosen = {key: spec for key, spec in missing.items() if states[key].state in wanted}
        if not chosen:
            return Submitted(None, None, [], active)
        folder = next_submission_folder(tree, plan.sweep.name)
        rendered = render_submission(plan, chosen, tree, folder)
        write_submission(rendered, folder)
    hand_over(rendered.record, folder, plan.profile)
    return Submitted(folder, rendered.record, list(chosen), active)


def check_scheduler(profile: ClusterProfile) -> None:
    """Raise ``SubmitError`` where the scheduler is not here, before anything is written."""
    if profile.scheduler.kind == "local":
        return
    config = profile.scheduler.config_file
    if config and not Path(config).exists():
        hint = "is the cluster up? the profile's scheduler.config_file names it"
        raise SubmitError(f"cluster {profile.name}: no file {config}", hint=hint)
    if scheduler.which("sbatch", profile) is None:
        hint = "run this on a login node of the cluster, or set scheduler.bin_folder in its profile"
        raise SubmitError(f"cluster {profile.name}: sbatch is not on PATH", hint=hint)


def write_sweep(plan: Plan, tree: ClusterTree) -> None:
    """Record which runs the sweep means now."""
    record = SweepRecord(
        sweep=plan.sweep.name,
        cluster=plan.profile.name,
        description=plan.sweep.description,
        run_ids=list(plan.runs),
        dropped=len(plan.dropped),
        written_unix_s=time.time(),
    )
    path = tree.sweep_path(plan.sweep.name)
    make_folder(path.parent)
    write_atomic(path, msgspec.json.encode(record) + b"\n")


def read_sweep(tree: ClusterTree, name: str) -> SweepRecord | None:
    """The record of a sweep that was submitted or run here; ``None`` where there is none."""
    try:
        return msgspec.json.decode(tree.sweep_path(name).read_bytes(), type=SweepRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def hand_over(record: Submission, folder: Path, profile: ClusterProfile) -> None:
    """Give a written submission to the scheduler and note the jobs' ids."""
    if profile.scheduler.kind == "local":
        start_queue(folder, scheduler.slurm_environment(profile), profile.scheduler.warning_s)
        return
    scheduler.adopt(profile)
    executor = ScriptExecutor(folder, scheduler.slurm_environment(profile))
    largest = scheduler.max_array_size(profile)
    try:
        for array in record.arrays:
            _submit_array(executor, array, folder, largest, profile)
    except SubmitError:
        _forget_refused(record, folder)
        raise
    finally:
        if folder.is_dir():
            save_record(record, folder)


def _submit_array(executor: ScriptExecutor, array: Array, folder: Path, largest: int, profile: ClusterProfile) -> None:
    parameters = {
        "nodes": array.nodes,
        "ntasks_per_node": array.ranks // array.nodes,
        "time": max(1, int(array.time_limit_s // 60)),
        "account": profile.account,
    }
    check_parameters({key: value for key, value in parameters.items() if value is not None}, folder)
    for offset in range(0, len(array.run_ids), largest):
        count = min(largest, len(array.run_ids) - offset)
        jobs = executor.submit_script(
            folder / f"{array.number}.sh", count=count if len(array.run_ids) > 1 else None, offset=offset
        )
        array.job_ids += [job.job_id for job in jobs]


def _forget_refused(record: Submission, folder: Path) -> None:
    """Runs that the scheduler refused belong to no submission; a submission of which it took nothing is removed."""
    for array in record.arrays:
        del array.run_ids[len(array.job_ids) :]
    record.arrays = [array for array in record.arrays if array.run_ids]
    if not record.arrays:
        for path in sorted(folder.iterdir()):
            path.unlink()
        folder.rmdir()


def stop_local(folder: Path, wait_s: float = 90.0) -> None:
    """Tell the local queue of a submission to stop its runs, and wait until it has."""
    process = queue_process(folder)
    if process is None:
        return
    process.terminate()
    try:
        process.wait(wait_s)
    except psutil.TimeoutExpired:
        process.kill()
