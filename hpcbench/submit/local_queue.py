"""The job queue of a machine without a scheduler: ``python -m hpcbench.submit.local_queue SUBMISSION_FOLDER
WARNING_S``.

Runs start in order, one at a time: side by side they would disturb each other. Two submissions of one user share the
machine by ``machine_lock``."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil
import submitit
from submitit.local.local import LocalJob, start_controller

from hpcbench.submit.journal import JobBatch, JournalWriter, read_dropped_runs
from hpcbench.submit.machine_lock import take_machine
from hpcbench.submit.submission_record import JobArray, read_submission

_POLL_S = 0.1
_KILL_AFTER_S = 60.0


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
    """Runs the jobs of one submission, in order, whenever the machine is free."""

    def __init__(self, folder: Path, warning_s: float) -> None:
        record = read_submission(folder)
        assert record is not None, f"{folder} holds no submission"
        self.folder, self.record, self.warning_s = folder, record, warning_s
        # submitit replaces %j, %t and %a in paths; this process and its children are in the submission's folder.
        self.executor = LocalScriptExecutor(Path("/proc/self/cwd/jobs") if "%" in str(folder) else folder / "jobs")
        self.journal = JournalWriter(folder)
        self.stopping = False

    def work(self) -> None:
        """Run every job. After a signal to stop none is started; a running one gets SIGTERM."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        for array in self.record.arrays:
            for number in range(array.jobs):
                machine = self._wait_for_machine(array.runs_of(number)[0])
                if machine is None:
                    return
                with machine:
                    is_dropped = read_dropped_runs(self.folder).issuperset(array.runs_of(number))
                    if not is_dropped:
                        self._run(array, number)
                if not is_dropped:
                    time.sleep(2 * _POLL_S)  # another queue that waits gets its turn

    def _wait_for_machine(self, run_id: str) -> IO[bytes] | None:
        while not self.stopping:
            if (machine := take_machine(self.folder, run_id)) is not None:
                return machine
            time.sleep(_POLL_S)
        return None

    def _run(self, array: JobArray, number: int) -> None:
        script = self.folder / f"{array.number}.sh"
        job = self.executor.submit_script(script, number, time_limit_s=array.job_limit_s, warning_s=self.warning_s)
        self.journal.record(JobBatch(array=array.number, first=number, count=1, job_id=str(job.job_id)))
        stopped_s: float | None = None
        while not job.done():
            if self.stopping and stopped_s is None:
                stopped_s = time.monotonic()
                job.cancel(check=False)
            if stopped_s is not None and time.monotonic() - stopped_s > _KILL_AFTER_S:
                with contextlib.suppress(psutil.Error):
                    controller = psutil.Process(int(job.job_id))
                    for process in [*controller.children(recursive=True), controller]:
                        process.kill()
            time.sleep(_POLL_S)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.stopping = True


if __name__ == "__main__":
    LocalQueue(Path(sys.argv[1]), float(sys.argv[2])).work()
