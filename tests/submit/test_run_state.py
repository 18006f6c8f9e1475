from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from hpcbench.config.sweep_file import SubmitTable
from hpcbench.report.status_text import suspect_nodes_text
from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import FailureRecord, RunResult
from hpcbench.submit import run_state
from hpcbench.submit.plan import SweepPlan, make_plan
from hpcbench.submit.run_state import closing_lines, record_scheduler_failures, run_states, suspect_nodes
from hpcbench.submit.slurm_queue import parse_job_states
from hpcbench.submit.submit import submit


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("12_3|RUNNING|None", {"12_3": ("running", "RUNNING")}),
        ("12|PENDING|QOSMaxJobsPerUserLimit", {"12": ("pending", "PENDING: QOSMaxJobsPerUserLimit")}),
        ("12|CANCELLED by 1000|None", {"12": ("cancelled", "CANCELLED")}),
        ("12|OUT_OF_ME+|None", {}),
        ("12|COMPLETED|None", {"12": ("lost", "COMPLETED")}),
        ("12_[4-5%2]|PENDING|Resources", dict.fromkeys(("12_4", "12_5"), ("pending", "PENDING: Resources"))),
        (
            "12_[0,3-4,6-10:2]|PENDING|None",
            {f"12_{task}": ("pending", "PENDING: SLURM has given no reason yet") for task in (0, 3, 4, 6, 8, 10)},
        ),
        ("12_[4-9,...]|PENDING|Resources", {}),
        ("12_[4-]|PENDING|Resources", {}),
        ("12.batch|RUNNING|None", {}),
        ("slurm: warning: something", {}),
        ("", {}),
    ],
)
def test_lines_of_squeue_and_sacct_become_run_states(line: str, expected: dict[str, tuple[str, str]]) -> None:
    assert {job_id: answer[:2] for job_id, answer in parse_job_states(line).items()} == expected


def test_the_reason_of_a_failed_job_has_its_node_and_the_error_before_its_consequence(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    folder = submit(plan, cluster_tree).folder
    assert folder is not None
    (fake_slurm / "squeue").write_text("4711_0|FAILED|NonZeroExitCode|2020-01-01T00:00:00||n2\n")
    log = "python: error while loading shared libraries: libpython3.11.so.1.0\n"
    (folder / "0.4711.0.log").write_text(f"{log}hpcbench: the worker could not begin run 0 of t (exit code 127)\n")
    state = next(iter(run_states(cluster_tree, plan.runs, plan.profile, time.time()).values()))
    assert state.reason.startswith("FAILED: NonZeroExitCode on n2, no result was left: python: error while loading")
    assert state.nodes == "n2"


def test_a_missing_result_of_a_full_disk_has_that_reason(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = submit(plan, cluster_tree).folder
    assert folder is not None
    (fake_slurm / "squeue").write_text("4711_0|FAILED|NonZeroExitCode|2020-01-01T00:00:00||n2\n")

    def reason() -> str:
        return next(iter(run_states(cluster_tree, plan.runs, plan.profile, time.time()).values())).reason

    assert reason() == "FAILED: NonZeroExitCode on n2, no result was left"
    monkeypatch.setattr(run_state, "_NEEDED_BYTES", 2**80)
    assert reason().startswith(
        f"FAILED: NonZeroExitCode on n2, no result was left: the file system of {folder} is full"
    )
    (folder / "0.4711.0.log").write_text("the log has another reason\n")
    assert reason() == "FAILED: NonZeroExitCode on n2, no result was left: the log has another reason"


def test_the_hint_below_the_last_error_of_a_log_is_no_reason() -> None:
    log = "hpcbench: cannot write x: Read-only file system\n  x belongs to uid 0, gid 0, mode 0755\n"
    assert closing_lines(log) == "hpcbench: cannot write x: Read-only file system"


@pytest.mark.parametrize(
    ("failed_on", "suspects"),
    [
        (["n2", "n2", "n2", None, "n1"], {"n2": 3}),
        (["n2", "n2"], {}),
        (["n1", "n1", "n2", "n2", "n2"], {}),
        (["n[1-2]"] * 5, {}),
        ([], {}),
    ],
)
def test_a_node_on_which_runs_fail_again_and_again_is_named(
    failed_on: list[str | None], suspects: dict[str, int]
) -> None:
    assert suspect_nodes(failed_on) == suspects
    assert ('exclude_nodes = ["n2"]' in suspect_nodes_text(failed_on, "c")) is bool(suspects)


def test_failures_stay_counted_for_their_node_once_they_are_results(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    submit(plan, cluster_tree)
    lines = [f"4711_{task}|FAILED|NonZeroExitCode|2020-01-01T00:00:00||n2\n" for task in (0, 1)]
    (fake_slurm / "squeue").write_text("".join(lines))
    found = run_states(cluster_tree, plan.runs, plan.profile, time.time())
    record_scheduler_failures(cluster_tree, found)
    again = make_plan(plan.sweep, plan.profile, cluster_tree)
    assert suspect_nodes(head.failed_on for head in again.heads.values()) == {"n2": 4}


def test_a_queued_job_in_an_unknown_state_is_pending() -> None:
    line = "5|EXPEDITING|None|N/A|hpcbench-a"
    assert parse_job_states(line, are_queued=True)["5"][:2] == ("pending", "EXPEDITING")
    assert parse_job_states(line) == {}


def states(plan: SweepPlan, tree: ClusterTree, after_s: float = 0.0) -> list[str]:
    return [state.state for state in run_states(tree, plan.runs, plan.profile, time.time() + after_s).values()]


def test_before_submission_runs_are_planned(plan: SweepPlan, cluster_tree: ClusterTree) -> None:
    assert states(plan, cluster_tree) == ["planned"] * 4


def test_sacct_gives_the_states_that_squeue_lacks(plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path) -> None:
    submit(plan, cluster_tree)
    (fake_slurm / "squeue.error").write_text("slurm_load_jobs error: Invalid job id specified")
    (fake_slurm / "sacct").write_text("4711_0|TIMEOUT|None\n4711_1|NODE_FAIL|None\n")
    assert states(plan, cluster_tree, 3600) == ["timeout", "timeout", "failed", "failed"]
    queries = (fake_slurm / "queries").read_text()
    assert queries.count("squeue") == queries.count("sacct") == 1
    assert " -S " in queries


def test_a_silent_scheduler_is_not_taken_for_failure(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    submit(plan, cluster_tree)
    for command in ("squeue", "sacct"):
        (fake_slurm / f"{command}.error").write_text("Unable to contact slurm controller")
    found = run_states(cluster_tree, plan.runs, plan.profile, time.time() + 3600)
    assert {state.state for state in found.values()} == {"waiting"}
    assert "Unable to contact" in next(iter(found.values())).reason


def test_a_job_missing_in_sacct_may_be_queued(plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path) -> None:
    submit(plan, cluster_tree)
    (fake_slurm / "squeue.error").write_text("Unable to contact slurm controller")
    (fake_slurm / "sacct").write_text("4711_0|TIMEOUT|None\n4711_1|RUNNING|None\n")
    for since_s in (0, 3600):
        assert states(plan, cluster_tree, since_s) == ["timeout", "timeout", "running", "running"]
    reasons = {state.reason for state in run_states(cluster_tree, plan.runs, plan.profile, time.time()).values()}
    assert any("RUNNING in accounting; the scheduler does not answer" in reason for reason in reasons)
    (fake_slurm / "sacct").write_text("")
    assert states(plan, cluster_tree, 3600) == ["pending"] * 4


@pytest.mark.parametrize(("state", "expected"), [("RUNNING", "running"), ("PENDING", "pending"), ("FAILED", "failed")])
def test_an_attempts_record_is_ignored_while_its_job_may_restart(
    state: str, expected: str, plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    """A node has died, the first launch said so, and the scheduler has put the job back into the queue."""
    folder = submit(plan, cluster_tree).folder
    key, spec = next(iter(plan.runs.items()))
    assert folder is not None
    begin_attempt(
        cluster_tree.run_folder(key),
        launch="l", host="h", started_unix_s=1.0, job_id="4711_0", task_file=str(folder / "0.jsonl"),
    )  # fmt: skip
    cluster_tree.write_result(
        RunResult(
            run_id=key, config_id="c", attempt=1, sweep="small", cluster="test", status="failed", spec=spec,
            error=FailureRecord(type="RankLost", message="rank 1 ended"),
        )
    )  # fmt: skip
    (fake_slurm / "squeue").write_text(f"4711_0|{state}|None\n")
    assert run_states(cluster_tree, [key], plan.profile, time.time())[key].state == expected


def test_a_job_just_submitted_may_be_unknown(plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path) -> None:
    submit(plan, cluster_tree)
    assert states(plan, cluster_tree) == ["pending"] * 4


def test_a_broken_result_is_lost_with_its_reason(plan: SweepPlan, cluster_tree: ClusterTree) -> None:
    first = next(iter(plan.runs))
    path = cluster_tree.result_path(first)
    path.parent.mkdir(parents=True)
    path.write_text('{"run_id": "')
    found = run_states(cluster_tree, plan.runs, plan.profile, time.time())
    assert found[first].state == "lost"
    assert "broken" in found[first].reason


def test_a_result_may_show_late(plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path) -> None:
    """A job that has begun its run and ended well a moment ago: a slow file system may hide what it left."""
    submitted = submit(plan, cluster_tree)
    assert submitted.folder is not None
    first = next(iter(plan.runs))
    begin_attempt(
        cluster_tree.run_folder(first), launch="l", host="h", started_unix_s=1.0,
        task_file=str(submitted.folder / "0.jsonl"),
    )  # fmt: skip
    soon = time.strftime("%Y-%m-%dT%H:%M:%S")
    for ago_s, state in ((5, "running"), (600, "lost")):
        ended = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - ago_s))
        (fake_slurm / "squeue").write_text(f"4711_0|COMPLETED|None|{ended}|\n4711_1|PENDING|None|N/A|\n")
        assert states(plan, cluster_tree)[0] == state
    (fake_slurm / "squeue").write_text((fake_slurm / "squeue").read_text().replace(ended, soon))
    cluster_tree.result_path(first).write_text("{")
    assert states(plan, cluster_tree)[0] == "lost"


def test_unstarted_runs_of_a_finished_pack_are_not_waiting(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    """The scheduler may have forgotten the job: it has begun one of its runs, so it is not waiting."""
    packed = make_plan(plan.sweep, plan.profile, cluster_tree)
    packed.sweep = dataclasses.replace(plan.sweep, submit=SubmitTable(pack=2))
    submitted = submit(packed, cluster_tree)
    assert submitted.record is not None
    assert submitted.folder is not None
    first, second = submitted.record.arrays[0].run_ids
    assert states(plan, cluster_tree, 3600) == ["lost"] * 4
    begin_attempt(
        cluster_tree.run_folder(first), launch="l", host="h", started_unix_s=1.0,
        task_file=str(submitted.folder / "0.jsonl"),
    )  # fmt: skip
    found = run_states(cluster_tree, plan.runs, plan.profile, time.time() + 3600)
    assert (found[first].state, found[second].state) == ("lost", "planned")


def test_a_run_that_its_script_refused_is_unsupported_with_the_scripts_reason(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    """No interpreter without the module: the shell has left a line, and the scheduler a job that ended well."""
    submitted = submit(plan, cluster_tree)
    assert submitted.folder is not None
    first = next(iter(plan.runs))
    record = submitted.folder / "0.0.unsupported"
    record.write_text("module M/1 cannot be loaded on n1: module load ended with exit code 1\n")
    os.utime(record, (time.time() - 600, time.time() - 600))
    (fake_slurm / "squeue").write_text("4711_0|COMPLETED|None\n4711_1|PENDING|None\n")
    found = run_states(cluster_tree, plan.runs, plan.profile, time.time())
    assert (found[first].state, found[first].reason[:11]) == ("unsupported", "module M/1 ")
    record_scheduler_failures(cluster_tree, found)
    result = cluster_tree.read_result(first)
    assert result is not None
    assert result.error is not None
    assert (result.status, result.error.type) == ("unsupported", "MissingModule")
    (fake_slurm / "squeue").write_text("4711_0|RUNNING|None\n")
    cluster_tree.result_path(first).unlink()
    assert states(plan, cluster_tree)[0] == "running", "the job was started again"


def test_a_refused_run_replaces_the_failed_result_of_an_earlier_submission(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    first, spec = next(iter(plan.runs.items()))
    error = FailureRecord(type="T", message="earlier")
    cluster_tree.write_result(
        RunResult(
            run_id=first,
            config_id="c",
            attempt=1,
            sweep="small",
            cluster="test",
            status="failed",
            spec=spec,
            error=error,
        )
    )
    submitted = submit(plan, cluster_tree)
    assert submitted.folder is not None
    (submitted.folder / "0.0.unsupported").write_text("module M/1 cannot be loaded on n1: no reason\n")
    (fake_slurm / "squeue").write_text("4711_0|COMPLETED|None\n4711_1|PENDING|None\n")
    assert states(plan, cluster_tree)[0] == "unsupported"
