"""Submission of a rendered script with sbatch, exactly once, through submitit.

Stock submitit writes the script itself, pickles a function, and builds a plain ``SlurmExecutor`` for arrays, which
loses the overrides of a subclass. Here the script exists already, for one run and for an array alike; submitit checks
the parameters. Each call is recorded in the journal before and after, and a call without an answer is resolved by the
name of its job:

    journal: tried  -->  sbatch  --->  accepted  -->  journal: job id
                           |-------->  refused   -->  journal: withdrawn
                           '-------->  no answer -->  squeue by name:   found        -->  journal: job id
                                                                       surely absent -->  journal: withdrawn

A request that was sent may wait inside a scheduler that hangs, so that elapsed time alone proves nothing. A job is
absent only if squeue has answered promptly for ``SBATCH_SETTLE_S`` without listing it. If a withdrawn job appears
later all the same, two jobs have the same runs: one of them is cancelled.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import submitit

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.fileio import printable_text, shared_umask
from hpcbench.identity import account_name, end_with_parent
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.batches import sbatch_command
from hpcbench.submit.journal import JobBatch, Journal, JournalWriter
from hpcbench.submit.lock import LeaseLock
from hpcbench.submit.scheduler import Notify, command_environment, scrubbed_names
from hpcbench.submit.slurm_queue import (
    SbatchOutcome,
    classify_sbatch_error,
    find_jobs,
    run_on_cluster,
    scheduler_cluster,
)
from hpcbench.submit.submission_record import Submission, started_attempt

_T = TypeVar("_T")

_SBATCH_TIMEOUT_S = 60.0


class SbatchExecutor(submitit.SlurmExecutor):
    """Submits a script with sbatch. ``environment`` is the whole environment that sbatch sees."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        super().__init__(folder)

    @classmethod
    def affinity(cls) -> int:
        """submitit's preference for this executor. It asks for srun, which a login node need not have."""
        return 2

    def submit_script(self, script: Path, options: list[str], argument: int) -> tuple[str, str]:
        """Call ``sbatch_command`` and return the number of the job and its cluster, empty if sbatch named none.

        Raises ``SbatchError`` if sbatch is absent, refuses, or its answer holds no job's number.
        """
        output = self._call(sbatch_command(script, options, argument))
        job = parse_job_number(output)
        if job is None:
            message = f"sbatch accepted {script} but its answer names no job: {printable_text(output.strip())!r}"
            hint = "it is looked for by its name at the next submit"
            raise SbatchError(message, SbatchOutcome.UNCLEAR, hint=hint)
        return job

    def _call(self, command: list[str]) -> str:
        if shutil.which(command[0], path=self._environment.get("PATH")) is None:
            hint = "is this a login node of the cluster? `hpcbench doctor --cluster NAME` looks closer"
            raise SbatchError("sbatch is not on PATH", SbatchOutcome.REFUSED, hint=hint)
        wrapper = _parent_death_command()
        process = subprocess.Popen(
            [*wrapper, *command],
            env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace",
            # An sbatch whose submit was killed must not submit its job later, when another submit has done so.
            preexec_fn=None if wrapper else end_with_parent,  # noqa: PLW1509 - its only other thread renews a lock
            umask=shared_umask(self.folder), start_new_session=True,
        )  # fmt: skip
        try:
            output, complaint = process.communicate(timeout=_SBATCH_TIMEOUT_S)
        except BaseException as error:
            # With the children of a site's wrapper, which must not submit the job later.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            message = f"sbatch did not answer within {_SBATCH_TIMEOUT_S:g} s"
            raise SbatchError(message, SbatchOutcome.UNCLEAR) from error
        # A site's wrapper may fail after sbatch has queued the job.
        if process.returncode != 0 and parse_job_number(output) is None:
            message = printable_text((complaint or output).strip())
            outcome = classify_sbatch_error(message)
            verb = "could not send" if outcome in (SbatchOutcome.AWAY, SbatchOutcome.UNCLEAR) else "refused"
            hint = f"command: {shlex.join(command)}{_removed_variables()}"
            raise SbatchError(f"sbatch {verb} {command[-2]}: {message}", outcome, hint=hint)
        return output


def _removed_variables() -> str:
    names = ", ".join(name for name in scrubbed_names() if name.startswith("SBATCH_"))
    return f"\n  {names} of this shell was not passed on: what jobs need is in the cluster's profile" if names else ""


_JOB_NUMBER_LINE = re.compile(r"(?:Submitted batch job )?(\d+)(?:;(\S+)| on cluster (\S+))?")


def parse_job_number(output: str) -> tuple[str, str] | None:
    """Return job number and cluster from the last line of ``output`` that is an answer of sbatch; ``None`` without one.

    An answer is ``4711``, ``4711;cluster`` or ``Submitted batch job 4711``. Other lines, such as a site's banner, do
    not count.
    """
    matches = (_JOB_NUMBER_LINE.fullmatch(line.strip()) for line in reversed(output.splitlines()))
    return next(((match[1], match[2] or match[3] or "") for match in matches if match), None)


class SbatchError(SubmitError):
    """sbatch did not accept a job; ``outcome`` is the kind of refusal."""

    def __init__(self, message: str, outcome: SbatchOutcome, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.outcome = outcome


@functools.cache
def _parent_death_command() -> tuple[str, ...]:
    """A wrapper that ends its command together with this process; empty if this system has none.

    ``preexec_fn`` does the same, but copies this process first, which takes the longer the more runs it holds.
    """
    words = ("setpriv", "--pdeathsig", "KILL")
    try:
        works = subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        works = False
    return words if works else ()


def check_job_parameters(parameters: Mapping[str, Any], folder: Path) -> None:
    """Let submitit check a job's parameters. Raises ``SubmitError`` with its message."""
    try:
        SbatchExecutor(folder, os.environ).update_parameters(**parameters)
    except ValueError as error:
        raise SubmitError(f"submitit refuses the job's parameters: {error}") from error


SBATCH_SETTLE_S = 30.0
"""Seconds of prompt answers of squeue after which a job that it does not list was not submitted."""
_PROMPT_S = 5.0
"""An answer of squeue that takes longer comes from a scheduler that hangs or hung."""
_MIN_RETRY_PAUSE_S = 1.0
_MAX_RETRY_PAUSE_S = 30.0
_MAX_LOOK_PAUSE_S = 5.0


class JobSubmitter:
    """Submits the batches of one submission to SLURM, for the holder of the submission's lock."""

    def __init__(
        self, folder: Path, record: Submission, profile: ClusterProfile, tree: ClusterTree, lock: LeaseLock
    ) -> None:
        self.writer = JournalWriter(folder)
        self._folder, self._record, self._profile, self._tree, self._lock = folder, record, profile, tree, lock
        self._executor = SbatchExecutor(folder, command_environment(profile))

    def submit(self, batch: JobBatch, options: list[str], notify: Notify) -> str:
        """The number under which the scheduler has accepted ``batch``.

        A scheduler that is away or does not answer is asked again for ``scheduler.retry_s``, with growing pauses.
        Raises ``SbatchError``; after an ``UNCLEAR`` answer the batch stays unanswered in the journal, after any other
        it is withdrawn.
        """
        retry = _Retry(self._profile.scheduler.retry_s, notify)
        script = self._folder / f"{batch.array}.sh"
        cluster = scheduler_cluster(self._profile, self._record.arrays[batch.array].partition)
        batch = msgspec.structs.replace(batch, user=account_name(), job_cluster=cluster)
        while True:
            self._lock.check_held()
            self.writer.record(batch, durable=True)
            try:
                number, answering = self._executor.submit_script(script, options, batch.first)
                return self._accept(batch, (number, answering or ("" if "," in cluster else cluster)))
            except SbatchError as error:
                if job := self._find_refused_job(batch, error):
                    return self._accept(batch, job)
                if error.outcome is not SbatchOutcome.UNCLEAR:
                    self.writer.withdraw(batch, doubtful=error.outcome is SbatchOutcome.AWAY)
                if error.outcome not in (SbatchOutcome.AWAY, SbatchOutcome.UNCLEAR):
                    raise
                retry.pause(error)
                if error.outcome is SbatchOutcome.UNCLEAR:
                    if job := self._settle(batch, retry.end_s, notify):
                        return self._accept(batch, job)
                    self.writer.withdraw(batch, doubtful=True)

    def _accept(self, batch: JobBatch, job: tuple[str, str]) -> str:
        self.writer.record(msgspec.structs.replace(batch, job_id=job[0], job_cluster=job[1]))
        return job[0]

    def _find_refused_job(self, batch: JobBatch, error: SbatchError) -> tuple[str, str] | None:
        """The job that a refusal is wrong about: a site's wrapper of sbatch may fail after the job was queued."""
        if error.outcome is SbatchOutcome.REFUSED:
            with contextlib.suppress(SubmitError):
                return next(iter(find_jobs(batch, self._profile).jobs), None)
        return None

    def query(self, question: Callable[[], _T], notify: Notify) -> _T:
        """The answer to ``question``, which is asked again while the scheduler is away, for as long as an sbatch is."""
        retry = _Retry(self._profile.scheduler.retry_s, notify)
        while True:
            try:
                return question()
            except SubmitError as error:
                retry.pause(error)

    def _settle(self, batch: JobBatch, end_s: float, notify: Notify) -> tuple[str, str] | None:
        """The job that an sbatch without an answer may have submitted; ``None`` once it is certain that there is none.

        A late, broken or missing answer of squeue begins the time anew. Raises ``SubmitError`` after ``end_s``
        (monotonic) while nothing is certain: nothing is submitted again then.
        """
        answers_since_s: float | None = None
        pause_s, is_told = _MIN_RETRY_PAUSE_S, False
        while True:
            try:
                lookup = find_jobs(batch, self._profile)
                problem = "" if lookup.is_certain else "squeue printed no table"
                if lookup.jobs:
                    return lookup.jobs[0]
                if lookup.wall_s > _PROMPT_S:
                    problem = f"squeue took {lookup.wall_s:.0f} s to answer"
            except SubmitError as error:
                problem = error.message
            now_s = time.monotonic()
            if problem:
                answers_since_s = None
            elif answers_since_s is None:
                answers_since_s = now_s
            elif now_s - answers_since_s >= SBATCH_SETTLE_S:
                return None
            # Once squeue answers, the rest of the time is worth its wait.
            if now_s > end_s and answers_since_s is None:
                message = f"it is not certain whether sbatch submitted {batch.name}: {problem}"
                raise SubmitError(message, hint="the next submit looks again; nothing is sent twice")
            if answers_since_s is not None and not is_told:
                notify(f"sbatch did not answer: looking for its job for {SBATCH_SETTLE_S:.0f} s")
                is_told = True
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _MAX_LOOK_PAUSE_S)

    def recover(self, batch: JobBatch, notify: Notify) -> None:
        """Record the outcome of a batch whose sender died before it could.

        That its job is absent is for the account that called sbatch to find: the scheduler may hide it from others.
        Raises ``SubmitError`` if the scheduler does not answer, or the batch is another account's.
        """
        if job := self._find_started(batch):
            self._accept(batch, job)
        elif batch.user != account_name():
            jobs = find_jobs(batch, self._profile).jobs
            if not jobs:
                message = f"an sbatch of {batch.user} has not answered, and squeue lists no job {batch.name}"
                hint = f"the next submit of {batch.user} finds out whether it was sent; other accounts may not see it"
                raise SubmitError(message, hint=hint)
            self._accept(batch, jobs[0])
        else:
            job = self._settle(batch, time.monotonic() + self._profile.scheduler.retry_s, notify)
            if job is None:
                self.writer.withdraw(batch, doubtful=True)
            else:
                self._accept(batch, job)

    def _find_started(self, batch: JobBatch) -> tuple[str, str] | None:
        """The job of a batch by the start markers of its runs."""
        for run_id in self._record.arrays[batch.array].runs_of(batch.first, batch.count):
            attempt = started_attempt(self._tree, run_id, self._folder.name)
            if attempt and attempt[1].job_id:
                # A node has a name for its cluster even where no command takes one: there is no slurmdbd.
                named = attempt[1].job_cluster if "," in batch.job_cluster else batch.job_cluster
                return attempt[1].job_id.partition("_")[0], named or ""
        return None

    def cancel_surplus(self, journal: Journal, notify: Notify) -> None:
        """Look for jobs of withdrawn batches that have appeared all the same, and leave one job for each batch.

        It is the one that has begun a run, else the oldest; the others are cancelled. What they begin meanwhile finds
        the attempt of the first.
        """
        for batch in {batch.name: batch for batch in journal.doubtful}.values():
            try:
                jobs = find_jobs(batch, self._profile).jobs
            except SubmitError as error:
                notify(f"{error.message}: hpcbench status --audit looks for a second job {batch.name}")
                continue
            sent = [other for other in journal.of(batch.array) if other.is_sent and other.overlaps(batch)]
            if not jobs or (len(jobs) == 1 and [other.job_id for other in sent] == [jobs[0][0]]):
                continue
            surplus = jobs
            if not sent or [other.name for other in sent] == [batch.name]:
                started = self._find_started(batch)
                kept = next((job for job in jobs if started and job[0] == started[0]), jobs[0])
                self._accept(batch, kept)
                surplus = [job for job in jobs if job != kept]
            for number, answering in surplus:
                result = run_on_cluster(["scancel", number], answering, self._profile)
                outcome = f"it could not be cancelled: {result.error}" if result.error else "it was cancelled"
                notify(f"job {number} is a second one for the runs of {batch.name}: {outcome}")


class _Retry:
    """Growing pauses between the calls of a scheduler that does not answer, for at most ``patience_s``."""

    def __init__(self, patience_s: float, notify: Notify) -> None:
        self.end_s = time.monotonic() + patience_s
        self._pause_s, self._notify = _MIN_RETRY_PAUSE_S, notify

    def pause(self, error: SubmitError) -> None:
        """Wait before the next call. Raises ``error`` if there is no time for another one."""
        if time.monotonic() + self._pause_s > self.end_s:
            raise error
        self._notify(f"{error.message.splitlines()[-1]}: asking again")
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _MAX_RETRY_PAUSE_S)
