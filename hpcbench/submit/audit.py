"""The audit of a cluster's tree against the scheduler's whole queue: what should not be there, and what frees it.

    second job     carries runs of a submission, and no journal has its number
    held job       waits for its release
    barred job     waits, and the scheduler refuses its account or its size for ever
    empty job      waits, though none of its runs is to be run any more
    earlier job    runs, though all of its runs were submitted again
    doubled run    two attempts of it, in jobs that have not ended

A job belongs to the tree if its working folder is one of the tree's submissions, or its name has a submission's token.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import read_task
from hpcbench.results.attempts import Attempt, attempt_numbers
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK
from hpcbench.submit.journal import read_journal
from hpcbench.submit.scheduler import QueueTable
from hpcbench.submit.slurm_queue import JobRow, on_cluster, queue_rows, run_on_cluster
from hpcbench.submit.submission_record import Submission, find_submitted_runs, list_submissions
from hpcbench.units import pluralize

SECOND, HELD, BARRED, EMPTY = "second job", "held job", "barred job", "empty job"
EARLIER, DOUBLED = "earlier job", "doubled run"
_SUPERFLUOUS = (SECOND, EMPTY, EARLIER, DOUBLED)
_NAME_PATTERN = re.compile(r"hpcbench-.+-([0-9a-f]{8})-[0-9]+\.[0-9]+-[0-9]+")
_HELD_REASONS = re.compile(r"JobHeld|requeued held|requeue_hold|ReqNodeNotAvail.*held|launch failed", re.IGNORECASE)
_BARRED_REASONS = re.compile(
    r"not (permitted|allowed)|NotAllowed|Invalid(Account|QOS)|NeverSatisfied|BadConstraints|Partition(Time|Node)Limit",
    re.IGNORECASE,
)
"""Reasons of squeue for a job that never starts as it is."""
_AGAIN = "submitted again"
_HELD_STATES = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})


class AuditFinding(msgspec.Struct, frozen=True):
    """A job or a run that should not be there."""

    kind: str
    sweep: str
    subject: str
    """The job, or the run."""
    reason: str
    command: str
    """The command that mends it, for whoever may call it."""
    job_id: str
    job_cluster: str = ""


def audit_tree(tree: ClusterTree, queue: QueueTable, sweeps: Collection[str] | None = None) -> list[AuditFinding]:
    """The findings about the submissions of ``sweeps``, or of all, by kind and job.

    Args:
        tree: the results of one cluster.
        queue: the scheduler's whole queue, by cluster.
    """
    findings = (one for one in _Audit(tree, queue).findings() if sweeps is None or one.sweep in sweeps)
    return sorted(findings, key=lambda finding: (finding.kind, finding.subject))


def clusters_of(tree: ClusterTree) -> set[str]:
    """The names of the scheduler's clusters that may hold jobs of a tree; empty for the default one."""
    journals = (read_journal(folder) for folder, _ in list_submissions(tree))
    named = (batch.job_cluster for journal in journals for batch in journal.batches if not batch.refused)
    # Until sbatch has answered, each of those that it was asked to choose from may hold the job.
    return {name for names in named for name in names.split(",")} or {""}


def cancel_findings(
    findings: Sequence[AuditFinding], settings: ClusterProfile
) -> tuple[list[AuditFinding], dict[str, str]]:
    """Cancel the jobs that carry nothing that is wanted.

    Returns the findings whose jobs were cancelled, and the reason by job of those that were not.
    """
    cancelled, refused = [], {}
    for finding in findings:
        if finding.kind in _SUPERFLUOUS:
            result = run_on_cluster(["scancel", finding.job_id], finding.job_cluster, settings)
            if result.error and "Invalid job id" not in result.error and "already complet" not in result.error:
                refused[finding.job_id] = result.error
            else:
                cancelled.append(finding)
    return cancelled, refused


class _Audit:
    def __init__(self, tree: ClusterTree, queue: QueueTable) -> None:
        self._tree = tree
        self._rows = {cluster: [row for row in queue_rows(text) if row.is_active] for cluster, text in queue.items()}
        self._submissions = list_submissions(tree)
        self._journals = {folder: read_journal(folder) for folder, _ in self._submissions}
        run_ids = (run_id for _, record in self._submissions for array in record.arrays for run_id in array.run_ids)
        self._newest = find_submitted_runs(tree, run_ids)
        self._by_token = {record.token: (folder, record) for folder, record in self._submissions}
        self._by_folder = {str(folder.absolute()): (folder, record) for folder, record in self._submissions}

    def findings(self) -> Iterator[AuditFinding]:
        for cluster, rows in self._rows.items():
            for row in rows:
                owner = self._owner(row)
                if owner is not None:
                    yield from self._job_findings(cluster, row, *owner)
        yield from self._doubled_runs()

    def _owner(self, row: JobRow) -> tuple[Path, Submission | None] | None:
        """The submission that a job is of, without a record if that was removed; ``None`` for another tree's job."""
        name = _NAME_PATTERN.fullmatch(row.name)
        known = self._by_token.get(name[1]) if name else None
        if known or (known := self._by_folder.get(row.folder)):
            return known
        folder = Path(row.folder)
        is_here = row.folder.startswith("/") and folder.parent == self._tree.submissions.absolute()
        return (folder, None) if is_here else None

    def _job_findings(
        self, cluster: str, row: JobRow, folder: Path, record: Submission | None
    ) -> Iterator[AuditFinding]:
        sweep = record.sweep if record else folder.name.rpartition("-")[0]
        cancel = shlex.join(["scancel", *on_cluster(cluster), row.job_id])
        about = f"job {row.job_id} of {row.user}"
        if record is None:
            reason = f"{row.state}, and its submission {folder.name} was removed"
            yield AuditFinding(SECOND, sweep, about, reason, cancel, row.job_id, cluster)
            return
        if any(
            batch.is_unanswered and batch.is_named(row.name, row.command) for batch in self._journals[folder].batches
        ):
            return  # a submit is sending it, or the next one finds it
        batches = [batch for batch in self._journals[folder].batches if batch.is_sent]
        batch = next((one for one in batches if one.job_id == row.number and one.job_cluster in ("", cluster)), None)
        if batch is None:
            reason = f"{row.state}, and no journal of {record.submission} has it: {row.name}"
            yield AuditFinding(SECOND, sweep, about, reason, cancel, row.job_id, cluster)
            return
        jobs = [batch.first + task for task in row.tasks(batch.count)]
        runs = [run_id for job in jobs for run_id in record.arrays[batch.array].runs_of(job)]
        why_empty = {self._why_not_run(run_id, folder) for run_id in runs}
        if why_empty and None not in why_empty:
            reason = f"{row.state}; {pluralize(len(runs), 'run')}: {', '.join(sorted(map(str, why_empty)))}"
            is_waiting = row.state == "PENDING" or row.state in _HELD_STATES
            if is_waiting or all(str(why).startswith(_AGAIN) for why in why_empty):
                kind = EMPTY if is_waiting else EARLIER
                yield AuditFinding(kind, sweep, about, reason, cancel, row.job_id, cluster)
        if _HELD_REASONS.search(row.reason) or row.state in _HELD_STATES:
            release = shlex.join(["scontrol", *on_cluster(cluster), "release", row.number])
            yield AuditFinding(HELD, sweep, about, f"{row.state}: {row.reason}", release, row.job_id, cluster)
        elif row.state == "PENDING" and _BARRED_REASONS.search(row.reason):
            yield AuditFinding(BARRED, sweep, about, f"{row.state}: {row.reason}", cancel, row.job_id, cluster)

    def _why_not_run(self, run_id: str, folder: Path) -> str | None:
        """The reason why a job of the submission in ``folder`` would not run this run; ``None`` if it would."""
        if run_id in self._journals[folder].dropped:
            return "cancelled"
        newest = self._newest.get(run_id)
        if newest is not None and newest.folder != folder:
            return f"{_AGAIN} in {newest.folder.name}"
        head = self._tree.summary(run_id)
        if newest is None or head is None or head.status != STATUS_OK:
            return None
        # A run that is measured again has an ok result, which it replaces.
        _, task = read_task(folder / f"{newest.array.number}.jsonl", newest.index)
        return None if task.supersedes and task.supersedes == head.environment_key else "ok already"

    def _doubled_runs(self) -> Iterator[AuditFinding]:
        working: dict[str, str] = {}
        for cluster, rows in self._rows.items():
            working |= {row.job_id: cluster for row in rows if row.state != "PENDING"}
        sweeps = {key: record.sweep for _, record in self._submissions for one in record.arrays for key in one.run_ids}
        for run_id in sorted(self._tree.existing_runs() & sweeps.keys()):
            folder = self._tree.run_folder(run_id)
            numbers = attempt_numbers(folder)
            if len(numbers) < 2:
                continue
            head = self._tree.summary(run_id)
            starts = {number: Attempt(folder, number).read_start() for number in numbers}
            jobs = {
                number: start.job_id
                for number, start in starts.items()
                if start and start.job_id in working and (head is None or head.attempt != number)
            }
            if len(set(jobs.values())) > 1:
                listed = ", ".join(f"attempt {number} in job {job}" for number, job in jobs.items())
                *_, job_id = filter(None, jobs.values())
                cancel = shlex.join(["scancel", *on_cluster(working[job_id]), job_id])
                yield AuditFinding(DOUBLED, sweeps[run_id], f"run {run_id}", listed, cancel, job_id, working[job_id])
