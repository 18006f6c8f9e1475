"""SLURM: jobs by sbatch, states by squeue and sacct, cancellation by scancel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hpcbench.errors import SubmitError
from hpcbench.fileio import printable_text
from hpcbench.submit.journal import account_name, read_journal
from hpcbench.submit.scheduler import (
    JobStatus,
    Notify,
    Scheduler,
    SchedulerLimits,
    SendOutcome,
    find_command,
    run_command,
)
from hpcbench.submit.slurm_queue import QueueQuery, count_queued_jobs, hides_jobs, max_array_size, private_data
from hpcbench.submit.submission_record import NewestSubmission, Submission, SubmittedRun

if TYPE_CHECKING:
    from hpcbench.config.cluster_profile import ClusterProfile
    from hpcbench.results.results_tree import ClusterTree
    from hpcbench.submit.scheduler import HasSchedulerSettings

_SCANCEL_IDS_PER_CALL = 50
"""An id may list the tasks of an array, and a command line has an end."""
_ENDED_JOB_PATTERN = re.compile(r"already completing or completed|Invalid job id")


class SlurmScheduler(Scheduler):
    """Runs of one shape are a job array; a job id is ``4711_3`` for task 3 of array 4711, or ``4711``."""

    is_slurm: ClassVar[bool] = True
    directives: ClassVar[str | None] = "hpcbench.render.job_script:sbatch_directives"
    poll_s: ClassVar[float] = 30.0
    requeues: ClassVar[bool] = True
    has_arrays: ClassVar[bool] = True

    def check(self, profile: ClusterProfile) -> None:
        super().check(profile)
        config = profile.scheduler.config_file
        if config and not Path(config).exists():
            hint = "is the cluster up? the profile's scheduler.config_file names it"
            raise SubmitError(f"cluster {profile.name}: no file {config}", hint=hint)
        folder = profile.scheduler.bin_folder
        if folder and not Path(folder).is_dir():
            hint = "correct scheduler.bin_folder: without that folder another scheduler's commands on PATH would answer"
            raise SubmitError(f"cluster {profile.name}: no folder {folder}", hint=hint)
        if find_command("sbatch", profile) is None:
            hint = "run this on a login node of the cluster, or set scheduler.bin_folder in its profile"
            raise SubmitError(f"cluster {profile.name}: sbatch is not on PATH", hint=hint)

    def limits(self, record: Submission, profile: ClusterProfile) -> SchedulerLimits:
        has_arrays = any(array.jobs > 1 for array in record.arrays)
        partitions = (profile.partition(array.partition).max_submitted_jobs for array in record.arrays)
        limits = (profile.scheduler.max_submitted_jobs, *partitions)
        most = min((limit for limit in limits if limit is not None), default=None)
        queued = None if most is None else count_queued_jobs(profile)
        free = None if most is None or queued is None else max(0, most - queued)
        return SchedulerLimits(max_array_size(profile) if has_arrays else 1, most, free)

    def submit(
        self, folder: Path, record: Submission, profile: ClusterProfile, tree: ClusterTree, notify: Notify
    ) -> SendOutcome:
        from hpcbench.submit.send import send_submission, unsent_jobs  # submitit is for sending alone

        journal = read_journal(folder)
        is_unanswered = any(batch.is_unanswered for batch in journal.batches)
        if not is_unanswered and not any(unsent_jobs(record, journal).values()):
            return SendOutcome()
        return send_submission(folder, record, profile, tree, notify, lambda: self.limits(record, profile))

    def state(self, submissions: Sequence[NewestSubmission]) -> _SlurmQuery:
        batches = [batch for submission in submissions for batch in submission.journal.batches]
        job_ids = {batch.job_id for batch in batches if batch.job_id is not None}
        return _SlurmQuery(QueueQuery(job_ids, self.settings), self.settings)

    def cancel(self, whole: Sequence[SubmittedRun], parts: Sequence[SubmittedRun]) -> None:
        self._scancel([], whole)
        # Only the steps of a job get the signal: its script goes on with the next run.
        self._scancel(["--signal=TERM"], parts)

    def _scancel(self, options: list[str], runs: Iterable[SubmittedRun]) -> None:
        job_ids = job_expressions(runs)
        for first in range(0, len(job_ids), _SCANCEL_IDS_PER_CALL):
            command = ["scancel", *options, *job_ids[first : first + _SCANCEL_IDS_PER_CALL]]
            result = run_command(command, self.settings, timeout_s=120)
            if result.exit_code is None:
                raise SubmitError(f"scancel: {result.complaint}")
            # A job that has ended meanwhile need not be cancelled.
            if result.exit_code != 0 and not _ENDED_JOB_PATTERN.search(result.complaint):
                raise SubmitError(f"scancel refused: {printable_text(result.complaint.strip())}")


def job_expressions(runs: Iterable[SubmittedRun]) -> list[str]:
    """The jobs of ``runs`` as scancel takes them, one for each array: scancel sends one request for each.

    ``4711`` is a whole array or a job that is no array, ``4711_3`` one task, ``4711_[0-9,12]`` several.
    """
    tasks: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for run in runs:
        if run.job_id is not None and run.batch is not None:
            array, _, task = run.job_id.partition("_")
            sizes[array] = run.batch.count
            tasks.setdefault(array, set()).update([int(task)] if task else range(run.batch.count))
    return [
        array if len(numbers) == sizes[array] else f"{array}_{_format_tasks(sorted(numbers))}"
        for array, numbers in tasks.items()
    ]


def _format_tasks(numbers: Sequence[int]) -> str:
    """``3``, or ``[0-9,12]``."""
    if len(numbers) == 1:
        return str(numbers[0])
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return f"[{','.join(str(first) if first == last else f'{first}-{last}' for first, last in ranges)}]"


SCHEDULER: type[Scheduler] = SlurmScheduler


class _SlurmQuery:
    """A ``QueueQuery`` answered by run instead of by job."""

    def __init__(self, query: QueueQuery, settings: HasSchedulerSettings) -> None:
        self._query, self._settings = query, settings

    def result(self, runs: Mapping[str, SubmittedRun]) -> Mapping[str, JobStatus]:
        job_ids = {key: job_id for key, run in runs.items() if (job_id := run.job_id)}
        since_unix_s = min((runs[key].record.created_unix_s for key in job_ids), default=0.0)
        jobs = self._query.job_states(set(job_ids.values()), since_unix_s)
        statuses: dict[str, JobStatus] = {}
        for key, job_id in job_ids.items():
            status, batch = jobs.get(job_id), runs[key].batch
            # SLURM uses numbers again: a job with another name of hpcbench is not this run's.
            if status and batch and (status.name == batch.name or not status.name.startswith("hpcbench-")):
                statuses[key] = status
        return statuses | self._hidden_statuses({key: runs[key] for key in job_ids.keys() - statuses.keys()})

    def _hidden_statuses(self, unknown: Mapping[str, SubmittedRun]) -> dict[str, JobStatus]:
        """``hidden`` for jobs that other accounts submitted, if SLURM shows an account its own jobs alone."""
        me = account_name()
        owners = {key: run.submitted_by for key, run in unknown.items()}
        foreign = {key: owner for key, owner in owners.items() if owner not in (None, me)}
        if not foreign or not hides_jobs(private_data(self._settings)):
            return {}
        return {
            key: JobStatus("hidden", f"submitted by {owner}, whose jobs SLURM hides from {me} (PrivateData)")
            for key, owner in foreign.items()
        }
