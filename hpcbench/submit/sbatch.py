"""Submission of a rendered script with sbatch, exactly once, through submitit.

Stock submitit writes the script itself, pickles a function, and builds a plain ``SlurmExecutor`` for arrays, which
loses the overrides of a subclass. Here the script exists already, for one run and for an array alike; submitit checks
the parameters. Each call is recorded in the journal before and after, and a call without an answer is resolved by the
name of its job:

    journal: tried  -->  sbatch  --->  accepted  -->  journal: job id
                           |-------->  refused   -->  journal: withdrawn
                           '-------->  no answer -->  squeue by name until SBATCH_SETTLE_S: job id or withdrawn
"""

from __future__ import annotations

import contextlib
import ctypes
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
from hpcbench.fileio import printable_text
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.journal import JobBatch, JournalWriter, mark_attempted
from hpcbench.submit.lock import LeaseLock
from hpcbench.submit.scheduler import Notify, command_environment
from hpcbench.submit.slurm_queue import SbatchOutcome, classify_sbatch_error, find_job_by_name
from hpcbench.submit.submission_record import Submission, started_attempt

_T = TypeVar("_T")

_SBATCH_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
"""Looked up once and not in each child process; only Linux has it."""


class SbatchExecutor(submitit.SlurmExecutor):
    """Submits a script with sbatch. ``environment`` is the whole environment that sbatch sees."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        super().__init__(folder)

    @classmethod
    def affinity(cls) -> int:
        """submitit's preference for this executor. It asks for srun, which a login node need not have."""
        return 2

    def submit_script(self, script: Path, options: list[str], argument: int) -> str:
        """Call ``sbatch --parsable OPTIONS SCRIPT ARGUMENT`` and return the number of the job.

        Raises ``SbatchError`` if sbatch is absent, refuses, or its answer holds no job's number.
        """
        output = self._call(["sbatch", "--parsable", *options, str(script), str(argument)])
        job_id = parse_job_number(output)
        if job_id is None:
            message = f"sbatch accepted {script} but its answer names no job: {printable_text(output.strip())!r}"
            hint = "it is looked for by its name at the next submit"
            raise SbatchError(message, SbatchOutcome.UNCLEAR, hint=hint)
        return job_id

    def _call(self, command: list[str]) -> str:
        if shutil.which(command[0], path=self._environment.get("PATH")) is None:
            hint = "is this a login node of the cluster? `hpcbench doctor --cluster NAME` looks closer"
            raise SbatchError("sbatch is not on PATH", SbatchOutcome.REFUSED, hint=hint)
        wrapper = _parent_death_command()
        try:
            done = subprocess.run(
                [*wrapper, *command],
                env=self._environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SBATCH_TIMEOUT_S,
                check=False,
                preexec_fn=None if wrapper else _kill_with_parent,
            )
        except subprocess.TimeoutExpired as error:
            raise SbatchError(f"sbatch did not answer within {_SBATCH_TIMEOUT_S:g} s", SbatchOutcome.UNCLEAR) from error
        # A site's wrapper may fail after sbatch has queued the job.
        if done.returncode != 0 and parse_job_number(done.stdout) is None:
            message = printable_text((done.stderr or done.stdout).strip())
            outcome = classify_sbatch_error(message)
            verb = "could not send" if outcome in (SbatchOutcome.AWAY, SbatchOutcome.UNCLEAR) else "refused"
            hint = f"command: {shlex.join(command)}"
            raise SbatchError(f"sbatch {verb} {command[-2]}: {message}", outcome, hint=hint)
        return done.stdout


_JOB_NUMBER_LINE = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?")


def parse_job_number(output: str) -> str | None:
    """Return the job number in the last line of ``output`` that is an answer of sbatch; ``None`` without such a line.

    An answer is ``4711``, ``4711;cluster`` or ``Submitted batch job 4711``. Other lines, such as a site's banner, do
    not count.
    """
    matches = (_JOB_NUMBER_LINE.fullmatch(line.strip()) for line in reversed(output.splitlines()))
    return next((match[1] for match in matches if match), None)


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


def _kill_with_parent() -> None:
    """An sbatch whose submit was killed must not submit its job later, when another submit has done so."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def check_job_parameters(parameters: Mapping[str, Any], folder: Path) -> None:
    """Let submitit check a job's parameters. Raises ``SubmitError`` with its message."""
    try:
        SbatchExecutor(folder, os.environ).update_parameters(**parameters)
    except ValueError as error:
        raise SubmitError(f"submitit refuses the job's parameters: {error}") from error


SBATCH_SETTLE_S = 30.0
"""Seconds after its start in which an sbatch whose answer is unknown may still submit its job."""
_MIN_RETRY_PAUSE_S = 1.0
_MAX_RETRY_PAUSE_S = 30.0


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
        while True:
            self._lock.renew()
            batch = mark_attempted(batch)
            self.writer.record(batch, durable=True)
            try:
                job_id: str | None = self._executor.submit_script(script, options, batch.first)
            except SbatchError as error:
                if job_id := self._find_refused_job(batch, error):
                    self.writer.record(msgspec.structs.replace(batch, job_id=job_id))
                    return job_id
                if error.outcome is not SbatchOutcome.UNCLEAR:
                    self.writer.withdraw(batch)
                if error.outcome not in (SbatchOutcome.AWAY, SbatchOutcome.UNCLEAR):
                    raise
                retry.pause(error)
                is_unclear = error.outcome is SbatchOutcome.UNCLEAR
                job_id = self._find_after_no_answer(batch, retry, error) if is_unclear else None
            if job_id is not None:
                self.writer.record(msgspec.structs.replace(batch, job_id=job_id))
                return job_id

    def _find_refused_job(self, batch: JobBatch, error: SbatchError) -> str | None:
        """The job that a refusal is wrong about: a site's wrapper of sbatch may fail after the job was queued."""
        if error.outcome is SbatchOutcome.REFUSED:
            with contextlib.suppress(SubmitError):
                return find_job_by_name(batch.name, self._profile)
        return None

    def query(self, question: Callable[[], _T], notify: Notify) -> _T:
        """The answer to ``question``, which is asked again while the scheduler is away, for as long as an sbatch is."""
        retry = _Retry(self._profile.scheduler.retry_s, notify)
        while True:
            self._lock.renew()
            try:
                return question()
            except SubmitError as error:
                retry.pause(error)

    def _find_after_no_answer(self, batch: JobBatch, retry: _Retry, error: SbatchError) -> str | None:
        """The job that an sbatch without an answer may have submitted; ``None`` once it is certain that there is none.

        Without an answer of squeue nothing is certain, and nothing is submitted again.
        """
        while True:
            self._lock.renew()
            with contextlib.suppress(SubmitError):
                job_id = find_job_by_name(batch.name, self._profile)
                if job_id is not None or time.time() >= batch.tried_unix_s + SBATCH_SETTLE_S:
                    return job_id
            if time.monotonic() > retry.end_s:
                raise error
            time.sleep(_MIN_RETRY_PAUSE_S)

    def recover(self, batch: JobBatch, notify: Notify) -> None:
        """Record the outcome of a batch whose sender died before it could.

        Raises ``SubmitError`` if the scheduler does not answer.
        """
        job_id = self._find_job(batch)
        remaining_s = batch.tried_unix_s + SBATCH_SETTLE_S - time.time()
        if job_id is None and remaining_s > 0:
            notify(
                "an earlier submit ended while it was sending: "
                f"looking {remaining_s:.0f} s longer whether its job appears"
            )
            time.sleep(remaining_s)
            job_id = self._find_job(batch)
        if job_id is None:
            self.writer.withdraw(batch)
        else:
            self.writer.record(msgspec.structs.replace(batch, job_id=job_id))

    def _find_job(self, batch: JobBatch) -> str | None:
        """The number of a batch's job, from squeue or, once that has forgotten it, from its runs' start markers."""
        if job_id := find_job_by_name(batch.name, self._profile):
            return job_id
        for run_id in self._record.arrays[batch.array].runs_of(batch.first, batch.count):
            attempt = started_attempt(self._tree, run_id, self._folder.name)
            if attempt and attempt[1].job_id:
                return attempt[1].job_id.partition("_")[0]
        return None


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
