"""Submission of the runs that a sweep still lacks: selected under a lock, written as one folder, sent to the
scheduler.

    check the scheduler
    lock the tree:  select runs -> check the budget -> write skipped results -> write the submission's folder
    unlock
    send every job that was not sent yet, of this submission and of earlier ones
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from hpcbench.config.run_spec import RunSpec, RunTask, TaskFileHeader, config_id, encode_task_file
from hpcbench.fileio import make_folder, make_shared_folder, share_with_group, write_atomic, write_error
from hpcbench.render.job_script import render_script
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import FailureRecord, RunResult
from hpcbench.submit.job_software import check_job_packages, environment_key
from hpcbench.submit.journal import read_journal
from hpcbench.submit.lock import announce_silence, exclusive_lock
from hpcbench.submit.plan import RERUN_ON_SUBMIT, JobGroup, StopGroups, SweepPlan
from hpcbench.submit.run_state import ACTIVE_STATES, RunState, record_scheduler_failures, run_states
from hpcbench.submit.scheduler import Notify, SendOutcome, ignore_message, scrubbed_names
from hpcbench.submit.scheduler_registry import check_scheduler, send_unsent
from hpcbench.submit.submission_record import (
    JobArray,
    Submission,
    SweepRecord,
    count_submission,
    next_submission_folder,
    submission_token,
)


@dataclass(frozen=True)
class RenderedSubmission:
    """The files of a submission before anything is written: bytes by file name."""

    record: Submission
    files: dict[str, bytes]


def render_submission(
    plan: SweepPlan,
    runs: dict[str, RunSpec],
    tree: ClusterTree,
    folder: Path,
    superseded: Mapping[str, str] = MappingProxyType({}),
    *,
    obeys_stops: bool = True,
) -> RenderedSubmission:
    """The files that submitting ``runs`` would write into ``folder``. Nothing is written.

    Args:
        superseded: for runs that are measured again, the environment key of the result that they replace.
        obeys_stops: whether runs check at their start if a stop rule excludes them.
    """
    engine = TemplateEngine()
    files: dict[str, bytes] = {}
    arrays = []
    stops = plan.stops if obeys_stops else StopGroups([], {})
    if stops.groups:
        files["stop.jsonl"] = stops.lines()
    for number, group in enumerate(plan.arrays(runs)):
        shape, keys = group.shape, group.run_ids
        script = render_script(engine, shape, plan.sweep.name, folder, number, pack=group.pack, runs=len(keys))
        files[f"{number}.sh"] = script.encode()
        tasks = [
            RunTask(
                run_id=key,
                config_id=config_id(runs[key]),
                sweep=plan.sweep.name,
                spec=runs[key],
                time_limit_s=shape.time_limit_s,
                stop_groups=stops.of_run.get(key, []),
                supersedes=superseded.get(key),
            )
            for key in keys
        ]
        files[f"{number}.jsonl"] = encode_task_file(_task_header(plan, tree, folder, group), tasks)
        arrays.append(
            JobArray(
                number=number,
                run_ids=keys,
                pack=group.pack,
                ranks=shape.ranks,
                nodes=shape.nodes,
                partition=shape.partition.key,
                max_running_jobs=shape.partition.max_running_jobs,
                job_limit_s=group.limit_s,
            )
        )
    record = Submission(
        submission=folder.name,
        token=submission_token(folder),
        sweep=plan.sweep.name,
        cluster=plan.profile.name,
        scheduler=plan.profile.scheduler.kind,
        created_unix_s=time.time(),
        max_running_jobs=_max_running_jobs(plan),
        order_seed=plan.order_seed,
        arrays=arrays,
    )
    return RenderedSubmission(record, files)


def _max_running_jobs(plan: SweepPlan) -> int | None:
    limits = (plan.sweep.submit.max_running_jobs, plan.profile.scheduler.max_running_jobs)
    return min((limit for limit in limits if limit is not None), default=None)


def _task_header(plan: SweepPlan, tree: ClusterTree, folder: Path, group: JobGroup) -> TaskFileHeader:
    profile, shape = plan.profile, group.shape
    node = shape.partition.node
    device = profile.devices.get(node.device_type or "")
    return TaskFileHeader(
        cluster=profile.name,
        device=profile.device,
        tree=str(tree.root),
        submission=folder.name,
        interface=profile.network.interface,
        host_suffix=profile.network.host_suffix,
        meet_by_host_name=profile.network.meet_by == "host-name",
        wait_s=profile.network.wait_s,
        warning_s=profile.scheduler.warning_s,
        data_folder=plan.data_folder,
        peak_flops_per_s={str(key): value for key, value in device.peak_flops_per_s.items()} if device else {},
        cores_per_task=shape.cpus_per_task,
        ranks_per_device=node.ranks_per_device,
        pack=group.pack,
        environment_key=environment_key(shape.environment),
        model_folder=str(plan.model_folder) if plan.model_folder else None,
        scrubbed=scrubbed_names(),
        command=msgspec.to_builtins(plan.sweep.command) if plan.sweep.command is not None else {},
    )


def write_submission(rendered: RenderedSubmission, folder: Path) -> None:
    """Write all files, the record last: a folder without a record was never complete.

    Raises ``StorageError`` if the file system refuses.
    """
    make_folder(folder.parent)
    try:
        make_shared_folder(folder)
        for name, data in rendered.files.items():
            with open(folder / name, "xb") as file:
                share_with_group(folder / name)
                file.write(data)
        # All at the end: the first fsync writes most of the others, too.
        for name in rendered.files:
            with open(folder / name, "rb") as file:
                os.fsync(file.fileno())
    except OSError as error:
        raise write_error(error, folder) from error
    write_atomic(folder / "submission.json", msgspec.json.encode(rendered.record) + b"\n")


@dataclass(frozen=True)
class RunSelection:
    """The runs that ``submit`` sends although they were sent before."""

    again: frozenset[str] = frozenset()
    """Further states (``timeout``, ``lost``, ...) whose runs are submitted once more."""
    only_again: bool = False
    """Submit only the runs in the states ``again``."""
    remeasure: bool = False
    """Whether runs that were measured in another environment than the current one are submitted again."""
    over_budget: bool = False
    """Submit even if the budget is exceeded."""


@dataclass
class SubmitOutcome:
    """The outcome of one submit."""

    folder: Path | None = None
    record: Submission | None = None
    run_ids: list[str] = field(default_factory=list)
    active: list[str] = field(default_factory=list)
    """Runs that an earlier submission is taking care of."""
    states: dict[str, RunState] = field(default_factory=dict)
    """The state before the submit of each run that was not finished, or whose result was not to count."""
    sent: SendOutcome = field(default_factory=SendOutcome)
    """The jobs of this submission, and of earlier ones that had been waiting."""


def submit(
    plan: SweepPlan,
    tree: ClusterTree,
    choice: RunSelection = RunSelection(),
    notify: Notify = ignore_message,
) -> SubmitOutcome:
    """Submit the runs of ``plan`` that have no result and that no earlier submission is taking care of.

    Jobs of earlier submissions that were not sent yet are sent first.

    Args:
        plan: the sweep on one cluster.
        tree: the cluster's results.
        choice: which further runs are submitted.
        notify: called with messages about retries.

    Raises:
        ConfigError: the cost exceeds the budget, or the profile lacks an account.
        SubmitError: there is no scheduler here, or the jobs' interpreter lacks torch. The scheduler's refusal of single
            jobs is not raised but in ``sent``.
        LockHeldError: another submit holds the lock of the tree.
    """
    check_scheduler(plan.profile)
    environments = [plan.profile.environment(name) for name in {spec.environment for spec in plan.missing.values()}]
    check_job_packages(environments, runs_here=plan.profile.scheduler.traits.runs_here)
    make_folder(tree.submissions)
    outcome = SubmitOutcome()
    with announce_silence(notify), exclusive_lock(tree.submissions / ".lock") as lock:
        superseded = plan.elsewhere if choice.remeasure else {}
        runs, outcome.states = _select_runs(plan, tree, choice, superseded)
        outcome.active = [key for key, state in outcome.states.items() if state.state in ACTIVE_STATES]
        if not choice.over_budget:
            plan.check_budget(runs)
        write_sweep_record(plan, tree)
        if not choice.only_again:
            _write_skipped_results(plan, tree, outcome.active)
        if runs:
            outcome.folder = next_submission_folder(tree, plan.sweep.name)
            rendered = render_submission(
                plan, runs, tree, outcome.folder, superseded, obeys_stops="skipped" not in choice.again
            )
            lock.check_held()
            count_submission(tree, outcome.folder)
            write_submission(rendered, outcome.folder)
            outcome.record, outcome.run_ids = rendered.record, list(runs)
    with announce_silence(notify):
        outcome.sent = send_unsent(tree, plan.runs, plan.profile, notify)
    if outcome.folder and outcome.sent.refused and all(batch.refused for batch in read_journal(outcome.folder).batches):
        # The scheduler accepted nothing of it, and nothing is sent again.
        shutil.rmtree(outcome.folder, ignore_errors=True)
    return outcome


def write_sweep_record(plan: SweepPlan, tree: ClusterTree) -> None:
    """Write the record of a sweep, which ``status`` reads; a submission of another sweep of its name replaces it."""
    command, file = plan.sweep.command, plan.sweep.source.path
    record = SweepRecord(
        sweep=plan.sweep.name,
        cluster=plan.profile.name,
        description=plan.sweep.description,
        run_ids=list(plan.runs),
        dropped=len(plan.dropped),
        written_unix_s=time.time(),
        profile_file=str(plan.profile_file) if plan.profile_file else None,
        sweep_file=str(file.resolve()) if file.is_file() else None,
        command_digest=command.digest if command is not None else "",
        layout=command.layout if command is not None else None,
    )
    path = tree.sweep_path(plan.sweep.name)
    make_folder(path.parent)
    write_atomic(path, msgspec.json.encode(record) + b"\n")


def accepted_runs(outcome: SubmitOutcome) -> list[str]:
    """The runs of this submit whose jobs the scheduler has accepted."""
    if outcome.folder is None or outcome.record is None:
        return []
    arrays = {array.number: array for array in outcome.record.arrays}
    sent = (batch for batch in read_journal(outcome.folder).batches if batch.is_sent)
    return [run_id for batch in sent for run_id in arrays[batch.array].runs_of(batch.first, batch.count)]


def _select_runs(
    plan: SweepPlan, tree: ClusterTree, choice: RunSelection, stale: Collection[str]
) -> tuple[dict[str, RunSpec], dict[str, RunState]]:
    finished = plan.finished
    missing = {
        key: spec for key, spec in plan.runs.items() if finished.get(key) in (None, *choice.again) or key in stale
    }
    states = run_states(tree, missing, plan.profile, time.time(), stale)
    wanted = choice.again if choice.only_again else {"planned", *RERUN_ON_SUBMIT, *choice.again}
    stopped = () if "skipped" in choice.again else plan.stopped
    again = set() if choice.only_again else {key for key in plan.may_be_supported if key in states}
    selected = {
        key: spec
        for key, spec in missing.items()
        if key not in stopped and (states[key].state in wanted or (key in again and states[key].state == "unsupported"))
    }
    record_scheduler_failures(tree, states, selected)
    return selected, states


def _write_skipped_results(plan: SweepPlan, tree: ClusterTree, active: Collection[str]) -> None:
    """Write the result ``skipped`` of the runs that a stop rule excludes, unless they are active already."""
    for run_id, reason in plan.stopped.items():
        if run_id not in active:
            spec = plan.runs[run_id]
            result = RunResult(
                run_id=run_id,
                config_id=config_id(spec),
                attempt=0,
                sweep=plan.sweep.name,
                cluster=plan.profile.name,
                status="skipped",
                ended_at_s=time.time(),
                spec=spec,
                error=FailureRecord(type="Stopped", message=reason),
            )
            tree.write_result(result)
