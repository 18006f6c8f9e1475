"""Real launches of the worker, as a job script or a person would start it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.forking import ForkedProgram

ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_S = 120
_LAUNCHERS = ("SLURM", "TORCHELASTIC", "OMPI", "PMI", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "MASTER_", "GLOO_")

MODULE = ["-m", "hpcbench.worker"]
TORCHRUN = ["-m", "torch.distributed.run"]
HOOKED = [str(ROOT / "tests" / "distributed" / "hooked.py")]


def environment(**more: str) -> dict[str, str]:
    """This process's variables without those of any launcher, one thread a rank.

    Compiled modules may be written: a quarter of a second for each process that comes after.
    """
    left_out = (*_LAUNCHERS, "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


class Launch:
    """One or more processes of one run; what they print is kept in ``logs``.

    ``forks``: processes are forked from one that has imported torch, which is most of what a short run costs; torchrun
    and its ranks are started as ever. Not for tests of an interpreter's own start: of variables, cores or imports.
    """

    def __init__(self, folder: Path, forks: bool = False) -> None:
        self.folder = folder
        self.forks = forks
        self.processes: list[subprocess.Popen[bytes] | ForkedProgram] = []

    def start(self, words: list[str], **variables: str) -> subprocess.Popen[bytes] | ForkedProgram:
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        if self.forks and TORCHRUN[1] not in words:
            forked = ForkedProgram(words, environment(**variables), self.folder, log)
            self.processes.append(forked)
            return forked
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, *words], env=environment(**variables), cwd=self.folder, stdout=file, stderr=file
            )
        self.processes.append(process)
        return process

    def lone(self, tasks: Path, index: int = 0, program: list[str] = MODULE, **variables: str) -> Launch:
        self.start([*program, "--tasks", str(tasks), "--index", str(index)], **variables)
        return self

    def torchrun(self, ranks: int, tasks: Path, program: list[str] = MODULE, **more: Any) -> Launch:
        return self._launcher([*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), *program], tasks, **more)

    def fork(self, ranks: int, tasks: Path, program: list[str] = MODULE, **more: Any) -> Launch:
        return self._launcher([*program, "fork", "--ranks", str(ranks)], tasks, **more)

    def _launcher(
        self, words: list[str], tasks: Path, index: int = 0, attempt: int | None = None, **variables: str
    ) -> Launch:
        words += ["--tasks", str(tasks), "--index", str(index)]
        self.start(words if attempt is None else [*words, "--attempt", str(attempt)], **variables)
        return self

    def by_hand(
        self, ranks: int, tasks: Path, program: list[str] = MODULE, only: range | None = None, **variables: str
    ) -> Launch:
        """Every rank started by itself, with nothing that watches over them; rank 0 begins the attempt."""
        for rank in only or range(ranks):
            given = {"PMI_RANK": str(rank), "PMI_SIZE": str(ranks), "PMI_JOBID": f"job-{os.getpid()}", **variables}
            self.start([*program, "--tasks", str(tasks), "--index", "0"], **given)
        return self

    def wait(self) -> list[int]:
        """Exit codes; a process that does not end fails the test with all logs."""
        try:
            return [process.wait(WAIT_S) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"a process did not end\n{self.logs()}") from error
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("log-*")))


def worker(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A verb of the worker, run to its end."""
    return subprocess.run(
        [sys.executable, *MODULE, *words], env=environment(**variables), capture_output=True, text=True,
        timeout=WAIT_S, check=False,
    )  # fmt: skip


def wait_until(true: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < give_up, f"waited {WAIT_S} s for {what}"
        time.sleep(0.05)
