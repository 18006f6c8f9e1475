"""An attempt begins only once every other attempt of its run has ended for certain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcbench.config.run_spec import run_id
from hpcbench.errors import EXIT_NOTHING_TO_DO, StorageError
from hpcbench.identity import ProcessId, process_namespace
from hpcbench.results.attempts import Attempt, attempt_numbers, begin_attempt
from hpcbench.worker.begin import begin
from hpcbench.worker.other_attempts import AttemptAtWork, OtherAttempts
from hpcbench.worker.summary import summarize_run
from tests.worker.helpers import failure, make_header, make_spec, make_task, start_attempt, tree_of, write_tasks

SPEC = make_spec()
TABLE = "JOBID|STATE|USER\n"
OTHER = "437_3"


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a squeue that prints ``output`` and ends with ``code``; it notes its calls in the file that is returned."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(output: str = TABLE, code: int = 0, complaint: str = "", private: str = "none") -> Path:
        calls = tmp_path / "calls"
        for name, text in (("squeue", output), ("scontrol", f"PrivateData             = {private}\n")):
            (folder / f"{name}.out").write_text(text)
            script = f'#!/bin/bash\necho "{name} $*" >> {calls}\ncat {folder}/{name}.out\n'
            if name == "squeue":
                script += f'echo "{complaint}" >&2\nexit {code}\n'
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
        return calls

    return make


def is_at_work(folder: Path, **marker: object) -> bool:
    attempt = start_attempt(folder, SPEC, **marker)
    try:
        OtherAttempts(0).check(attempt)
    except AttemptAtWork:
        return True
    return False


@pytest.mark.parametrize(
    ("output", "code", "complaint", "at_work"),
    [
        (f"{TABLE}437_3|RUNNING|ada\n", 0, "", True),
        (f"{TABLE}437_[3]|PENDING|ada\n", 0, "", True),
        (f"{TABLE}437_3|COMPLETING|ada\n", 0, "", True),
        (f"{TABLE}437_3|SUSPENDED|ada\n", 0, "", True),
        (f"{TABLE}437_3|REQUEUE_HOLD|ada\n", 0, "", True),
        (f"{TABLE}437_3|A_STATE_OF_TOMORROW|ada\n", 0, "", True),
        (f"{TABLE}437_3|COMPLETED|ada\n", 0, "", False),
        (f"{TABLE}437_3|NODE_FAIL|ada\n", 0, "", False),
        (f"{TABLE}437_3|CANCELLED|ada\n", 0, "", False),
        (TABLE, 0, "", False),
        ("", 1, "slurm_load_jobs error: Invalid job id specified", False),
        ("", 0, "", True),
        ("<html>502 Bad gateway</html>\n", 0, "", True),
        ("", 1, "slurm_load_jobs error: Unable to contact slurm controller", True),
    ],
)
def test_the_scheduler_has_the_last_word_about_the_other_job(
    output: str, code: int, complaint: str, at_work: bool, tmp_path: Path, squeue: Callable[..., Path]
) -> None:
    squeue(output, code, complaint)
    assert is_at_work(tmp_path, job_id=OTHER) == at_work


def test_without_squeue_nothing_is_certain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert is_at_work(tmp_path, job_id=OTHER)


@pytest.mark.parametrize(("private", "at_work"), [("none", False), ("jobs,usage", True), ("usage", False)])
def test_a_job_that_slurm_may_hide_is_not_taken_for_an_ended_one(
    private: str, at_work: bool, tmp_path: Path, squeue: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue("", 1, "slurm_load_jobs error: Invalid job id specified", private)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert is_at_work(tmp_path, job_id=OTHER) == at_work


@pytest.mark.parametrize(("restarts", "at_work"), [("0", True), ("1", False), ("", True)])
def test_an_earlier_start_of_this_job_has_ended_and_the_same_start_has_not(
    restarts: str, at_work: bool, tmp_path: Path, squeue: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = squeue(f"{TABLE}437_3|RUNNING|ada\n")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "437")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert is_at_work(tmp_path, job_id=OTHER) == at_work
    assert not calls.exists()


def test_a_job_of_another_cluster_is_asked_for_there(
    tmp_path: Path, squeue: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = squeue(f"CLUSTER: beta\n{TABLE}437_3|RUNNING|ada\n")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alpha")
    monkeypatch.setenv("SLURM_JOB_ID", OTHER)
    assert is_at_work(tmp_path, job_id=OTHER, job_cluster="beta")
    assert "squeue -M beta -t all" in calls.read_text()


def test_each_job_is_asked_for_once(tmp_path: Path, squeue: Callable[..., Path]) -> None:
    calls = squeue()
    attempts = [start_attempt(tmp_path, SPEC, job_id=OTHER) for _ in range(3)]
    others = OtherAttempts(1)
    for attempt in attempts:
        others.check(attempt)
    assert len(calls.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("machine", "at_work"),
    [("{here}", True), ("{host}:another-boot:{namespace}", False), ("elsewhere:boot:pid:[1]", True)],
)
def test_a_process_of_this_machine_is_looked_at(machine: str, at_work: bool, tmp_path: Path) -> None:
    """One of an earlier boot has ended; one of another machine may be at work until long after its limit."""
    host, _, namespace = process_namespace().split(":", 2)
    process = ProcessId(machine.format(here=process_namespace(), host=host, namespace=namespace), os.getpid(), 1.0)
    alive = ProcessId(process.machine, process.pid, _created(process.pid)) if machine == "{here}" else process
    assert is_at_work(tmp_path, process=alive, deadline_unix_s=4e9) == at_work
    assert not is_at_work(tmp_path, process=process, deadline_unix_s=1.0)


def _created(pid: int) -> float:
    return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_an_attempt_with_a_result_has_ended(tmp_path: Path, squeue: Callable[..., Path]) -> None:
    calls = squeue(f"{TABLE}437_3|RUNNING|ada\n")
    tasks = write_tasks(tmp_path, SPEC)
    attempt = start_attempt(tmp_path, SPEC, job_id=OTHER)
    assert begin(tasks, 0) == EXIT_NOTHING_TO_DO
    result = summarize_run(make_header(tmp_path), make_task(SPEC), attempt.number, {}, "failed", failure())
    tree_of(tmp_path).write_result(result)
    calls.unlink()
    assert begin(tasks, 0) == 0
    assert not calls.exists()


def test_a_marker_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    marker = start_attempt(tmp_path, SPEC, job_id=OTHER).folder / "attempt.json"
    real = os.open

    def refuse(path: str | Path, *arguments: int) -> int:
        if str(path) == str(marker):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=r"cannot read .*attempt.json: Permission denied"):
        begin(tasks, 0)


def test_of_many_that_begin_at_once_one_begins(tmp_path: Path) -> None:
    """Each looks at the attempt that was faster, and finds it at work."""
    folder = tree_of(tmp_path).run_folder(run_id(SPEC))
    barrier, begun, refused = threading.Barrier(8), [], []

    def look(attempt: Attempt) -> None:
        assert json.loads((attempt.folder / "attempt.json").read_bytes())["launch"] == "l"
        raise AttemptAtWork("at work")

    def start() -> None:
        barrier.wait()
        try:
            begun.append(begin_attempt(folder, look, launch="l", host="h", started_unix_s=1.0))
        except AttemptAtWork:
            refused.append(1)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(begun), len(refused), attempt_numbers(folder)) == (1, 7, [1])
    assert [path.name for path in (folder / "attempts").iterdir()] == ["1"]


def test_an_attempt_of_a_killed_local_script_is_followed_by_another(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    words = f"from pathlib import Path; from hpcbench.worker.begin import begin; begin(Path({str(tasks)!r}), 0)"
    for _ in range(2):
        # Two commands, so that bash does not become the first of them.
        subprocess.run(["bash", "-c", f'"{sys.executable}" -c "{words}"; exit 0'], check=True)
    assert attempt_numbers(tree_of(tmp_path).run_folder(run_id(SPEC))) == [1, 2]
