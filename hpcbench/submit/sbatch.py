"""Submission of a rendered script with sbatch, exactly once, through submitit; the only module that uses submitit's
private methods.

Stock submitit writes the script itself, pickles a function, and builds a plain ``SlurmExecutor`` for arrays, which
loses
the overrides of a subclass. Here the script exists already, for one run and for an array alike; submitit checks the
parameters and parses the job id, and its ``Job`` objects give state and cancel. Each call is noted in the journal
before
and after, and a call without an answer is resolved by the name of its job."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import submitit
from submitit.core.utils import FailedSubmissionError
from submitit.local.local import LocalJob, start_controller

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.fileio import printable_text
from hpcbench.results.attempts import latest_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit import slurm_queue
from hpcbench.submit.journal import JobBatch, JournalWriter, mark_attempted
from hpcbench.submit.lock import LeaseLock
from hpcbench.submit.slurm_queue import SbatchOutcome, classify_sbatch_error
from hpcbench.submit.submission_record import Submission

_PR_SET_PDEATHSIG = 1
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
"""Looked up once and not in each child; Linux alone has it."""


class SbatchExecutor(submitit.SlurmExecutor):
    """Submits a script with sbatch. ``environment`` is the whole environment that sbatch sees."""

    def __init__(self, folder: Path, environment: Mapping[str, str], timeout_s: float = 60.0) -> None:
        self._environment = dict(environment)
        self._timeout_s = timeout_s
        super().__init__(folder)

    @classmethod
    def affinity(cls) -> int:
        """A login node needs sbatch; whether it has srun says nothing."""
        return 2

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        """The command for a script whose options and argument were given by ``submit_script``."""
        options, argument = self._call_with
        return ["sbatch", *options, str(submission_file_path), str(argument)]

    def submit_script(self, script: Path, options: list[str], argument: int) -> str:
        """Call ``sbatch OPTIONS SCRIPT ARGUMENT`` and return the number of the job.

        Raises ``SbatchError`` where sbatch is absent, refuses, or says nothing that holds a job's number.
        """
        self._call_with = (options, argument)
        output = self._call(self._make_submission_command(script))
        try:
            return str(self._get_job_id_from_submission_command(output))
        except FailedSubmissionError:
            message = f"sbatch accepted {script} but its answer names no job: {printable_text(output.strip())!r}"
            raise SbatchError(
                message, SbatchOutcome.UNCLEAR, hint="it is looked for by its name at the next submit"
            ) from None

    def _call(self, command: list[str]) -> str:
        if shutil.which(command[0], path=self._environment.get("PATH")) is None:
            hint = "is this a login node of the cluster? `hpcbench doctor --cluster NAME` looks closer"
            raise SbatchError("sbatch is not on PATH", SbatchOutcome.REFUSED, hint=hint)
        tied = _parent_death_command()
        try:
            done = subprocess.run(
                [*tied, *command],
                env=self._environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                check=False,
                preexec_fn=None if tied else _kill_with_parent,
            )
        except subprocess.TimeoutExpired as error:
            raise SbatchError(f"sbatch did not answer within {self._timeout_s:g} s", SbatchOutcome.UNCLEAR) from error
        if done.returncode != 0:
            said = printable_text((done.stderr or done.stdout).strip())
            answer = classify_sbatch_error(said)
            did = "could not send" if answer in (SbatchOutcome.AWAY, SbatchOutcome.UNCLEAR) else "refused"
            raise SbatchError(f"sbatch {did} {command[-2]}: {said}", answer, hint=f"command: {shlex.join(command)}")
        return done.stdout


class SbatchError(SubmitError):
    """sbatch did not take a job; ``answer`` says what kind of refusal it is."""

    def __init__(self, message: str, answer: SbatchOutcome, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.answer = answer


@functools.cache
def _parent_death_command() -> tuple[str, ...]:
    """Words before a command that end it with this process, where this system has such a command.

    Python itself can only do so in a copy of this process, which takes the longer the more runs it holds.
    """
    words = ("setpriv", "--pdeathsig", "KILL")
    try:
        works = subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        works = False
    return words if works else ()


def _kill_with_parent() -> None:
    """An sbatch whose submit was killed must not send its job later, when somebody has sent it again."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def check_job_parameters(parameters: Mapping[str, Any], folder: Path) -> None:
    """Let submitit check what it knows of a job's parameters. Raises ``SubmitError`` with its words."""
    try:
        executor = SbatchExecutor(folder, os.environ)
        executor.update_parameters(**parameters)
    except (ValueError, TypeError) as error:
        raise SubmitError(f"submitit refuses the job's parameters: {error}") from error


class LocalScriptJob(LocalJob[Any]):
    """A script that runs on this machine; its state and cancel work from any process of this machine."""

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """The state: RUNNING, FINISHED, INTERRUPTED, or UNKNOWN once another process has reaped it."""
        if self._process is not None:
            return dict(super().get_info(mode))
        return {"jobState": "RUNNING" if _is_submitit_controller(int(self.job_id)) else "UNKNOWN"}

    def cancel(self, check: bool = True) -> None:
        """Tell the script to stop; it passes that on, and its ranks leave what they measured."""
        if self._process is not None or _is_submitit_controller(int(self.job_id)):
            try:
                os.kill(int(self.job_id), signal.SIGTERM)
            except ProcessLookupError:
                if check:
                    raise


class LocalScriptExecutor(submitit.LocalExecutor):
    """Runs ``bash <script> <index>`` under submitit's controller, which enforces the time limit."""

    def submit_script(self, script: Path, index: int, *, time_limit_s: float, warning_s: float) -> LocalScriptJob:
        """Start one run at once. ``warning_s`` before the limit the script is told."""
        process = start_controller(
            folder=self.folder,
            command=shlex.join([*_keep_visible_devices(), "bash", str(script), str(index)]),
            timeout_min=time_limit_s / 60,
            signal_delay_s=min(int(warning_s), int(time_limit_s / 2)),
            stderr_to_stdout=True,
        )
        return LocalScriptJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


def _keep_visible_devices() -> list[str]:
    """submitit's controller hides every device that it was not told of; a run sees those that its submitter saw."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ["env", "-u", "CUDA_VISIBLE_DEVICES"] if visible is None else ["env", f"CUDA_VISIBLE_DEVICES={visible}"]


def _is_submitit_controller(pid: int) -> bool:
    """Whether ``pid`` still is one of submitit's controllers; process ids are used again."""
    import psutil

    try:
        return "submitit.local._local" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


SBATCH_SETTLE_S = 30.0
"""How long after it was begun an sbatch whose answer nobody heard may still turn out to have sent its job."""
_MIN_RETRY_PAUSE_S = 1.0
_MAX_RETRY_PAUSE_S = 30.0

Notify = Callable[[str], None]


class JobSubmitter:
    """Where the chunks of one submission are offered to the scheduler, by the holder of the submission's lock."""

    def __init__(
        self, folder: Path, record: Submission, profile: ClusterProfile, tree: ClusterTree, lock: LeaseLock
    ) -> None:
        self.writer = JournalWriter(folder)
        self._folder, self._record, self._profile, self._tree, self._lock = folder, record, profile, tree, lock
        self._executor = SbatchExecutor(folder, slurm_queue.slurm_environment(profile))

    def offer(self, chunk: JobBatch, options: list[str], patience_s: float, tell: Notify) -> str:
        """The number under which the scheduler has taken ``chunk``.

        A scheduler that is away or does not answer is asked again for ``patience_s``, with growing pauses.
        Raises ``SbatchError``; after an ``UNCLEAR`` answer the chunk stays open in the journal, after any other it is
        withdrawn.
        """
        pause_s, give_up = _MIN_RETRY_PAUSE_S, time.monotonic() + patience_s
        script = self._folder / f"{chunk.array}.sh"
        while True:
            self._lock.renew()
            chunk = mark_attempted(chunk)
            self.writer.note(chunk, durable=True)
            try:
                job_id: str | None = self._executor.submit_script(script, options, chunk.first)
            except SbatchError as error:
                patient = (
                    error.answer in (SbatchOutcome.AWAY, SbatchOutcome.UNCLEAR)
                    and time.monotonic() + pause_s <= give_up
                )
                if error.answer is not SbatchOutcome.UNCLEAR:
                    self.writer.withdraw(chunk)
                if not patient:
                    raise
                tell(f"{error.message.splitlines()[-1]}: asking again")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_RETRY_PAUSE_S)
                job_id = self._settled(chunk, give_up, error) if error.answer is SbatchOutcome.UNCLEAR else None
            if job_id is not None:
                self.writer.note(msgspec.structs.replace(chunk, job_id=job_id))
                return job_id

    def ask(self, question: Callable[[], int], tell: Notify) -> int:
        """The answer to ``question``, which is put to the scheduler again while it is away, as long as an sbatch is."""
        pause_s, give_up = _MIN_RETRY_PAUSE_S, time.monotonic() + self._profile.scheduler.retry_s
        while True:
            self._lock.renew()
            try:
                return question()
            except SubmitError as error:
                if time.monotonic() + pause_s > give_up:
                    raise
                tell(f"{error.message.splitlines()[-1]}: asking again")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_PAUSE_S)

    def _settled(self, chunk: JobBatch, give_up: float, error: SbatchError) -> str | None:
        """The job that an sbatch without an answer may have sent; ``None`` once it is sure that there is none."""
        while True:
            self._lock.renew()
            try:
                job_id = slurm_queue.find_job_by_name(chunk.name, self._profile)
                if job_id is not None or time.time() >= chunk.tried_unix_s + SBATCH_SETTLE_S:
                    return job_id
            except SubmitError:
                pass  # Who cannot ask does not know: nothing is sent again.
            if time.monotonic() > give_up:
                raise error
            time.sleep(_MIN_RETRY_PAUSE_S)

    def recover(self, chunk: JobBatch, tell: Notify) -> None:
        """Find out what became of a chunk whose sender did not live to note the answer.

        Raises ``SubmitError`` where the scheduler cannot be asked.
        """
        job_id = self._found(chunk)
        rest_s = chunk.tried_unix_s + SBATCH_SETTLE_S - time.time()
        if job_id is None and rest_s > 0:
            tell(f"an earlier submit ended while it was sending: looking {rest_s:.0f} s longer whether its job appears")
            time.sleep(rest_s)
            job_id = self._found(chunk)
        if job_id is None:
            self.writer.withdraw(chunk)
        else:
            self.writer.note(msgspec.structs.replace(chunk, job_id=job_id))

    def _found(self, chunk: JobBatch) -> str | None:
        return slurm_queue.find_job_by_name(chunk.name, self._profile) or self._job_that_ran(chunk)

    def _job_that_ran(self, chunk: JobBatch) -> str | None:
        """The number of a job that squeue has forgotten, from the start markers of its runs."""
        array = self._record.arrays[chunk.array]
        for run_id in array.run_ids[chunk.first * array.pack : (chunk.first + chunk.count) * array.pack]:
            attempt = latest_attempt(self._tree.run_folder(run_id))
            marker = attempt.read_start() if attempt else None
            if marker is not None and marker.job_id and marker.belongs_to(self._folder.name):
                return marker.job_id.partition("_")[0]
        return None
