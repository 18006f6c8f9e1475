"""The base class of every scheduler, and the calls of its commands.

submit  --->  Scheduler.submit  --->  the scheduler's queue  --->  job script  --->  result.json
                                          ^            ^
status, wait  -->  Scheduler.state -------+            |
cancel        -->  Scheduler.cancel -------------------+
"""

from __future__ import annotations

import abc
import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

from hpcbench.errors import ConfigError, SubmitError
from hpcbench.fileio import printable_text
from hpcbench.paths import user_folder
from hpcbench.submit.lock import SILENCE_S, announce, has_listeners
from hpcbench.submit.submission_record import Submission, SubmittedRun

if TYPE_CHECKING:
    from hpcbench.config.cluster_profile import ClusterProfile
    from hpcbench.results.attempts import AttemptStart
    from hpcbench.results.results_tree import ClusterTree

Notify = Callable[[str], None]
"""Shows the user a message about progress."""


def ignore_message(message: str) -> None:
    pass


class JobStatus(NamedTuple):
    """The state of the job of a run at its scheduler."""

    state: str
    """``waiting`` (not submitted yet), ``pending``, ``running``, ``planned`` (will not run), ``hidden`` (this account
    may not see the job), ``lost`` (ended without an error), or the status of a result: ``timeout``, ``cancelled``,
    ``preempted``, ``oom``, ``failed``."""
    reason: str
    """The scheduler's own words, empty if it has none."""
    name: str = ""
    """The job's name, where the scheduler uses job ids again."""
    ended_unix_s: float | None = None
    nodes: str = ""
    """The nodes of the job, in the scheduler's notation."""


QueueTable: TypeAlias = Mapping[str, str]
"""The scheduler's table of all jobs, as text, by cluster; an empty name is the default cluster."""


class JobLimit(NamedTuple):
    """A limit on jobs that the user may have queued and running, and the part of it that is left."""

    most: int
    free: int
    of: str
    """The place that it holds for, for messages."""


class SchedulerLimits(NamedTuple):
    """Limits on what may be submitted now."""

    max_array_size: int = 1
    """Jobs that one call may submit."""
    everywhere: JobLimit | None = None
    """The limit on all jobs; ``None``: none is known, or the number of queued jobs is not."""
    by_partition: Mapping[str | None, JobLimit] = MappingProxyType({})
    """The limits on the jobs of a partition, by its name in the profile."""

    def tightest(self, partition: str | None) -> JobLimit | None:
        """The limit that leaves the fewest jobs for ``partition``."""
        limits = [limit for limit in (self.everywhere, self.by_partition.get(partition)) if limit is not None]
        return min(limits, key=lambda limit: limit.free, default=None)

    def after(self, partition: str | None, jobs: int) -> SchedulerLimits:
        """The limits once ``jobs`` were submitted to ``partition``."""

        def reduced(limit: JobLimit) -> JobLimit:
            return limit._replace(free=limit.free - jobs)

        everywhere = reduced(self.everywhere) if self.everywhere is not None else None
        of_others = {key: reduced(limit) if key == partition else limit for key, limit in self.by_partition.items()}
        return self._replace(everywhere=everywhere, by_partition=of_others)


@dataclass
class SendOutcome:
    """The outcome of submitting the jobs of one or several submissions."""

    jobs: int = 0
    """Jobs that the scheduler accepted now."""
    waiting: int = 0
    """Jobs that are submitted again by the next ``submit``."""
    reason: str = ""
    """The reason why the jobs in ``waiting`` were not submitted; empty if there are none."""
    refused: list[SubmitError] = field(default_factory=list)
    """Final refusals: the runs of these jobs belong to no submission."""
    failed: SubmitError | None = None
    """The scheduler did not answer."""

    def add(self, other: SendOutcome) -> None:
        """Add the jobs and refusals of ``other``; the first reason and the first missing answer stay."""
        self.jobs += other.jobs
        self.waiting += other.waiting
        self.reason = self.reason or other.reason
        self.refused += other.refused
        self.failed = self.failed or other.failed


class Scheduler(abc.ABC):
    """A scheduler, or the jobs of one machine without a scheduler.

    Every method may be called from several processes and hosts at once. Times are seconds, Unix times end in
    ``_unix_s``. Example of a third kind (see ``tests/submit/test_third_scheduler.py``)::

        class FluxScheduler(Scheduler):
            def submit(self, folder, record, tree, notify): ...  # flux batch, journal, lock
            def state(self, runs): ...                           # flux jobs
            def cancel(self, whole, parts): ...                  # flux cancel

        SCHEDULER: type[Scheduler] = FluxScheduler
    """

    poll_s: ClassVar[float] = 10.0
    """Pause (s) between two queries of ``status --watch`` and ``submit --wait``, if the profile sets none."""
    requeues: ClassVar[bool] = False
    """Whether an interrupted job may be put back into the queue and run a second time."""
    has_arrays: ClassVar[bool] = False
    """Whether the ids of the jobs of an array are equal up to an underscore: ``4711_0``, ``4711_1``."""
    queue_log: ClassVar[str | None] = None
    """File in a submission's folder with the words of its queue process, if there is one."""

    def __init__(self, profile: ClusterProfile) -> None:
        """Nothing is called yet."""
        self.profile = profile

    def check(self) -> None:
        """Check that jobs can be submitted from this machine, before anything is written.

        Raises:
            SubmitError: the scheduler's commands or configuration are absent.
            ConfigError: the profile lacks something that the scheduler requires, by default its account.
        """
        if error := account_error(self.profile):
            raise error

    def limits(self, record: Submission) -> SchedulerLimits:
        """Return the limits that hold now for the jobs of a submission; by default one job per call and no other.

        Raises:
            SubmitError: the scheduler does not answer.
        """
        return SchedulerLimits()

    def node_names(self, partition: str | None) -> list[str]:
        """Return the names of the nodes of a partition that are in service and that jobs may get.

        Raises:
            ConfigError: this kind of scheduler lists no nodes; so it is by default.
            SubmitError: the scheduler does not answer.
        """
        message = f'node = "each": the scheduler of cluster {self.profile.name} lists no nodes'
        raise ConfigError(message, hint='name them: node = ["n1", "n2"]')

    @abc.abstractmethod
    def submit(self, folder: Path, record: Submission, tree: ClusterTree, notify: Notify) -> SendOutcome:
        """Submit every job of a submission that was not submitted yet, each exactly once.

        Args:
            folder: the submission's folder; array ``n`` has the script ``<n>.sh``, called with the job's number, and
                the journal ``sent-*.jsonl`` records each accepted job.
            record: the contents of the folder's ``submission.json``.
            tree: the cluster's results, where start markers show jobs that have run.
            notify: called with messages about retries.

        Returns:
            The numbers of accepted and waiting jobs and the refusals. A scheduler that does not answer is ``failed``,
            not raised.

        Raises:
            StorageError: the submission's folder cannot be written.
        """

    @abc.abstractmethod
    def state(self, runs: Mapping[str, SubmittedRun], queue: QueueTable | None = None) -> Mapping[str, JobStatus]:
        """Return the status of each run of ``runs`` whose job the scheduler lists.

        A run whose job is unknown is left out: unknown is never taken for failed.

        Args:
            runs: runs of one cluster by ``run_id``, submitted to this kind of scheduler.
            queue: the whole queue, if it has been read already: nothing is asked for then.

        Raises:
            SubmitError: the scheduler does not answer.
        """

    def attempts_at_work(self, starts: Mapping[str, tuple[AttemptStart, str]]) -> dict[str, str]:
        """Return the reason by run of each attempt whose job or process goes on.

        Args:
            starts: by ``run_id`` the start marker, and the cluster of its job, if the scheduler has several.

        Raises:
            SubmitError: the scheduler does not answer.
        """
        return {}

    @abc.abstractmethod
    def cancel(self, whole: Sequence[SubmittedRun], parts: Sequence[SubmittedRun]) -> dict[str, str]:
        """Stop jobs; return the reason by number of each job or array that the scheduler did not cancel.

        Jobs that have ended meanwhile are no problem, and one refusal does not keep the other jobs.

        Args:
            whole: one run of each job that is cancelled as a whole; each has a ``job_id``.
            parts: running runs of jobs that go on with their next run.
        """

    @classmethod
    def job_log(cls, run: SubmittedRun) -> Path | None:
        """Return the path of the file with the output of the job's script; ``None`` if the run has no job yet."""
        if run.job_id is None:
            return None
        job, _, task = run.job_id.partition("_")
        return run.folder / f"{run.array.number}.{job}.{task or NO_ARRAY_TASK}.log"


NO_ARRAY_TASK = "4294967294"
"""The value of %a in the name of a log of a job that is not an array."""


def account_error(profile: ClusterProfile) -> ConfigError | None:
    """Return the error if the cluster requires an account and the profile has none; else ``None``."""
    if not profile.account_required or profile.account is not None:
        return None
    return ConfigError(
        f"cluster {profile.name} needs an account, and none is set",
        hint=f'set it in {user_folder() / "config.toml"}, below [accounts]: {profile.name} = "..."',
    )


_SCRUBBED_PREFIXES = (
    "SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_", "SACCTMGR_",
    "PMI", "PMIX", "OMPI_", "TORCHELASTIC_", "PET_", "SUBMITIT_",
)  # fmt: skip
_KEPT_NAMES = frozenset({"SLURM_CONF", "SLURM_CLUSTERS"})
"""They select the scheduler, and describe no job."""
_SCRUBBED_NAMES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def scrubbed_names() -> list[str]:
    """The environment variables that describe another job than the one being submitted."""
    names = os.environ.keys() - _KEPT_NAMES
    return sorted(name for name in names if name in _SCRUBBED_NAMES or name.startswith(_SCRUBBED_PREFIXES))


def scrubbed_environment() -> dict[str, str]:
    """A copy of the environment for sbatch and for local jobs, without ``scrubbed_names()``."""
    scrubbed = set(scrubbed_names())
    return {name: value for name, value in os.environ.items() if name not in scrubbed}


def command_environment(profile: ClusterProfile) -> dict[str, str]:
    """The environment for the scheduler's commands: scrubbed, with the profile's configuration file and folder."""
    environment = scrubbed_environment()
    if profile.scheduler.config_file is not None:
        environment["SLURM_CONF"] = profile.scheduler.config_file
    if profile.scheduler.bin_folder:
        environment["PATH"] = os.pathsep.join((profile.scheduler.bin_folder, environment.get("PATH", os.defpath)))
    return environment


def find_command(command: str, profile: ClusterProfile) -> Path | None:
    """Return the path of a scheduler's command; ``None`` if it is in no folder of the profile's PATH."""
    path = shutil.which(command, path=command_environment(profile).get("PATH"))
    return Path(path) if path else None


class CommandResult(NamedTuple):
    """The end of a command. ``exit_code`` is ``None`` if it could not be started or did not end in time."""

    name: str
    output: str
    complaint: str
    """Its standard error, or the reason why it has no exit code."""
    exit_code: int | None

    @property
    def error(self) -> str | None:
        """``None`` if the command succeeded."""
        return None if self.exit_code == 0 else f"{self.name}: {printable_text(self.complaint.strip())}"


def run_program(command: list[str], environment: Mapping[str, str], timeout_s: float = 60.0) -> CommandResult:
    """Run a command to its end, or kill it after ``timeout_s``; it never raises. A long silence is announced."""
    name = command[0]
    try:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    except OSError as error:
        return CommandResult(name, "", str(error), None)
    try:
        if timeout_s > SILENCE_S and has_listeners():
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, complaint = process.communicate(timeout=SILENCE_S)
                return CommandResult(name, output, complaint, process.returncode)
            timeout_s -= SILENCE_S
            announce(f"{name} has not answered for {SILENCE_S:g} s; waiting {timeout_s:g} s longer")
        output, complaint = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        process.kill()
        return CommandResult(name, "", str(error), None)
    return CommandResult(name, output, complaint, process.returncode)
