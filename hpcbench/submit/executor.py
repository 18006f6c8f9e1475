"""submitit, made to submit our rendered scripts. The only file that touches its private methods.

Stock submitit would write the script itself, pickle a function, and build a plain ``SlurmExecutor`` for arrays, which
forgets what a subclass overrides. Here the script is a file that exists already, for one run and for an array alike;
submitit checks the parameters, parses the job's id, and its ``Job`` objects give state and cancel.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedSubmissionError
from submitit.local.local import LocalJob, start_controller

from hpcbench.errors import SubmitError
from hpcbench.fileio import printable
from hpcbench.submit.answers import Answer, classify

_PR_SET_PDEATHSIG = 1
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
"""Looked up once and not in each child; Linux alone has it."""


class ScriptExecutor(submitit.SlurmExecutor):
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
            message = f"sbatch accepted {script} but its answer names no job: {printable(output.strip())!r}"
            raise SbatchError(message, Answer.UNCLEAR, hint="it is looked for by its name at the next submit") from None

    def _call(self, command: list[str]) -> str:
        if shutil.which(command[0], path=self._environment.get("PATH")) is None:
            hint = "is this a login node of the cluster? `hpcbench doctor --cluster NAME` looks closer"
            raise SbatchError("sbatch is not on PATH", Answer.REFUSED, hint=hint)
        tied = _tied_to_parent()
        try:
            done = subprocess.run(
                [*tied, *command],
                env=self._environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                check=False,
                preexec_fn=None if tied else _die_with_parent,
            )
        except subprocess.TimeoutExpired as error:
            raise SbatchError(f"sbatch did not answer within {self._timeout_s:g} s", Answer.UNCLEAR) from error
        if done.returncode != 0:
            said = printable((done.stderr or done.stdout).strip())
            answer = classify(said)
            did = "could not send" if answer in (Answer.AWAY, Answer.UNCLEAR) else "refused"
            raise SbatchError(f"sbatch {did} {command[-2]}: {said}", answer, hint=f"command: {shlex.join(command)}")
        return done.stdout


class SbatchError(SubmitError):
    """sbatch did not take a job; ``answer`` says what kind of refusal it is."""

    def __init__(self, message: str, answer: Answer, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.answer = answer


@functools.cache
def _tied_to_parent() -> tuple[str, ...]:
    """Words before a command that end it with this process, where this system has such a command.

    Python itself can only do so in a copy of this process, which takes the longer the more runs it holds.
    """
    words = ("setpriv", "--pdeathsig", "KILL")
    try:
        works = subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        works = False
    return words if works else ()


def _die_with_parent() -> None:
    """An sbatch whose submit was killed must not send its job later, when somebody has sent it again."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def check_parameters(parameters: Mapping[str, Any], folder: Path) -> None:
    """Let submitit check what it knows of a job's parameters. Raises ``SubmitError`` with its words."""
    try:
        executor = ScriptExecutor(folder, os.environ)
        executor.update_parameters(**parameters)
    except (ValueError, TypeError) as error:
        raise SubmitError(f"submitit refuses the job's parameters: {error}") from error


class LocalScriptJob(LocalJob[Any]):
    """A script that runs on this machine; its state and cancel work from any process of this machine."""

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """The state: RUNNING, FINISHED, INTERRUPTED, or UNKNOWN once another process has reaped it."""
        if self._process is not None:
            return dict(super().get_info(mode))
        return {"jobState": "RUNNING" if _is_controller(int(self.job_id)) else "UNKNOWN"}

    def cancel(self, check: bool = True) -> None:
        """Tell the script to stop; it passes that on, and its ranks leave what they measured."""
        if self._process is not None or _is_controller(int(self.job_id)):
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
            command=shlex.join([*_devices_as_they_are(), "bash", str(script), str(index)]),
            timeout_min=time_limit_s / 60,
            signal_delay_s=min(int(warning_s), int(time_limit_s / 2)),
            stderr_to_stdout=True,
        )
        return LocalScriptJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


def _devices_as_they_are() -> list[str]:
    """submitit's controller hides every device that it was not told of; a run sees those that its submitter saw."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ["env", "-u", "CUDA_VISIBLE_DEVICES"] if visible is None else ["env", f"CUDA_VISIBLE_DEVICES={visible}"]


def _is_controller(pid: int) -> bool:
    """Whether ``pid`` still is one of submitit's controllers; process ids are used again."""
    import psutil

    try:
        return "submitit.local._local" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
