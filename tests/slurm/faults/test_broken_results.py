"""Results that a bad disk or a writer that died left broken, and a pack with a run that crashes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.slurm.box import Box
from tests.slurm.faults.conftest import Verify
from tests.slurm.faults.project import Project, rank_process, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.faults, pytest.mark.timeout(900)]

BAD_BYTES = b'{"schema_version": 1, "run_id": "\xff\xfe", "status": "ok\xff"}'


def broken_results(folder: Path, box: Box) -> Project:
    project = Project(folder / "project", box)
    project.add_sweep("four", "[grid]\nseed = [1, 2, 3, 4]\n")
    project.finish("four")
    wait_for("the jobs to be gone", lambda: not project.jobs())
    cut, empty, garbage, whole = project.run_ids("four")
    data = project.tree.result_path(cut).read_bytes()
    project.spoil(cut, data[: len(data) // 2])
    project.spoil(empty, b"")
    project.spoil(garbage, BAD_BYTES)
    for run_id in (cut, whole):
        folder = project.tree.run_folder(run_id)
        (folder / ".result.json.0badcafe.tmp").write_bytes(data[:100])
        (folder / ".result.lock").touch()
    broken = {cut, empty, garbage}
    states = project.status("four")
    assert {run["run_id"]: run["state"] for run in states} == {**dict.fromkeys(broken, "lost"), whole: "ok"}
    assert all("result.json is broken" in run["reason"] for run in states if run["run_id"] in broken)
    collected = project.call("collect", "four", "--json")
    assert (collected.returncode, len(json.loads(collected.stdout)["results"])) == (0, 1), collected.stderr
    assert "0 submitted, 1 done before" in project.submit("four").stderr
    assert project.begun() == 4
    assert "3 runs submitted again" in project.retry("four").stderr
    project.finish("four")
    assert project.begun() == 7
    return project


@pytest.mark.parametrize("scenario", [broken_results], indirect=True)
def test_broken_results_are_lost_runs_that_retry_measures_again(scenario: Project, verify: Verify) -> None:
    """result.json cut short, empty, garbage; a writer's temporary file and lock left behind."""
    verify(scenario, "four")


def crashing_pack(folder: Path, box: Box) -> Project:
    project = Project(folder / "project", box)
    project.add_sweep("pack", "[grid]\nseed = [1, 2, 3]\n[submit]\npack = 3\n")
    waiting = project.start("submit", "pack", "--cluster", "faulty", "--wait")
    os.kill(wait_for("the second run", lambda: rank_process(project, index=1), 600), signal.SIGKILL)
    _, err = waiting.communicate()
    assert waiting.returncode == 1, err
    assert [result["status"] for result in project.results("pack")] == ["ok", "failed", "ok"]
    assert "rank 0 ended without leaving a file" in project.results("pack")[1]["error"]["message"]
    assert project.begun() == 3
    assert "1 submitted, 2 done before" in project.finish("pack").stderr
    assert project.begun() == 4
    return project


@pytest.mark.parametrize("scenario", [crashing_pack], indirect=True)
def test_a_crash_within_a_pack_fails_only_its_run(scenario: Project, verify: Verify) -> None:
    """the second of a pack of three has its rank killed."""
    verify(scenario, "pack")
