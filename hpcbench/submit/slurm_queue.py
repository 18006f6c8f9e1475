"""Queries to SLURM about jobs: one batched squeue for all of them, then sacct for jobs that squeue no longer lists.

Also the classification of sbatch errors into refused, over a limit, unreachable and unclear."""

from __future__ import annotations

import contextlib
import datetime
import enum
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from hpcbench.errors import SubmitError
from hpcbench.fileio import printable_text
from hpcbench.submit.journal import JobBatch
from hpcbench.submit.scheduler import (
    CommandResult,
    JobStatus,
    QueueTable,
    command_environment,
    run_program,
)

if TYPE_CHECKING:
    from hpcbench.config.cluster_profile import ClusterProfile


class SbatchOutcome(enum.Enum):
    """The kinds of failed calls, by the next step that they call for."""

    REFUSED = "refused"
    """The job is refused for good."""
    LIMIT = "limit"
    """Too many jobs are submitted: fewer at once, or later."""
    AWAY = "away"
    """The scheduler was not reached."""
    UNCLEAR = "unclear"
    """The scheduler was reached and did not answer in time: it may have accepted the job all the same."""


_UNREACHABLE_PATTERN = (
    r"Unable to contact slurm controller|Connection refused|temporarily unable to accept|Slurm backup controller|"
    r"Unable to establish (?:control|controller)|No route to host|Network is unreachable|Unable to resolve"
)
_NO_ANSWER_PATTERN = (
    r"timed out|Zero Bytes were transmitted|Resource temporarily unavailable|Message (?:receive|send) failure|"
    r"communication (?:connection|shutdown) failure|Connection reset|Transport endpoint|Unexpected message|Broken pipe"
)
_NAMED_LIMIT_PATTERN = r"\b(?:QOS|Assoc)[A-Z]\w+"
"""A reason of SLURM: QOSMinGRES, AssocMaxNodePerJobLimit, QOSMaxSubmitJobPerUserLimit, ..."""
_LIMIT_PATTERN = r"job submit limit|Too many (?:jobs|tasks)"


def classify_sbatch_error(message: str) -> SbatchOutcome:
    """The kind of a failed call of sbatch, from its error message.

    SLURM ends its answer with a sentence about submit, size and time limits together; if it names the limit as well,
    only that name counts.
    """
    named = re.findall(_NAMED_LIMIT_PATTERN, message)
    if named:
        return SbatchOutcome.LIMIT if any("Submit" in name for name in named) else SbatchOutcome.REFUSED
    if re.search(_LIMIT_PATTERN, message, re.IGNORECASE):
        return SbatchOutcome.LIMIT
    if re.search(_UNREACHABLE_PATTERN, message, re.IGNORECASE):
        return SbatchOutcome.AWAY
    return SbatchOutcome.UNCLEAR if re.search(_NO_ANSWER_PATTERN, message, re.IGNORECASE) else SbatchOutcome.REFUSED


_ACTIVE_JOB_STATES = {
    "PENDING": "pending", "CONFIGURING": "pending", "REQUEUED": "pending", "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending", "SPECIAL_EXIT": "pending", "RESV_DEL_HOLD": "pending",
    "RUNNING": "running", "COMPLETING": "running", "SUSPENDED": "running", "STOPPED": "running",
    "SIGNALING": "running", "STAGE_OUT": "running", "RESIZING": "running",
}  # fmt: skip
_ENDED_JOB_STATES = {
    "TIMEOUT": "timeout", "DEADLINE": "timeout", "CANCELLED": "cancelled", "REVOKED": "cancelled",
    "PREEMPTED": "preempted", "OUT_OF_MEMORY": "oom", "FAILED": "failed", "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed", "LAUNCH_FAILED": "failed", "COMPLETED": "lost",
}  # fmt: skip
_IDS_PER_CALL = 2000
_TASK_RANGE_PATTERN = r"\d+(?:-\d+(?::\d+)?)?"
_JOB_ID_PATTERN = re.compile(
    rf"(?P<array>\d+)(?:_(?:\d+|\[(?P<tasks>{_TASK_RANGE_PATTERN}(?:,{_TASK_RANGE_PATTERN})*)(?:%\d+)?\]))?"
)


_HEADER_PATTERN = re.compile(r"[A-Za-z_]+(?:\|[A-Za-z_]+)+")
_NO_ACCOUNTING_PATTERN = re.compile(r"accounting storage is disabled|No such file or directory", re.IGNORECASE)


def has_header(output: str) -> bool:
    """Whether an answer of squeue or sacct begins with the names of its columns.

    Without them there was no answer: a command that a site wraps may print nothing and end with 0.
    """
    return any(_HEADER_PATTERN.fullmatch(line.strip()) for line in output.splitlines())


def on_cluster(cluster: str) -> list[str]:
    """The option that sends a command of SLURM to another cluster than the default one; empty without a name."""
    return ["-M", cluster] if cluster else []


def run_on_cluster(
    command: list[str], cluster: str, profile: ClusterProfile, timeout_s: float = 60.0,
    more: Mapping[str, str] = MappingProxyType({}),
) -> CommandResult:  # fmt: skip
    """Run a command about jobs of ``cluster``, empty for the default one, to its end; it never raises.

    ``SLURM_CLUSTERS`` of this shell need not be that of the shell which submitted, so it does not count. ``more`` is
    added to the environment.
    """
    environment = {**command_environment(profile), **more}
    environment.pop("SLURM_CLUSTERS", None)
    return run_program([command[0], *on_cluster(cluster), *command[1:]], environment, timeout_s)


def query_job_states(
    job_ids: Collection[str], since_unix_s: float, profile: ClusterProfile, cluster: str = "", table: str | None = None
) -> dict[str, JobStatus]:
    """The status of each job that SLURM lists: from squeue, else from sacct.

    A job that neither command lists, though both answered, is left out. Other tasks of the arrays may be in it. A
    job that is in neither answer while one of them is missing is ``waiting``, with the reason: it is not known to
    have ended. ``table``: the whole queue, if it has been read already. Raises ``SubmitError`` if neither squeue nor
    sacct answers.
    """
    queue_error = None
    if table is not None:
        queued = parse_job_states(table, are_queued=True)
    else:
        command = ["squeue", "-t", "all", "-o", "%i|%T|%r|%e|%j|%N"]
        queued, queue_error = _collect_job_states(command, job_ids, profile, cluster)
    missing = [job_id for job_id in job_ids if job_id not in queued]
    if not missing:
        return queued
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_unix_s - 86400))
    command = ["sacct", "-X", "-P", "-S", start, "-o", "JobID,State,Reason,End,JobName,NodeList"]
    ended, account_error = _collect_job_states(command, missing, profile, cluster)
    if account_error and not queue_error and _NO_ACCOUNTING_PATTERN.search(account_error):
        # This cluster keeps no accounts: squeue's answer is all that there is.
        account_error = None
    if queue_error and account_error:
        raise SubmitError(f"the scheduler does not answer: {queue_error}", hint=f"sacct: {account_error}")
    assumed: dict[str, JobStatus] = {}
    if queue_error:
        # Accounting lags behind the queue: a job that it lacks may well be queued or running.
        assumed = dict.fromkeys(missing, JobStatus("pending", f"the scheduler does not answer: {queue_error}"))
        ended = {
            job_id: status._replace(
                reason=f"{status.reason} in accounting; the scheduler does not answer: {queue_error}"
            )
            if status.state in ("pending", "running")
            else status
            for job_id, status in ended.items()
        }
    elif account_error:
        reason = f"it has left the queue, and the accounting does not answer how it ended: {account_error}"
        assumed = dict.fromkeys(missing, JobStatus("waiting", reason))
    return {**assumed, **ended, **queued}


_WHOLE_ARRAYS = MappingProxyType({"SLURM_BITSTR_LEN": "0"})
"""Without -r the tasks of an array that wait are one line, which squeue would cut short."""


def read_queue(profile: ClusterProfile, clusters: Iterable[str]) -> QueueTable:
    """The whole queue of each cluster: lines ``id|STATE|reason|end|name|nodes|user|folder|command``.

    Raises ``SubmitError`` if a cluster does not answer with a table.
    """
    tables: dict[str, str] = {}
    for cluster in clusters:
        command = ["squeue", "-t", "all", "-o", "%i|%T|%r|%e|%j|%N|%u|%Z|%o"]
        result = run_on_cluster(command, cluster, profile, more=_WHOLE_ARRAYS)
        if result.error is not None or not has_header(result.output):
            reason = result.error or f"squeue: {_describe_no_answer(result.output)}"
            raise SubmitError(f"the scheduler does not answer: {reason}")
        tables[cluster] = result.output
    return tables


class JobRow(NamedTuple):
    """A line of ``read_queue``."""

    job_id: str
    """``4711``, ``4711_3``, or ``4711_[0-9,12]`` for tasks that wait."""
    state: str
    reason: str
    end: str
    name: str
    nodes: str
    user: str
    folder: str
    command: str

    @property
    def number(self) -> str:
        """The number of the job or the array."""
        return self.job_id.partition("_")[0]

    @property
    def is_active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in _ACTIVE_JOB_STATES

    def tasks(self, count: int) -> list[int]:
        """The tasks of its array that the line is about; all ``count`` if it names none."""
        match = _JOB_ID_PATTERN.fullmatch(self.job_id)
        if match is None or "_" not in self.job_id:
            return list(range(count))
        return list(_expand_task_ranges(match["tasks"] or self.job_id.partition("_")[2]))


def queue_rows(table: str) -> list[JobRow]:
    """The jobs in a table of ``read_queue``; other lines are skipped."""
    rows = (line.split("|", maxsplit=8) for line in table.splitlines())
    return [JobRow(*row) for row in rows if len(row) == len(JobRow._fields) and _JOB_ID_PATTERN.fullmatch(row[0])]


def _collect_job_states(
    command: list[str], job_ids: Collection[str], profile: ClusterProfile, cluster: str
) -> tuple[dict[str, JobStatus], str | None]:
    """Statuses by job id from squeue or sacct, and the last error.

    For squeue an id that it has forgotten is an error; here it is not.
    """
    statuses: dict[str, JobStatus] = {}
    error = None
    arrays = sorted({job_id.partition("_")[0] for job_id in job_ids})
    for first in range(0, len(arrays), _IDS_PER_CALL):
        part = ",".join(arrays[first : first + _IDS_PER_CALL])
        result = run_on_cluster([*command, "-j", part], cluster, profile, more=_WHOLE_ARRAYS)
        if result.error is not None and "Invalid job id" not in result.error:
            error = result.error
            continue
        found = parse_job_states(result.output, are_queued=command[0] == "squeue")
        statuses |= found
        if not found and result.error is None and not has_header(result.output):
            error = f"{command[0]}: {_describe_no_answer(result.output)}"
    return statuses, error


def _describe_no_answer(output: str) -> str:
    first = next((line.strip() for line in output.splitlines() if line.strip()), "")
    return f"its answer is not a table: {printable_text(first)[:80]!r}" if first else "it printed nothing"


def parse_job_states(text: str, *, are_queued: bool = False) -> dict[str, JobStatus]:
    """The jobs in lines ``id|STATE by 0|reason|end|name|nodes``; other lines are skipped.

    Jobs that squeue lists (``are_queued``) in a state that is unknown here are pending; otherwise they are skipped.
    """
    statuses: dict[str, JobStatus] = {}
    parsed: dict[str, JobStatus | None] = {}
    for line in text.splitlines():
        job_id, _, fields = line.partition("|")
        # The lines of the tasks of an array differ in their ids alone.
        if fields not in parsed:
            parsed[fields] = _parse_job_state(fields, "pending" if are_queued else None)
        status, job = parsed[fields], _JOB_ID_PATTERN.fullmatch(job_id)
        if status is None or job is None:
            continue
        if job["tasks"]:
            tasks = _expand_task_ranges(job["tasks"])
            statuses |= dict.fromkeys((f"{job['array']}_{task}" for task in tasks), status)
        else:
            statuses[job_id] = status
    return statuses


def _expand_task_ranges(text: str) -> Iterator[int]:
    """The numbers in a list such as ``0-3,7,10-20:2``."""
    for part in text.split(","):
        numbers, _, step = part.partition(":")
        first, _, last = numbers.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def _parse_job_state(fields: str, other_state: str | None) -> JobStatus | None:
    """``other_state``: the state of a job whose word is in no table."""
    state, reason, end, name, nodes, *_ = [*fields.split("|"), "", "", "", ""]
    word = state.split(" ")[0].rstrip("+")
    our_state = _ACTIVE_JOB_STATES.get(word) or _ENDED_JOB_STATES.get(word) or (other_state if word else None)
    if our_state is None:
        return None
    ended_unix_s = None
    if word in _ENDED_JOB_STATES:
        with contextlib.suppress(ValueError):
            ended_unix_s = datetime.datetime.fromisoformat(end).timestamp()
    unexplained = "PENDING: SLURM has given no reason yet" if word == "PENDING" else word
    reason = unexplained if reason in ("", "None") else f"{word}: {reason}"
    return JobStatus(our_state, reason, name, ended_unix_s, "" if nodes.startswith("None") else nodes)


class JobLookup(NamedTuple):
    """The answer of squeue to the question for a batch's job."""

    jobs: list[tuple[str, str]]
    """Number and cluster of each job of the batch, ascending; the cluster is empty where the answer names none."""
    is_certain: bool
    """Whether squeue printed a table: without one, no job in it means nothing."""
    wall_s: float


def find_jobs(batch: JobBatch, profile: ClusterProfile) -> JobLookup:
    """Ask squeue for the queued, running and just ended jobs of ``batch``, by their name and command.

    Raises ``SubmitError`` if squeue does not answer.
    """
    began_s = time.monotonic()
    # A comma divides names.
    which = ["-u", str(os.getuid())] if "," in batch.name else ["--name", batch.name]
    result = run_on_cluster(["squeue", "-t", "all", "-o", "%F|%j|%o", *which], batch.job_cluster, profile)
    if result.error is not None:
        raise SubmitError(f"the scheduler does not answer: {result.error}")
    jobs: list[tuple[str, str]] = []
    answering = batch.job_cluster
    for line in result.output.splitlines():
        if line.startswith("CLUSTER: "):
            answering = line.removeprefix("CLUSTER: ").strip()
            continue
        job_id, _, rest = line.partition("|")
        name, _, command = rest.partition("|")
        if batch.is_named(name, command) and job_id.isdecimal() and (job_id, answering) not in jobs:
            jobs.append((job_id, answering))
    jobs.sort(key=lambda job: int(job[0]))
    return JobLookup(jobs, bool(jobs) or has_header(result.output), time.monotonic() - began_s)


def queued_job_numbers(numbers: Iterable[str], profile: ClusterProfile, cluster: str = "") -> set[str]:
    """The ``numbers`` of jobs that are queued or running. Raises ``SubmitError`` if squeue does not answer."""
    result = run_on_cluster(["squeue", "-o", "%F|%T", "-j", ",".join(numbers)], cluster, profile)
    if result.error is not None and "Invalid job id" not in result.error:
        raise SubmitError(f"the scheduler does not answer: {result.error}")
    if result.error is None and not has_header(result.output):
        raise SubmitError(f"the scheduler does not answer: squeue: {_describe_no_answer(result.output)}")
    first_columns = (line.partition("|")[0].strip() for line in result.output.splitlines())
    return {number for number in first_columns if number.isdecimal()}


def count_queued_jobs(profile: ClusterProfile, cluster: str = "") -> Counter[tuple[str, str]] | None:
    """The user's jobs in the queue by partition and QOS, array tasks counted singly; ``None`` without an answer."""
    command = ["squeue", "-r", "-o", "%i|%P|%q", "-u", str(os.getuid())]
    result = run_on_cluster(command, cluster, profile)
    if result.error is not None or not has_header(result.output):
        return None
    rows = ([*line.strip().split("|"), "", ""] for line in result.output.splitlines() if line.strip()[:1].isdecimal())
    return Counter((partition, qos) for _, partition, qos, *_ in rows)


def private_data(profile: ClusterProfile, cluster: str = "") -> str | None:
    """The value of PrivateData in slurm.conf, such as ``jobs,usage``; ``None`` if scontrol does not answer."""
    result = run_on_cluster(["scontrol", "show", "config"], cluster, profile)
    if result.error is not None:
        return None
    match = re.search(r"^PrivateData\s*=\s*(\S+)", result.output, re.MULTILINE)
    return match[1] if match else "none"


def hides_jobs(private: str | None) -> bool:
    """Whether an account sees its own jobs alone, by ``private_data``; without an answer it must be assumed."""
    return private is None or "jobs" in private.lower().split(",")


def scheduler_cluster(profile: ClusterProfile, partition: str | None = None) -> str:
    """The cluster, or clusters, that the profile's directives send a job to; else those of SLURM_CLUSTERS; or empty."""
    named = profile.partition(partition).directives.get("clusters")
    if isinstance(named, list):
        named = ",".join(named)
    return named if isinstance(named, str) and named else os.environ.get("SLURM_CLUSTERS", "")


def first_cluster(profile: ClusterProfile) -> str:
    """The first one of ``scheduler_cluster``: scontrol takes one cluster."""
    return scheduler_cluster(profile).partition(",")[0]


def max_array_size(profile: ClusterProfile) -> int:
    """The largest array that may be submitted: by the profile, else by the scheduler, else SLURM's default.

    Raises ``SubmitError`` if the scheduler is away: a guess that is too large would be refused once it is back.
    """
    if profile.scheduler.max_array_size:
        return profile.scheduler.max_array_size
    result = run_on_cluster(["scontrol", "show", "config"], first_cluster(profile), profile)
    if result.error and classify_sbatch_error(result.error) in (SbatchOutcome.AWAY, SbatchOutcome.UNCLEAR):
        raise SubmitError(f"the scheduler does not answer: {result.error}")
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", result.output, re.MULTILINE)
    # The largest index is one less than MaxArraySize, and ours begin at 0.
    return max(1, int(match[1])) if match else 1001


_STATES_OUT_OF_SERVICE = re.compile(r"down|drain|fail|inval|maint|reserved|power|reboot|unk|\*")


def partition_nodes(profile: ClusterProfile, partition: str | None) -> list[str]:
    """The names of the nodes of a partition that are in service, without those that the profile excludes.

    Raises ``SubmitError`` if sinfo does not answer, or no such node is left.
    """
    queue, cluster = profile.partition(partition), first_cluster(profile)
    where = ["-p", queue.name] if queue.name else []
    listed = run_on_cluster(["sinfo", "-N", "-h", "-o", "%N %T", *where], cluster, profile)
    excluded = set[str]()
    if queue.request.exclude_nodes:
        command = ["scontrol", "show", "hostnames", ",".join(queue.request.exclude_nodes)]
        excluded = {*run_on_cluster(command, cluster, profile).output.split()}
    names = [name for name in nodes_in_service(listed.output) if name not in excluded]
    if listed.error or not names:
        reason = listed.error or f"no node of partition {queue.name} is in service"
        raise SubmitError(
            f'node = "each": {reason}', hint='run this on a login node, or name them: node = ["n1", "n2"]'
        )
    return names


def nodes_in_service(listed: str) -> list[str]:
    """The names in the output of ``sinfo -N -h -o "%N %T"``, each once, without nodes that take no job."""
    rows = [line.split() for line in listed.splitlines() if len(line.split()) == 2]
    return list(dict.fromkeys(name for name, state in rows if not _STATES_OUT_OF_SERVICE.search(state.lower())))
