"""The job queue of a machine without a scheduler: ``python -m hpcbench.submit.local_queue SUBMISSION_FOLDER
WARNING_S``.

Runs start in order, one at a time. A submission with ``max_running_jobs`` above 1 starts as many at once, as far as
there are cores. Cores are file locks in the temporary folder, so that two submissions of one user share the machine and
a dead queue releases its cores. A run alone locks all of them, oversubscribed where it has more ranks."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shlex
import signal
import stat
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil
import submitit
from submitit.local.local import LocalJob, start_controller

from hpcbench.errors import StorageError
from hpcbench.submit.journal import JobBatch, JournalWriter, read_dropped_runs
from hpcbench.submit.plan import available_cores
from hpcbench.submit.submission_record import JobArray, read_submission

_POLL_S = 0.1
_KILL_AFTER_S = 60.0


class CoreLocks:
    """The cores of this machine as locks that this user's queues share."""

    def __init__(self, count: int, folder: Path | None = None) -> None:
        self.count = count
        self._folder = folder or Path(tempfile.gettempdir()) / f"hpcbench-cores-{os.getuid()}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        state = self._folder.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
            raise StorageError(f"{self._folder} is not a folder of this user", hint="remove it, or set TMPDIR")

    def take(self, wanted: int) -> list[IO[bytes]] | None:
        """``wanted`` cores, or all if there are fewer; ``None`` if they are not free now."""
        needed = min(max(1, wanted), self.count)
        held: list[IO[bytes]] = []
        for core in range(self.count):
            file: IO[bytes] = open(self._folder / str(core), "ab")  # noqa: SIM115 - held until the run has ended
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                continue
            held.append(file)
            if len(held) == needed:
                return held
        _release_cores(held)
        return None


def _release_cores(cores: list[IO[bytes]]) -> None:
    for file in cores:
        file.close()


class LocalScriptJob(LocalJob[Any]):
    """A script that runs on this machine; ``state`` and ``cancel`` work from any process of this machine."""

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """The state: RUNNING, FINISHED, INTERRUPTED, or UNKNOWN once another process has reaped it."""
        if self._process is not None:
            return dict(super().get_info(mode))
        return {"jobState": "RUNNING" if _is_submitit_controller(int(self.job_id)) else "UNKNOWN"}

    def cancel(self, check: bool = True) -> None:
        """Send SIGTERM to the script; it passes the signal on, and its ranks write their results."""
        if self._process is not None or _is_submitit_controller(int(self.job_id)):
            try:
                os.kill(int(self.job_id), signal.SIGTERM)
            except ProcessLookupError:
                if check:
                    raise


class LocalScriptExecutor(submitit.LocalExecutor):
    """Runs ``bash <script> <index>`` under submitit's controller, which enforces the time limit."""

    def submit_script(self, script: Path, index: int, *, time_limit_s: float, warning_s: float) -> LocalScriptJob:
        """Start one run at once. The script gets a signal ``warning_s`` before the limit."""
        process = start_controller(
            folder=self.folder,
            command=shlex.join([*_keep_visible_devices(), "bash", str(script), str(index)]),
            timeout_min=time_limit_s / 60,
            signal_delay_s=min(int(warning_s), int(time_limit_s / 2)),
            stderr_to_stdout=True,
        )
        return LocalScriptJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


def _keep_visible_devices() -> list[str]:
    """submitit's controller hides all devices that it does not assign; a run sees those that its submitter saw."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ["env", "-u", "CUDA_VISIBLE_DEVICES"] if visible is None else ["env", f"CUDA_VISIBLE_DEVICES={visible}"]


def _is_submitit_controller(pid: int) -> bool:
    """Whether ``pid`` still is one of submitit's controllers; the system reuses process ids."""
    try:
        return "submitit.local._local" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def terminate_worker(job: int, index: int) -> None:
    """Send SIGTERM to the ranks of the run ``index`` of its task file, if the job (a process id) runs it now."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(job).children(recursive=True):
            words = process.cmdline()
            options = dict(itertools.pairwise(words))
            if "hpcbench.worker" in words and options.get("--index") == str(index):
                process.terminate()


class LocalQueue:
    """Runs the jobs of one submission, in order, as cores become free."""

    def __init__(self, folder: Path, warning_s: float) -> None:
        record = read_submission(folder)
        assert record is not None, f"{folder} holds no submission"
        self.folder = folder
        self.record = record
        self.warning_s = warning_s
        # submitit replaces %j, %t and %a in paths; this process and its children are in the submission's folder.
        self.executor = LocalScriptExecutor(Path("/proc/self/cwd/jobs") if "%" in str(folder) else folder / "jobs")
        self.cores = CoreLocks(available_cores())
        self.journal = JournalWriter(folder)
        self.running: list[tuple[LocalScriptJob, list[IO[bytes]]]] = []
        self.stopping = False

    def work(self) -> None:
        """Start every run and wait for all. After a signal to stop none is started; running ones get SIGTERM."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        for array in self.record.arrays:
            for number in range(array.jobs):
                cores = self._wait_for_cores(array)
                if cores is None:
                    break
                if read_dropped_runs(self.folder).issuperset(array.runs_of(number)):
                    _release_cores(cores)
                else:
                    self._start(array, number, cores)
        self._finish()

    def _wait_for_cores(self, array: JobArray) -> list[IO[bytes]] | None:
        limit = self.record.max_running_jobs
        while not self.stopping:
            self._reap()
            is_full = limit is not None and len(self.running) >= limit
            cores = None if is_full else self.cores.take(array.cores_per_run)
            if cores is not None:
                return cores
            time.sleep(_POLL_S)
        return None

    def _start(self, array: JobArray, number: int, cores: list[IO[bytes]]) -> None:
        job = self.executor.submit_script(
            self.folder / f"{array.number}.sh",
            number,
            time_limit_s=array.job_limit_s,
            warning_s=self.warning_s,
        )
        self.running.append((job, cores))
        self.journal.record(JobBatch(array=array.number, first=number, count=1, job_id=str(job.job_id)))

    def _reap(self) -> None:
        for job, cores in list(self.running):
            if job.done():
                _release_cores(cores)
                self.running.remove((job, cores))

    def _finish(self) -> None:
        stopped_s: float | None = None
        while self.running:
            if self.stopping and stopped_s is None:
                stopped_s = time.monotonic()
                for job, _ in self.running:
                    job.cancel(check=False)
            if stopped_s is not None and time.monotonic() - stopped_s > _KILL_AFTER_S:
                self._kill()
            self._reap()
            time.sleep(_POLL_S)

    def _kill(self) -> None:
        for job, _ in self.running:
            with contextlib.suppress(psutil.Error):
                controller = psutil.Process(int(job.job_id))
                for process in [*controller.children(recursive=True), controller]:
                    process.kill()

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.stopping = True


if __name__ == "__main__":
    LocalQueue(Path(sys.argv[1]), float(sys.argv[2])).work()
