from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.run_spec import run_id
from hpcbench.errors import EXIT_NOTHING_TO_DO, HpcbenchError
from hpcbench.results.attempts import Attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import RunResult
from hpcbench.worker import begin as begin_module
from hpcbench.worker import end as end_module
from hpcbench.worker import failure as failure_module
from hpcbench.worker.__main__ import main
from hpcbench.worker.begin import begin
from hpcbench.worker.end import end
from hpcbench.worker.summary import summarize_run
from tests.worker.helpers import (
    failure,
    make_header,
    make_rank,
    make_spec,
    make_task,
    start_attempt,
    tree_of,
    write_tasks,
)

SPEC = make_spec()
PAIR = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2)


def put_result(folder: Path, status: str, attempt: int, spec: Any = SPEC) -> None:
    result = summarize_run(make_header(folder), make_task(spec), attempt, {}, status, failure())
    assert tree_of(folder).write_result(result)


def result_of(folder: Path, spec: Any = SPEC) -> RunResult:
    found = tree_of(folder).read_result(run_id(spec))
    assert found is not None
    return found


def test_begin_claims_an_attempt_and_prints_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_JOB_ID": "812", "SLURM_ARRAY_JOB_ID": "810", "SLURM_ARRAY_TASK_ID": "2",
                        "SLURM_RESTART_COUNT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(begin_module, "oom_kills", lambda: 3)
    tasks = write_tasks(tmp_path, PAIR, SPEC, time_limit_s=120.0)
    before = time.time()
    assert begin(tasks, 1) == 0
    printed = capsys.readouterr().out.splitlines()
    folder = tree_of(tmp_path).run_folder(run_id(SPEC)) / "attempts" / "1"
    assert printed == [str(folder)]
    assert folder.is_absolute()
    marker = json.loads((folder / "attempt.json").read_bytes())
    assert marker["job_id"] == "810_2"
    assert marker["restart_count"] == 1
    assert marker["oom_kills"] == 3
    assert (marker["task_file"], marker["index"]) == (str(tasks), 1)
    assert marker["tree"] == str(tree_of(tmp_path).root)
    assert before + 120 <= marker["deadline_unix_s"] <= time.time() + 120


def test_a_second_begin_is_a_second_attempt_once_the_first_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    with subprocess.Popen(["sleep", "60"]) as script:
        monkeypatch.setattr(os, "getppid", lambda: script.pid)
        assert [begin(tasks, 0), begin(tasks, 0)] == [0, EXIT_NOTHING_TO_DO]
        assert f"attempt 1 is at work (process {script.pid}): nothing to do" in capsys.readouterr().err
        script.kill()
        script.wait()
        monkeypatch.undo()
        assert begin(tasks, 0, time_limit_s=5) == 0
    assert Path(capsys.readouterr().out.strip()).name == "2"


def test_begin_of_a_done_run_has_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    put_result(tmp_path, "ok", 1)
    assert begin(tasks, 0) == EXIT_NOTHING_TO_DO == 10
    out = capsys.readouterr()
    assert out.out == ""
    assert "ok result" in out.err
    assert not (tree_of(tmp_path).run_folder(run_id(SPEC)) / "attempts").exists()


@pytest.mark.parametrize("present", ["failed", "broken"])
def test_begin_runs_again_what_is_not_ok(tmp_path: Path, present: str) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    put_result(tmp_path, "failed", 1)
    if present == "broken":
        tree_of(tmp_path).result_path(run_id(SPEC)).write_text("{")
    assert begin(tasks, 0) == 0


def test_the_jobs_end_is_the_deadline_where_it_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = write_tasks(tmp_path, SPEC, time_limit_s=600)
    ends = int(time.time()) + 60
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(ends))
    begin(tasks, 0)
    marker = Attempt(tree_of(tmp_path).run_folder(run_id(SPEC)), 1).read_start()
    assert marker is not None
    assert marker.deadline_unix_s == ends


def test_a_wrong_task_file_is_the_users_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["begin", "--tasks", str(tmp_path / "absent"), "--index", "0"]) == 2
    assert "cannot read the task file" in capsys.readouterr().err
    assert main(["begin", "--tasks", str(write_tasks(tmp_path, SPEC)), "--index", "4"]) == 2
    assert "has no run number 4" in capsys.readouterr().err


def test_begin_and_end_do_not_import_torch(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    code = (
        "import sys\nfrom hpcbench.worker.__main__ import main\n"
        f"assert main(['begin', '--tasks', {str(tasks)!r}, '--index', '0']) == 0\n"
        f"assert main(['end', '--tasks', {str(tasks)!r}, '--index', '0', '--attempt', '1', '--exit-code', '9']) == 0\n"
        "assert not {'torch', 'numpy', 'psutil'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert result_of(tmp_path).status == "failed"


# end


@pytest.mark.parametrize(
    ("exit_code", "received", "left_s", "kills", "status"),
    [
        (1, "", 500, 0, "failed"),
        (139, "", 500, 0, "failed"),
        (0, "", 500, 0, "failed"),
        (137, "", 500, 1, "oom"),
        (1, "", 500, 2, "oom"),
        (143, "TERM", 500, 1, "oom"),
        (143, "TERM", 500, 0, "cancelled"),
        (143, "SIGTERM", 500, 0, "cancelled"),
        (143, "TERM", 3, 0, "timeout"),
        (143, "TERM", -3, 0, "timeout"),
        (140, "USR2", 500, 0, "timeout"),
        (140, "", 500, 0, "timeout"),
        (137, "", -3, 0, "timeout"),
        (124, "", -1, 0, "timeout"),
        (1, "", -3, 0, "failed"),
    ],
)
def test_the_status_of_a_silent_end_follows_from_code_signal_and_limits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exit_code: int,
    received: str,
    left_s: float,
    kills: int,
    status: str,
) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    start_attempt(tmp_path, SPEC, oom_kills=5, deadline_unix_s=time.time() + left_s)
    monkeypatch.setattr(failure_module, "oom_kills", lambda: 5 + kills)
    assert end(tasks, 0, 1, exit_code, received) == 0
    result = result_of(tmp_path)
    assert result.status == status
    assert result.error is not None
    assert f"exit code {exit_code}" in result.error.message


def test_end_keeps_what_the_ranks_left_and_names_who_left_nothing(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, PAIR)
    attempt = start_attempt(tmp_path, PAIR)
    attempt.write_rank(make_rank(1, steps_done=2, step_times_s=[0.1, 0.3], step_samples=[8, 8], peak_memory_bytes=7))
    (attempt.folder / "err.log").write_text("the last words\n")
    assert end(tasks, 0, 1, 137, "") == 0
    result = result_of(tmp_path, PAIR)
    assert result.status == "failed"
    assert result.ranks[0] == {"rank": 0, "left_file": False}
    assert result.ranks[1]["steps_done"] == 2
    assert result.step_times_s == [0.1, 0.3]
    assert result.metrics.peak_memory_bytes == 7
    assert result.metrics.samples_per_s is None, "no global rate from a part of the ranks"
    assert any("not of all" in text for text in result.warnings)
    assert result.error is not None
    assert result.error.message.startswith("rank 0 ended without leaving a file")
    assert "SIGKILL" in result.error.message
    assert result.error.traceback_tail == "the last words\n"


def test_end_without_torch_has_the_status_of_a_rank_without_torch(tmp_path: Path) -> None:
    """torchrun is a part of torch: no rank starts, and none can leave a file."""
    tasks = write_tasks(tmp_path, PAIR)
    attempt = start_attempt(tmp_path, PAIR)
    words = "Error while finding module specification for 'torch.distributed.run'"
    (attempt.folder / "err.log").write_text(f"/v/python: {words} (ModuleNotFoundError: No module named 'torch')\n")
    assert end(tasks, 0, 1, 1, "") == 0
    result = result_of(tmp_path, PAIR)
    assert result.error is not None
    assert (result.status, result.error.lacks_software) == ("unsupported", True)
    assert result.error.message.endswith("cannot import torch: No module named 'torch'")


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("warning: slow\nValueError: a wrong shape\n", "ValueError: a wrong shape"),
        ("0: OSError: No space left\nsrun: error: n2: task 0: Exited with exit code 1\n", "OSError: No space left"),
        ("ValueError: x\n    raise y\ntorch.distributed.elastic.errors.ChildFailedError:\n=====\n", "ValueError: x"),
        ("the last words\n", "the last words"),
    ],
)
def test_end_quotes_the_last_error_of_the_ranks_and_names_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, line: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n2")
    tasks = write_tasks(tmp_path, PAIR)
    attempt = start_attempt(tmp_path, PAIR)
    (attempt.folder / "err.log").write_text(log)
    end(tasks, 0, 1, 1, "")
    error = result_of(tmp_path, PAIR).error
    assert error is not None
    assert error.message.endswith(f"; err.log: {line}; on n2")
    assert error.nodes == "n2"


@pytest.mark.parametrize(("left_s", "status"), [(600.0, "cancelled"), (100.0, "timeout")])
def test_a_user_signal_means_the_time_limit_only_near_it(tmp_path: Path, left_s: float, status: str) -> None:
    tasks = write_tasks(tmp_path, SPEC, warning_s=60.0)
    start_attempt(tmp_path, SPEC, deadline_unix_s=time.time() + left_s)
    end(tasks, 0, 1, 1, "USR2")
    assert result_of(tmp_path).status == status


def test_end_reports_the_lost_rank_before_connection_errors(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, PAIR)
    attempt = start_attempt(tmp_path, PAIR)
    lost = failure("RuntimeError", "[pair.cc:537] Read error: Connection reset by peer")
    attempt.write_rank(make_rank(1, status="failed", error=lost))
    end(tasks, 0, 1, 1, "")
    error = result_of(tmp_path, PAIR).error
    assert error is not None
    assert error.type == "RankLost"
    assert "rank 0 ended without leaving a file" in error.message


def test_end_reads_what_the_scheduler_wrote_about_memory(tmp_path: Path) -> None:
    """Under cgroup v1 the step's own group, with its count, is gone when the step has ended."""
    tasks = write_tasks(tmp_path, SPEC)
    attempt = start_attempt(tmp_path, SPEC)
    (attempt.folder / "err.log").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n")
    end(tasks, 0, 1, 137, "")
    assert result_of(tmp_path).status == "oom"


@pytest.mark.parametrize(("status", "attempt"), [("ok", 1), ("ok", 2), ("failed", 2), ("cancelled", 3)])
def test_end_keeps_a_result_that_exists(tmp_path: Path, status: str, attempt: int) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    for _ in range(3):
        start_attempt(tmp_path, SPEC)
    put_result(tmp_path, status, attempt)
    before = tree_of(tmp_path).result_path(run_id(SPEC)).read_bytes()
    assert end(tasks, 0, 2, 1, "TERM") == 0
    assert tree_of(tmp_path).result_path(run_id(SPEC)).read_bytes() == before


def test_end_replaces_cancelled_by_timeout_after_a_warning_signal(tmp_path: Path) -> None:
    """torchrun hands on a TERM, whatever the script was told."""
    tasks = write_tasks(tmp_path, SPEC)
    start_attempt(tmp_path, SPEC)
    put_result(tmp_path, "cancelled", 1)
    assert end(tasks, 0, 1, 1, "USR2") == 0
    assert result_of(tmp_path).status == "timeout"


@pytest.mark.parametrize(
    ("exit_code", "received", "left_files", "kills", "status"),
    [
        (1, "", [0], 0, "failed"),
        (137, "", [0], 1, "oom"),
        (1, "TERM", [0], 0, "cancelled"),
        (1, "", [0, 1], 0, "cancelled"),
        (0, "", [0], 0, "cancelled"),
    ],
)
def test_end_replaces_a_cancellation_without_a_cancel(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exit_code: int,
    received: str,
    left_files: list[int],
    kills: int,
    status: str,
) -> None:
    """srun ends the other ranks with a TERM when it has lost one; the script of a job that is cancelled is told, too."""
    spec = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2)
    tasks = write_tasks(tmp_path, spec)
    attempt = start_attempt(tmp_path, spec, oom_kills=0)
    monkeypatch.setattr("hpcbench.worker.failure.oom_kills", lambda: kills)
    for rank in left_files:
        attempt.write_rank(make_rank(rank, status="cancelled"))
    put_result(tmp_path, "cancelled", 1, spec)
    assert end(tasks, 0, 1, exit_code, received) == 0
    result = result_of(tmp_path, spec)
    assert result.status == status
    if status != "cancelled":
        assert result.error is not None
        assert "rank 1 ended without leaving a file" in result.error.message


def test_end_replaces_the_result_of_an_earlier_attempt(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    start_attempt(tmp_path, SPEC)
    put_result(tmp_path, "failed", 1)
    start_attempt(tmp_path, SPEC)
    assert end(tasks, 0, 2, 143, "TERM") == 0
    assert (result_of(tmp_path).attempt, result_of(tmp_path).status) == (2, "cancelled")


@pytest.mark.parametrize(("exit_code", "expected"), [(137, 137), (0, end_module.EXIT_NOT_RECORDED)])
def test_end_reports_that_it_could_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int, expected: int
) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    start_attempt(tmp_path, SPEC)

    def refuse(*_: object) -> bool:
        raise HpcbenchError("disk full")

    monkeypatch.setattr(ClusterTree, "write_result", refuse)
    assert end(tasks, 0, 1, exit_code, "") == expected


def test_end_keeps_the_status_that_a_rank_recorded(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, PAIR)
    attempt = start_attempt(tmp_path, PAIR)
    attempt.write_rank(make_rank(1, status="unsupported", error=failure("WorkerError", "needs scikit-learn")))
    assert end(tasks, 0, 1, 1, "") == 0
    result = result_of(tmp_path, PAIR)
    assert result.status == "unsupported"
    assert result.error is not None
    assert result.error.type == "WorkerError"
    assert "rank 1 on n1: needs scikit-learn" in result.error.message
