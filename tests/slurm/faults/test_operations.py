"""Operations on a real SLURM: a broken node, a tree that is moved, and the requests of a cancel."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hpcbench.render.job_script import BEGIN_PAUSE_S
from tests.slurm.box import Box
from tests.slurm.faults.conftest import Verify
from tests.slurm.faults.project import CLUSTER, Project, rank_process, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.faults, pytest.mark.timeout(900)]

BROKEN_NODE = "n2"
IMPORTS_S = 4.0
"""Processor time after which a rank has imported torch and has begun to train."""


def broken_node(folder: Path, box: Box) -> Project:
    """A sweep of single-node runs where Python cannot start on one node."""
    project = Project(folder / "project", box)
    python = folder / "python"
    python.write_text(
        f'#!/bin/bash\n[ "$(hostname)" != {BROKEN_NODE} ] || {{ echo "libpython: cannot open" >&2; exit 127; }}\n'
        f'exec {project.command()[0]} "$@"\n'
    )
    python.chmod(0o755)
    profile = project.folder / "clusters" / f"{CLUSTER}.toml"
    profile.write_text(
        f'default_environment = "wrapped"\n{profile.read_text()}[environments.wrapped]\npython = "{python}"\n'
    )
    project.add_sweep("eaten", f"[grid]\nseed = {list(range(8))}\n")
    project.submit("eaten", "--wait")
    return project


@pytest.mark.parametrize("scenario", [broken_node], indirect=True)
def test_jobs_hold_a_broken_node_so_that_others_run_the_rest(scenario: Project) -> None:
    """Python is missing on one node: each failed job held it, runs succeed on the others, and the reason names the node.

    The number of failed runs depends on the speed of the other nodes; while one job holds the broken node, these are free.
    The job of a failure that has been recorded as a result is named in its reason.
    """
    runs = scenario.status("eaten")
    failed = [run for run in runs if run["state"] != "ok"]
    assert len(runs) - len(failed) >= 3, "each of the three other nodes runs the first job that it gets"
    for run in failed:
        recorded = re.match(r"job (\d+_\d+): ", run["reason"])
        job_id = recorded[1] if recorded else run["job_id"]
        assert job_id, run
        held_s = scenario.slurm("sacct", "-n", "-X", "-P", "-j", job_id, "-o", "ElapsedRaw")
        assert int(held_s) >= BEGIN_PAUSE_S
        assert f" on {BROKEN_NODE}" in run["reason"]
        assert "libpython: cannot open" in run["reason"]


def test_ranks_do_not_make_a_moved_tree_anew(project: Project, verify: Verify) -> None:
    """the tree is moved while runs are under way, and moved back."""
    project.add_sweep("moved", "[grid]\nseed = [1, 2]\n", steps=200)
    assert project.submit("moved").returncode == 0
    # A rank that has not read its task yet would end without writing anything.
    wait_for("the ranks to train", lambda: all(processor_s(project, index) > IMPORTS_S for index in (0, 1)))
    aside = project.folder / "moved-results"
    root = project.tree.root.parent
    root.rename(aside)
    wait_for("the jobs to end", lambda: not project.slurm("squeue", "-h", "-o", "%i").strip(), 300)
    assert not root.exists()
    aside.rename(root)
    project.finish("moved")
    verify(project, "moved")


def processor_s(project: Project, index: int) -> float:
    """Processor time of rank 0 of the run; 0 before it exists."""
    rank = rank_process(project, index)
    if rank is None:
        return 0.0
    user, system = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_a_cancel_sends_one_request_for_each_array(project: Project) -> None:
    """2,000 queued runs are cancelled with at most ten requests."""
    project.add_sweep("many", f'partition = "low"\n[grid]\nseed = {list(range(2000))}\n')
    project.slurm("scontrol", "update", "PartitionName=low", "State=DOWN")
    try:
        assert project.submit("many").returncode == 0
        before = kill_requests(project)
        done = project.call("cancel", "many")
        assert done.returncode == 0, done.stderr
        assert kill_requests(project) - before <= 10
        wait_for("the queue to be empty", lambda: not project.jobs("PENDING"))
    finally:
        project.slurm("scontrol", "update", "PartitionName=low", "State=UP")


def kill_requests(project: Project) -> int:
    """Requests to cancel jobs that the controller has received since its start."""
    counts = re.findall(r"REQUEST_KILL_JOB\s*\(\s*\d+\)\s*count:(\d+)", project.slurm("sdiag"))
    return sum(map(int, counts[:1]))
