"""Jobs on this machine without a scheduler: the queue process of a submission, its record ``queue.json`` and its state.

submitit is imported on use: it is for jobs that run alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import psutil

from hpcbench.fileio import share_with_group, shared_umask, write_atomic
from hpcbench.identity import find_process
from hpcbench.results.decode import read_record
from hpcbench.submit.lock import exclusive_lock
from hpcbench.submit.machine_lock import MachineHolder, machine_holder
from hpcbench.submit.scheduler import JobStatus, Notify, QueueTable, Scheduler, SendOutcome, command_environment
from hpcbench.submit.submission_record import Submission, SubmittedRun

if TYPE_CHECKING:
    from hpcbench.results.attempts import AttemptStart
    from hpcbench.results.results_tree import ClusterTree


class LocalScheduler(Scheduler):
    """Each submission has a queue process of its own (``hpcbench.submit.local_queue``); a job id is a process id."""

    poll_s: ClassVar[float] = 1.0
    queue_log: ClassVar[str | None] = "queue.log"

    def check(self) -> None:
        """This machine takes jobs without an account."""

    def node_names(self, partition: str | None) -> list[str]:
        """This machine is the one node."""
        return [socket.gethostname()]

    def submit(self, folder: Path, record: Submission, tree: ClusterTree, notify: Notify) -> SendOutcome:
        """Start the submission's queue process, unless that was done before."""
        if not queue_was_started(folder):
            with exclusive_lock(folder / ".sending"):
                if not queue_was_started(folder):
                    start_local_queue(folder, command_environment(self.profile), self.profile.scheduler.warning_s)
        return SendOutcome()

    def state(self, runs: Mapping[str, SubmittedRun], queue: QueueTable | None = None) -> Mapping[str, JobStatus]:
        folders = {run.folder for run in runs.values()}
        alive = {folder: is_queue_alive(folder) for folder in folders if queue_was_started(folder)}
        holder = machine_holder()
        pending = {folder: _pending_reason(folder, holder) for folder, is_alive in alive.items() if is_alive}
        return {run_id: _job_status(run, alive.get(run.folder), pending) for run_id, run in runs.items()}

    def attempts_at_work(self, starts: Mapping[str, tuple[AttemptStart, str]]) -> dict[str, str]:
        return {
            run_id: f"attempt {start.attempt} is at work in process {start.process.pid}, without its queue"
            for run_id, (start, _) in starts.items()
            if start.process is not None and find_process(start.process.pid) == start.process
        }

    def cancel(self, whole: Sequence[SubmittedRun], parts: Sequence[SubmittedRun]) -> dict[str, str]:
        from hpcbench.submit.local_queue import LocalScriptJob, terminate_worker

        for run in whole:
            assert run.job_id is not None
            LocalScriptJob(folder="/", job_id=run.job_id).cancel(check=False)
        for run in parts:
            terminate_worker(int(run.job_id or 0), run.index)
        return {}

    @classmethod
    def job_log(cls, run: SubmittedRun) -> Path | None:
        return run.folder / "jobs" / f"{run.job_id}_0_log.out" if run.job_id else None


def _job_status(run: SubmittedRun, is_alive: bool | None, pending: Mapping[Path, str]) -> JobStatus:
    """The status of a run, which has a job id once it has begun.

    ``is_alive``: whether its queue is; ``None`` if it was never started. ``pending``: why a run waits, by folder.
    """
    if is_alive is None:
        return JobStatus("waiting", "not started yet; the next submit starts it")
    if is_alive:
        return JobStatus("running", "") if run.job_id else JobStatus("pending", pending[run.folder])
    return (
        JobStatus("lost", "the local runner exited")
        if run.job_id
        else JobStatus("planned", "the local runner exited before this run began")
    )


def _pending_reason(folder: Path, holder: MachineHolder | None) -> str:
    """Why the runs of a live queue that have not begun wait."""
    record = read_record(folder / "queue.json", LocalQueueRecord)
    host = os.uname().nodename if record is None else record.host
    if holder is None or host != os.uname().nodename:
        return f"waits for its turn on {host}"
    if holder.folder == str(folder):
        return f"waits for run {holder.run_id} of its sweep"
    return (
        f"waits for run {holder.run_id} of {holder.folder} (process {holder.process.pid}): one at a time on a machine"
    )


class LocalQueueRecord(msgspec.Struct):
    """``queue.json``: the process that runs a submission's jobs."""

    pid: int
    created: float
    warning_s: float
    host: str = ""


def start_local_queue(folder: Path, environment: dict[str, str], warning_s: float) -> None:
    """Start the queue of ``folder`` as a process of its own, which outlives this one."""
    environment = environment | {"PYTHONPATH": _path_for_other_folders(environment.get("PYTHONPATH", ""))}
    with open(folder / "queue.log", "ab") as log:
        share_with_group(folder / "queue.log")
        process = subprocess.Popen(
            [sys.executable, "-m", "hpcbench.submit.local_queue", str(folder), str(warning_s)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True,
            umask=shared_umask(folder),
        )  # fmt: skip
    record = LocalQueueRecord(process.pid, psutil.Process(process.pid).create_time(), warning_s, os.uname().nodename)
    write_atomic(folder / "queue.json", msgspec.json.encode(record) + b"\n")


def _path_for_other_folders(python_path: str) -> str:
    """Return the PYTHONPATH with which processes in any folder find what this one has imported."""
    entries = [str(Path(entry).absolute()) for entry in python_path.split(os.pathsep) if entry]
    root = str(Path(__file__).resolve().parents[2])
    # Installed packages belong to one interpreter, and the jobs may have another.
    is_needed = root not in entries and not root.endswith("-packages")
    return os.pathsep.join([root, *entries] if is_needed else entries)


def queue_was_started(folder: Path) -> bool:
    return (folder / "queue.json").exists()


def is_queue_alive(folder: Path) -> bool:
    """Whether a queue runs the jobs of ``folder``. The processes of another machine that shares the tree cannot be
    seen from here: its queue counts as alive.
    """
    record = read_record(folder / "queue.json", LocalQueueRecord)
    return record is not None and (record.host != os.uname().nodename or queue_process(folder) is not None)


def queue_process(folder: Path) -> psutil.Process | None:
    """Return the process on this machine that runs the jobs of ``folder``; ``None`` if it is not alive."""
    record = read_record(folder / "queue.json", LocalQueueRecord)
    if record is None or record.host != os.uname().nodename:
        return None
    try:
        process = psutil.Process(record.pid)
        alive = abs(process.create_time() - record.created) < 1 and process.status() != psutil.STATUS_ZOMBIE
        # Another user may have written the file: only a queue of this very folder is ever stopped.
        alive = alive and process.cmdline()[1:4] == ["-m", "hpcbench.submit.local_queue", str(folder)]
    except psutil.Error:
        return None
    return process if alive else None
