"""The scheduler's own daemons and nodes, taken away and given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.slurm.box import Box
from tests.slurm.box.daemons import is_alive
from tests.slurm.faults.conftest import Verify
from tests.slurm.faults.project import CLUSTER, ROOT, Project, rank_process, wait_for

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.faults, pytest.mark.timeout(900)]

THREE = "[grid]\nseed = [1, 2, 3]\n"


@pytest.fixture(autouse=True)
def _all_daemons_again(box: Box) -> Iterator[None]:
    yield
    for name in ("slurmdbd", "slurmctld"):
        box.start_daemon(name)
    for node in box.nodes:
        if not is_alive(node):
            box.restart_node(node)


def test_the_controller_is_down_at_submit(project: Project, verify: Verify) -> None:
    """slurmctld down at submit, back for the next submit."""
    project.add_sweep("three", THREE)
    project.box.stop_daemon("slurmctld")
    first = project.submit("three")
    assert first.returncode == 3
    assert "3 jobs not sent yet" in first.stderr
    again = project.submit("three")
    assert (again.returncode, len(project.submissions())) == (3, 1)
    assert set(project.states("three").values()) == {"waiting"}
    project.box.start_daemon("slurmctld")
    assert "0 submitted" in project.finish("three").stderr
    verify(project, "three")


@pytest.mark.parametrize("small_arrays", [3], indirect=True)
def test_a_submit_waits_for_an_absent_controller(small_arrays: None, project: Project, verify: Verify) -> None:
    """slurmctld down at submit --wait with MaxArraySize 3, back, down again, back."""
    project.add_sweep("four", "[grid]\nseed = [1, 2, 3, 4]\n")
    project.box.stop_daemon("slurmctld")
    waiting = project.start("submit", "four", "--cluster", CLUSTER, "--wait")
    second = project.start("submit", "four", "--cluster", CLUSTER, "--wait")
    wait_for("the record", project.submissions)
    time.sleep(5)
    project.box.start_daemon("slurmctld")
    wait_for("a run to begin", project.begun)
    project.box.stop_daemon("slurmctld")
    states = project.states("four")
    assert "lost" not in states.values(), project.status("four")
    time.sleep(35)
    assert "lost" not in project.states("four").values(), project.status("four")
    assert (waiting.poll(), second.poll()) == (None, None)
    project.box.start_daemon("slurmctld")
    ended = [(process.communicate()[1], process.returncode) for process in (waiting, second)]
    # A launch needs the controller: those that it was away for have failed, and nothing else went wrong.
    assert {code for _, code in ended} <= {0, 1}, ended
    project.finish("four")
    verify(project, "four")


def test_runs_end_ok_while_the_accounting_is_down(project: Project, verify: Verify) -> None:
    """slurmdbd down during submit, run and status."""
    project.add_sweep("three", THREE)
    project.box.stop_daemon("slurmdbd")
    waiting = project.start("submit", "three", "--cluster", CLUSTER, "--wait")
    wait_for("a run to begin", project.begun)
    assert set(project.states("three").values()) <= {"pending", "running", "ok"}
    _, err = waiting.communicate()
    assert waiting.returncode == 0, err
    project.box.start_daemon("slurmdbd")
    names = project.submissions()[0][1].token
    wait_for("the accounts", lambda: names in project.slurm("sacct", "-n", "-X", "-P", "-o", "JobName"))
    assert "0 submitted, 3 done before" in project.finish("three").stderr
    verify(project, "three")


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_on_a_dead_node_begins_again_elsewhere(nodes: int, project: Project, verify: Verify) -> None:
    """It stays away until the job has begun anew elsewhere."""
    project.add_sweep("long", f"nodes = {nodes}\n", steps=20, model="resnet18")
    waiting = project.start("submit", "long", "--cluster", CLUSTER, "--wait")
    wait_for("its last rank", lambda: rank_process(project, rank=nodes - 1))
    if nodes > 1:
        wait_for("its ranks to meet", lambda: any(one.rendezvous_path.exists() for _, one in project.attempts()))
    (job,) = project.jobs("RUNNING")
    names = project.slurm("squeue", "-h", "-j", job, "-o", "%N").strip()
    dead = project.slurm("scontrol", "show", "hostnames", names).split()[-1]
    project.box.kill_node(dead)
    wait_for("the job to begin anew", lambda: project.begun() == 2, 240)
    assert "0 submitted" in project.submit("long").stderr
    _, err = waiting.communicate()
    assert waiting.returncode == 0, err
    project.box.restart_node(dead)
    assert len(project.submissions()) == 1
    verify(project, "long")


def test_a_dead_submits_lock_on_another_host_expires(project: Project, verify: Verify) -> None:
    """submit killed on another login node, holding the lock of the tree."""
    project.add_sweep("three", THREE)
    dying = [sys.executable, "-m", "tests.slurm.faults.dying", "before_the_record"]
    there = [sys.executable, "-m", "tests.slurm.box", "exec", "n2", "--", "env", f"--chdir={project.folder}"]
    words = [*there, *dying, "submit", "three", "--cluster", CLUSTER]
    killed = subprocess.run(words, cwd=ROOT, env=project.environment(), capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (project.tree.submissions / ".lock").exists()
    project.finish("three")
    verify(project, "three")


def test_a_rank_hangs_until_the_time_limit(project: Project, verify: Verify) -> None:
    """time limit, with a rank that hangs (SIGSTOP); then retry."""
    project.add_sweep("slow", "time_limit_min = 1\n")
    waiting = project.start("submit", "slow", "--cluster", CLUSTER, "--wait")
    os.kill(wait_for("its rank", lambda: rank_process(project)), signal.SIGSTOP)
    _, err = waiting.communicate()
    (result,) = project.results("slow")
    assert (waiting.returncode, result["status"]) == (1, "timeout"), (result["error"], err)
    assert "0 submitted, 1 done before" in project.submit("slow").stderr
    assert "1 run submitted again" in project.retry("slow").stderr
    project.finish("slow")
    assert project.begun() == 2
    verify(project, "slow")
