"""Programs in processes that have imported torch already: forked by multiprocessing's fork server."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

IMPORTED = [
    "__main__", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim", "hpcbench.worker.measured_run",
    "tests.distributed.cases",
]  # fmt: skip
"""Imported once, by a process with a single thread from which ranks are forked: four processor seconds less for each."""


class ForkedProgram:
    """A Python program that runs as ``subprocess.Popen`` would run it, but for its imports, which are done.

    Args:
        words: arguments of the interpreter: ``-m`` and a module, or a file, and the program's own.
        variables: its environment.
        folder: its working folder.
        log: the file that gets what it prints.
    """

    def __init__(self, words: list[str], variables: dict[str, str], folder: Path, log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._process = context.Process(target=_run_program, args=(words, variables, str(folder), str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Return the exit code, -N of a process that signal N has ended, or None of one that runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raises ``subprocess.TimeoutExpired``."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return code

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _run_program(words: list[str], variables: dict[str, str], folder: str, log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    # An OpenMP that is loaded does not read its variable again.
    import torch

    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
