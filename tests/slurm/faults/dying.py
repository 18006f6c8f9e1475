"""``python -m tests.slurm.faults.dying STEP ARGUMENTS``: the command, killed with SIGKILL when it comes to a step."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from hpcbench.cli.main import entry_point
from hpcbench.fileio import write_atomic
from hpcbench.submit.sbatch import JobSubmitter

_SUBMIT = JobSubmitter.submit


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_all_but_the_record(path: Path, data: bytes) -> None:
    if path.name == "submission.json":
        die()
    write_atomic(path, data)


def submit_once(*arguments: Any) -> str:
    mock.patch("hpcbench.submit.sbatch.JobSubmitter.submit", die).start()
    return _SUBMIT(*arguments)


STEPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "before_the_record": ("hpcbench.fileio.write_atomic", write_all_but_the_record),
    "after_the_record": ("hpcbench.submit.submit.send_unsent", die),
    "before_sbatch": ("hpcbench.submit.sbatch.SbatchExecutor.submit_script", die),
    "between_two": ("hpcbench.submit.sbatch.JobSubmitter.submit", submit_once),
    "after_the_last": ("hpcbench.submit.send._SubmissionSender._finish", die),
}
"""Step to the function that is called there, and what takes its place."""

if __name__ == "__main__":
    mock.patch(*STEPS[sys.argv.pop(1)]).start()
    entry_point()
