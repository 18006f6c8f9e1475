"""Runs that are taken away: by another job, by a person, by the kernel."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.slurm.faults.conftest import Verify
from tests.slurm.faults.project import CLUSTER, Project, rank_process, wait_for

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.faults, pytest.mark.timeout(900)]


def test_preempted_jobs_finish_later(project: Project, verify: Verify) -> None:
    """jobs of a low partition preempted, requeued, finished."""
    project.add_sweep("low", 'partition = "low"\n[grid]\nseed = [1, 2]\n', steps=25, model="resnet18")
    waiting = project.start("submit", "low", "--cluster", CLUSTER, "--wait")
    wait_for("two runs to begin", lambda: project.begun() == 2)
    wait_for("its rank", lambda: rank_process(project, index=1))
    project.slurm("sbatch", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "srun sleep 3")
    _, err = waiting.communicate()
    assert waiting.returncode == 0, err
    assert project.begun() == 4
    assert len(project.submissions()) == 1
    verify(project, "low")


def test_runs_cancelled_by_scancel_are_submitted_again(project: Project, verify: Verify) -> None:
    """scancel by a person, of a pending and of a running job; then submit."""
    project.add_sweep("three", 'partition = "limited"\n[grid]\nseed = [1, 2, 3]\n', steps=15, model="resnet18")
    waiting = project.start("submit", "three", "--cluster", CLUSTER, "--wait")
    wait_for("two runs to begin", lambda: project.begun() == 2)
    wait_for("its rank", lambda: rank_process(project))
    running, pending = sorted(project.jobs("RUNNING"))[0], project.jobs("PENDING")[0]
    project.slurm("scancel", pending, running)
    _, err = waiting.communicate()
    assert waiting.returncode == 1, err
    states = list(project.states("three").values())
    assert (states[0], states[2]) == ("cancelled", "cancelled")
    project.finish("three")
    assert project.begun() == 4
    verify(project, "three")


def test_runs_cancelled_by_hpcbench_are_submitted_again(project: Project, verify: Verify) -> None:
    """hpcbench cancel of pending and running runs; then submit."""
    project.add_sweep("three", 'partition = "limited"\n[grid]\nseed = [1, 2, 3]\n', steps=15, model="resnet18")
    assert project.submit("three").returncode == 0
    wait_for("two runs to begin", lambda: project.begun() == 2)
    wait_for("its rank", lambda: rank_process(project, index=1))
    cancelled = project.call("cancel", "three")
    assert (cancelled.returncode, "asked to stop" in cancelled.stderr) == (0, True), cancelled.stderr
    # Those that are being stopped are still on their way: they are left alone until they have ended.
    at_once = project.submit("three")
    assert (at_once.returncode, len(project.jobs())) == (0, 3), at_once.stderr
    wait_for("them to end", lambda: list(project.states("three").values())[:2] == ["cancelled", "cancelled"])
    project.finish("three")
    assert project.begun() == 5
    verify(project, "three")


def test_a_run_killed_for_memory_is_oom_beside_others(project: Project, verify: Verify) -> None:
    """a run killed for its memory; the run beside it ends well."""
    project.add_sweep("greedy", '[[zip]]\ndataset = ["imagenet", "digits"]\nbatch_size = [512, 4]\n', model="resnet18")
    path = project.folder / "sweeps" / "greedy.toml"
    path.write_text(path.read_text().replace('dataset = "digits"\n', "").replace("batch_size = 4\n", ""))
    done = project.finish("greedy")
    assert [result["status"] for result in project.results("greedy")] == ["oom", "ok"], done.stderr
    assert "0 submitted, 2 done before" in project.submit("greedy").stderr
    assert project.begun() == 2
    verify(project, "greedy", ok=1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed(victim: int, project: Project, verify: Verify) -> None:
    """A rank of two killed with SIGKILL; then submit."""
    project.add_sweep("pair", "nodes = 2\n", steps=15, model="resnet18")
    waiting = project.start("submit", "pair", "--cluster", CLUSTER, "--wait")
    wait_for("its ranks to meet", lambda: any(attempt.rendezvous_path.exists() for _, attempt in project.attempts()))
    os.kill(wait_for("its rank", lambda: rank_process(project, rank=victim)), signal.SIGKILL)
    _, err = waiting.communicate()
    (result,) = project.results("pair")
    assert (waiting.returncode, result["status"]) == (1, "failed"), err
    assert re.match(rf"ranks? .*\b{victim}\b.* ended without leaving a file", result["error"]["message"])
    project.finish("pair")
    assert project.begun() == 2
    verify(project, "pair", f"rank {victim} of two killed with SIGKILL; then submit")
