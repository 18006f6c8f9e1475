"""SLURM: jobs by sbatch, states by squeue and sacct, cancellation by scancel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hpcbench.errors import SubmitError
from hpcbench.identity import account_name
from hpcbench.submit.journal import read_journal
from hpcbench.submit.scheduler import (
    JobLimit,
    JobStatus,
    Notify,
    QueueTable,
    Scheduler,
    SchedulerLimits,
    SendOutcome,
    find_command,
)
from hpcbench.submit.slurm_queue import (
    count_queued_jobs,
    hides_jobs,
    max_array_size,
    partition_nodes,
    private_data,
    query_job_states,
    run_on_cluster,
    scheduler_cluster,
)
from hpcbench.submit.submission_record import Submission, SubmittedRun

if TYPE_CHECKING:
    from hpcbench.results.attempts import AttemptStart
    from hpcbench.results.results_tree import ClusterTree

_SCANCEL_IDS_PER_CALL = 50
"""An id may list the tasks of an array, and a command line has an end."""
_ENDED_JOB_PATTERN = re.compile(r"already completing or completed|Invalid job id")


class SlurmScheduler(Scheduler):
    """Runs of one shape are a job array; a job id is ``4711_3`` for task 3 of array 4711, or ``4711``."""

    poll_s: ClassVar[float] = 30.0
    requeues: ClassVar[bool] = True
    has_arrays: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        profile = self.profile
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

    def limits(self, record: Submission) -> SchedulerLimits:
        profile = self.profile
        has_arrays = any(array.jobs > 1 for array in record.arrays)
        of_partitions = {array.partition: profile.partition(array.partition) for array in record.arrays}
        limited = {
            key: (partition, partition.max_submitted_jobs)
            for key, partition in of_partitions.items()
            if partition.max_submitted_jobs is not None
        }
        size, most = max_array_size(profile) if has_arrays else 1, profile.scheduler.max_submitted_jobs
        queued = None if most is None and not limited else count_queued_jobs(profile, scheduler_cluster(profile))
        if queued is None:
            return SchedulerLimits(size)
        everywhere = None if most is None else JobLimit(most, most - queued.total(), "")
        by_partition: dict[str | None, JobLimit] = {}
        for key, (partition, limit) in limited.items():
            named = partition.name or ""
            counted = sum(
                count for (where, qos), count in queued.items() if where == named and partition.qos in (None, qos)
            )
            by_partition[key] = JobLimit(limit, limit - counted, f"in partition {key}")
        return SchedulerLimits(size, everywhere, by_partition)

    def node_names(self, partition: str | None) -> list[str]:
        # sinfo would wait a minute for a configuration that is absent.
        self.check()
        return partition_nodes(self.profile, partition)

    def submit(self, folder: Path, record: Submission, tree: ClusterTree, notify: Notify) -> SendOutcome:
        from hpcbench.submit.send import send_submission, unsent_jobs  # submitit is for sending alone

        journal = read_journal(folder)
        is_unanswered = any(batch.is_unanswered for batch in journal.batches)
        if not is_unanswered and not any(unsent_jobs(record, journal).values()):
            return SendOutcome()
        return send_submission(folder, record, self.profile, tree, notify, lambda: self.limits(record))

    def state(self, runs: Mapping[str, SubmittedRun], queue: QueueTable | None = None) -> Mapping[str, JobStatus]:
        by_cluster: dict[str, dict[str, SubmittedRun]] = {}
        for key, run in runs.items():
            if run.job_id and run.batch is not None:
                by_cluster.setdefault(run.batch.job_cluster, {})[key] = run
        statuses: dict[str, JobStatus] = {}
        for cluster, of_cluster in by_cluster.items():
            table = (queue or {}).get(cluster)
            job_ids = {key: run.job_id for key, run in of_cluster.items() if run.job_id}
            since_unix_s = min(run.record.created_unix_s for run in of_cluster.values())
            jobs = query_job_states(set(job_ids.values()), since_unix_s, self.profile, cluster, table)
            for key, job_id in job_ids.items():
                status, batch = jobs.get(job_id), of_cluster[key].batch
                # SLURM uses numbers again: a job with another name is not this run's.
                if status and batch and status.name in ("", batch.name):
                    statuses[key] = status
            unknown = {key: run for key, run in of_cluster.items() if key not in statuses}
            statuses |= self._hidden_statuses(cluster, unknown)
        return statuses

    def _hidden_statuses(self, cluster: str, unknown: Mapping[str, SubmittedRun]) -> dict[str, JobStatus]:
        """``hidden`` for jobs that other accounts submitted, if SLURM shows an account its own jobs alone."""
        me = account_name()
        owners = {key: run.submitted_by for key, run in unknown.items()}
        foreign = {key: owner for key, owner in owners.items() if owner not in (None, me)}
        if not foreign or not hides_jobs(private_data(self.profile, cluster)):
            return {}
        return {
            key: JobStatus("hidden", f"submitted by {owner}, whose jobs SLURM hides from {me} (PrivateData)")
            for key, owner in foreign.items()
        }

    def attempts_at_work(self, starts: Mapping[str, tuple[AttemptStart, str]]) -> dict[str, str]:
        numbers: dict[str, set[str]] = {}
        for start, cluster in starts.values():
            if start.job_id is not None:
                numbers.setdefault(cluster, set()).add(start.job_id)
        since_unix_s = min((start.started_unix_s for start, _ in starts.values()), default=0.0)
        statuses = {
            cluster: query_job_states(job_ids, since_unix_s, self.profile, cluster)
            for cluster, job_ids in numbers.items()
        }
        reasons: dict[str, str] = {}
        for run_id, (start, cluster) in starts.items():
            status = statuses[cluster].get(start.job_id or "") if cluster in statuses else None
            if status is not None and status.state in ("pending", "running", "waiting"):
                reasons[run_id] = f"attempt {start.attempt} of job {start.job_id}: {status.reason}"
        return reasons

    def cancel(self, whole: Sequence[SubmittedRun], parts: Sequence[SubmittedRun]) -> dict[str, str]:
        # Only the steps of a job get the signal: its script goes on with the next run.
        return self._scancel([], whole) | self._scancel(["--signal=TERM"], parts)

    def _scancel(self, options: list[str], runs: Iterable[SubmittedRun]) -> dict[str, str]:
        by_cluster: dict[str, list[SubmittedRun]] = {}
        for run in runs:
            if run.batch is not None:
                by_cluster.setdefault(run.batch.job_cluster, []).append(run)
        refused: dict[str, str] = {}
        for cluster, of_cluster in by_cluster.items():
            job_ids = job_expressions(of_cluster)
            for first in range(0, len(job_ids), _SCANCEL_IDS_PER_CALL):
                part = job_ids[first : first + _SCANCEL_IDS_PER_CALL]
                result = run_on_cluster(["scancel", *options, *part], cluster, self.profile, timeout_s=120)
                # A job that has ended meanwhile need not be cancelled.
                if result.error and not _ENDED_JOB_PATTERN.search(result.complaint):
                    refused |= {job.partition("_")[0]: result.error for job in part}
        return refused


def job_expressions(runs: Iterable[SubmittedRun]) -> list[str]:
    """The jobs of ``runs`` as scancel takes them, one for each array: scancel sends one request for each.

    ``4711`` is a whole array or a job that is not an array, ``4711_3`` one task, ``4711_[0-9,12]`` several.
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
