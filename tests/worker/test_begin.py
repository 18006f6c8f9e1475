"""Whether a run of a job is begun: what was cancelled, done, ended here already or stopped is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.config.run_spec import RunSpec, encode_task_file, run_id
from hpcbench.errors import EXIT_NOTHING_TO_DO
from hpcbench.results.stop_rules import StopGroup
from hpcbench.worker.begin import begin
from hpcbench.worker.end import end
from hpcbench.worker.summary import summarize_run
from tests.worker.helpers import failure, make_header, make_spec, make_task, start_attempt, tree_of, write_tasks

RUNS = [make_spec(seed=seed) for seed in range(5)]


def put(folder: Path, spec: RunSpec, status: str, tasks: Path | None, **marker: Any) -> None:
    """An attempt from ``tasks`` with the result ``status``; an empty one leaves an attempt without a result."""
    attempt = start_attempt(folder, spec, task_file=str(tasks) if tasks else "/another/0.jsonl", **marker)
    if status:
        result = summarize_run(make_header(folder), make_task(spec), attempt.number, {}, status, failure())
        tree_of(folder).write_result(result)


def attempts(folder: Path, spec: RunSpec) -> int:
    return len(list(tree_of(folder).run_folder(run_id(spec)).glob("attempts/*/attempt.json")))


def test_a_run_that_was_cancelled_before_it_began_is_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path, *RUNS)
    (tmp_path / "dropped.json").write_text(json.dumps([run_id(RUNS[1])]))
    assert [begin(tasks, index) for index in (0, 1)] == [0, EXIT_NOTHING_TO_DO]
    assert "it was cancelled: nothing to do" in capsys.readouterr().err
    assert [attempts(tmp_path, RUNS[index]) for index in (0, 1)] == [1, 0]
    (tmp_path / "dropped.json").write_text("[")
    assert begin(tasks, 1) == 0


@pytest.mark.parametrize(
    ("key", "supersedes", "code"),
    [
        ("old", None, EXIT_NOTHING_TO_DO),
        ("old", "old", 0),
        ("new", "old", EXIT_NOTHING_TO_DO),
        (None, "old", EXIT_NOTHING_TO_DO),
    ],
)
def test_an_ok_result_is_measured_anew_where_it_is_superseded(
    tmp_path: Path, key: str | None, supersedes: str | None, code: int
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    task = msgspec.structs.replace(make_task(RUNS[0]), supersedes=supersedes)
    tasks.write_bytes(encode_task_file(make_header(tmp_path, environment_key="new"), [task]))
    result = summarize_run(make_header(tmp_path, environment_key=key), task, 1, {}, "ok")
    assert tree_of(tmp_path).write_result(result)
    assert begin(tasks, 0) == code


# What ended in this very submission. The job carries runs 0 to 2, the next one 3 and 4.


@pytest.mark.parametrize("status", ["failed", "cancelled", "preempted", "oom", "timeout", "unsupported"])
def test_without_a_restart_a_run_that_has_ended_is_left(tmp_path: Path, status: str) -> None:
    tasks = write_tasks(tmp_path, *RUNS, pack=3)
    put(tmp_path, RUNS[1], status, tasks)
    assert begin(tasks, 1) == EXIT_NOTHING_TO_DO
    assert attempts(tmp_path, RUNS[1]) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [("failed", 0), ("cancelled", 0), ("preempted", 0), ("", 0),
     ("oom", EXIT_NOTHING_TO_DO), ("timeout", EXIT_NOTHING_TO_DO), ("unsupported", EXIT_NOTHING_TO_DO), ("ok", EXIT_NOTHING_TO_DO)],
)  # fmt: skip
def test_a_restart_runs_again_what_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    tasks = write_tasks(tmp_path, *RUNS, pack=3)
    put(tmp_path, RUNS[0], "failed", tasks)
    put(tmp_path, RUNS[1], status, tasks)
    put(tmp_path, RUNS[3], "ok", tasks)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert [begin(tasks, index) for index in range(3)] == [EXIT_NOTHING_TO_DO, code, 0]
    assert [attempts(tmp_path, spec) for spec in RUNS] == [1, 2 if code == 0 else 1, 1, 1, 0]


def test_a_second_restart_runs_again_what_the_first_ran_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = write_tasks(tmp_path, *RUNS, pack=3)
    put(tmp_path, RUNS[0], "preempted", tasks)
    put(tmp_path, RUNS[0], "preempted", tasks, restart_count=1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert begin(tasks, 0) == EXIT_NOTHING_TO_DO
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert begin(tasks, 0) == 0


def test_unfinished_runs_of_an_earlier_submission_run_again(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, *RUNS, pack=3)
    for spec, status in zip(RUNS[:3], ("failed", "timeout", "preempted"), strict=True):
        put(tmp_path, spec, status, None)
    assert [begin(tasks, index) for index in range(3)] == [0, 0, 0]


# Stop rules


def write_stop_rules(folder: Path) -> Path:
    group = StopGroup(statuses=["oom"], along=["batch_size"], runs=[(run_id(RUNS[n]), [float(n + 1)]) for n in (0, 1)])
    (folder / "stop.jsonl").write_bytes(msgspec.json.encode(group) + b"\n")
    tasks = folder / "tasks.jsonl"
    listed = [msgspec.structs.replace(make_task(RUNS[n]), stop_groups=[0, 7]) for n in (0, 1)]
    tasks.write_bytes(encode_task_file(make_header(folder, environment_key="now"), listed))
    return tasks


def test_a_run_behind_one_that_was_out_of_memory_is_skipped(tmp_path: Path) -> None:
    tasks = write_stop_rules(tmp_path)
    put(tmp_path, RUNS[0], "oom", None)
    assert begin(tasks, 1) == EXIT_NOTHING_TO_DO
    result = tree_of(tmp_path).read_result(run_id(RUNS[1]))
    assert result is not None
    assert result.error is not None
    assert (result.status, result.attempt, result.ranks, result.warnings) == ("skipped", 0, [], [])
    assert (result.error.type, run_id(RUNS[0]) in result.error.message) == ("Stopped", True)
    assert result.provenance == {"environment_key": "now"}
    assert attempts(tmp_path, RUNS[1]) == 0, "nothing started"
    assert begin(tasks, 1) == EXIT_NOTHING_TO_DO


def test_a_skipped_result_takes_the_place_of_what_the_run_left_before(tmp_path: Path) -> None:
    tasks = write_stop_rules(tmp_path)
    put(tmp_path, RUNS[0], "oom", None)
    put(tmp_path, RUNS[1], "failed", None)
    assert begin(tasks, 1) == EXIT_NOTHING_TO_DO
    result = tree_of(tmp_path).read_result(run_id(RUNS[1]))
    assert result is not None
    assert (result.status, result.attempt) == ("skipped", 1)


@pytest.mark.parametrize("status", ["ok", "failed", "broken", ""])
def test_a_run_behind_any_other_one_is_begun(tmp_path: Path, status: str) -> None:
    tasks = write_stop_rules(tmp_path)
    put(tmp_path, RUNS[0], "ok" if status == "broken" else status, None)
    if status == "broken":
        tree_of(tmp_path).result_path(run_id(RUNS[0])).write_text("{")
    assert begin(tasks, 1) == 0


# What `end` records of the software


def test_results_name_the_environment_that_the_submitter_knew(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, RUNS[0], environment_key="abc")
    start_attempt(tmp_path, RUNS[0])
    assert end(tasks, 0, 1, 1, "") == 0
    result = tree_of(tmp_path).read_result(run_id(RUNS[0]))
    assert result is not None
    assert result.provenance["environment_key"] == "abc"


def test_a_module_that_is_absent_ends_the_run_as_unsupported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path, RUNS[0])
    reason = "module PyTorch/2.6 cannot be loaded on n7: module load ended with exit code 1"
    assert begin(tasks, 0, missing_module=reason) == EXIT_NOTHING_TO_DO
    captured = capsys.readouterr()
    assert (captured.out, reason in captured.err) == ("", True)
    result = tree_of(tmp_path).read_result(run_id(RUNS[0]))
    assert result is not None
    assert result.error is not None
    assert (result.status, result.attempt, result.error.message) == ("unsupported", 1, reason)
    assert result.error.type == "MissingModule"
    assert begin(tasks, 0) == EXIT_NOTHING_TO_DO, "it ended in this submission"
