"""Nothing runs twice: two guards, each of which holds alone where the other one was taken away (``tests/slurm/plants``).

The first finds out whether an sbatch without an answer was accepted. The second is ``begin``: it starts no run of which
another attempt may be at work.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.box import Box, paths
from tests.slurm.faults.conftest import Verify
from tests.slurm.faults.project import CLUSTER, Project, wait_for
from tests.slurm.faults.test_crowds import USERS, shared, start_as
from tests.slurm.faults.test_shared_trees import GROUP, ended, private_jobs
from tests.slurm.faults.truth import find_truth, run_twice

__all__ = ["private_jobs", "shared"]

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.faults, pytest.mark.timeout(900)]

GUARDS = pytest.mark.parametrize("plants", ["", "settle", "begin"], ids=["both guards", "begin alone", "settle alone"])


@contextlib.contextmanager
def frozen_controller() -> Iterator[None]:
    """slurmctld hangs, as with a slow disk: its sockets take requests, and nothing answers."""
    pid = int((Path(paths.SLURM_CONF).parent / "pid" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def no_run_was_doubled(project: Project, sweep: str) -> None:
    assert run_twice(project) == []
    states = set(project.states(sweep).values())
    assert states == {"ok"}, project.status(sweep)


@pytest.mark.parametrize(
    ("plants", "hang_s"),
    [
        pytest.param("", 45, id="both guards, 45 s", marks=pytest.mark.slurm),
        pytest.param("settle", 45, id="begin alone, 45 s"),
        pytest.param("begin", 45, id="settle alone, 45 s"),
        pytest.param("", 25, id="both guards, 25 s"),
        pytest.param("settle", 25, id="begin alone, 25 s"),
        pytest.param("begin", 25, id="settle alone, 25 s"),
    ],
)
def test_a_controller_that_hangs_during_a_submit(plants: str, hang_s: float, box: Box, tmp_path: Path) -> None:
    project = Project(tmp_path / "project", box, 'warning_s = "20 s"')
    project.variables["CHAOS_PLANTS"] = plants
    project.add_sweep("frozen", "[grid]\nseed = [1, 2]\n")
    process = project.start("submit", "frozen", "--cluster", CLUSTER)
    wait_for("the line before sbatch", lambda: list(project.tree.root.glob("submissions/*/sent-1.jsonl")))
    with frozen_controller():
        time.sleep(hang_s)
    _, err = process.communicate()
    # Whether SLURM's own commands give up before the daemon goes on decides if submit sends, or holds the jobs back.
    assert process.returncode == 0 or (process.returncode == 3 and "run submit again" in err), err
    project.variables.clear()
    project.finish("frozen")
    no_run_was_doubled(project, "frozen")
    if plants != "settle":
        assert find_truth(project, "frozen").doubled == []


@pytest.mark.parametrize("plants", ["", "begin"], ids=["both guards", "records alone"])
def test_a_colleagues_umask_hides_nothing(plants: str, shared: Project, verify: Verify) -> None:
    """two users, one with umask 077: the other sees the submission, and sends nothing."""
    shared.variables["CHAOS_PLANTS"] = plants
    shared.add_sweep("masked", "[grid]\nseed = [1, 2]\n")
    assert shared.call("init", str(shared.folder), "--shared", GROUP).returncode == 0
    owner, other = USERS
    ended(start_as(owner, shared, "submit", "masked", "--cluster", CLUSTER, umask=0o077, group=GROUP))
    err = ended(start_as(other, shared, "submit", "masked", "--cluster", CLUSTER, "--wait", umask=0o022, group=GROUP))
    assert "0 submitted" in err
    verify(shared, "masked")


@pytest.mark.slurm
def test_a_record_that_cannot_be_read_stops_a_submit(shared: Project) -> None:
    shared.add_sweep("closed", "[grid]\nseed = [1, 2]\n")
    assert shared.call("init", str(shared.folder), "--shared", GROUP).returncode == 0
    owner, other = USERS
    ended(start_as(owner, shared, "submit", "closed", "--cluster", CLUSTER, "--wait", umask=0o022, group=GROUP))
    ((folder, _),) = shared.submissions()
    for path in (
        folder / "submission.json",
        folder / "sent-1.jsonl",
        shared.tree.result_path(shared.run_ids("closed")[0]),
    ):
        mode = path.stat().st_mode
        path.chmod(0o600)
        for command in (["submit", "closed", "--cluster", CLUSTER], ["retry", "closed", "--cluster", CLUSTER]):
            process = start_as(other, shared, *command, umask=0o022, group=GROUP)
            _, err = process.communicate()
            assert process.returncode == 3, (path, command, err)
            assert f"cannot read {path}: Permission denied" in err
            assert f"chmod -R g+rX {path}" in err
        path.chmod(mode)
    assert len(shared.submissions()) == 1


@GUARDS
def test_another_account_does_not_resolve_an_sbatch_that_it_cannot_see(
    plants: str, private_jobs: None, shared: Project
) -> None:
    """PrivateData = jobs: a submit died after sbatch had queued its job; another user submits."""
    plants = plants.replace("settle", "accounts")
    bin_folder = shared.folder.parent / "bin"
    bin_folder.mkdir()
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    (bin_folder / "sbatch").write_text(f'#!/bin/sh\n{real} "$@" > /dev/null\nkill -KILL "$PPID"\n')
    (bin_folder / "sbatch").chmod(0o755)
    shared.add_sweep("private", "[grid]\nseed = [1, 2]\n", steps=20, model="resnet18")
    assert shared.call("init", str(shared.folder), "--shared", GROUP).returncode == 0
    owner, other = USERS
    shared.variables["PATH"] = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    died = start_as(owner, shared, "submit", "private", "--cluster", CLUSTER, umask=0o022, group=GROUP)
    died.communicate()
    assert died.returncode == -signal.SIGKILL
    shared.variables.clear()
    shared.variables["CHAOS_PLANTS"] = plants
    process = start_as(other, shared, "submit", "private", "--cluster", CLUSTER, umask=0o022, group=GROUP)
    _, err = process.communicate()
    if "accounts" not in plants:
        assert "0 submitted" in err
    shared.variables.clear()
    ended(start_as(owner, shared, "submit", "private", "--cluster", CLUSTER, "--wait", umask=0o022, group=GROUP))
    no_run_was_doubled(shared, "private")


@pytest.mark.parametrize(
    "plants",
    [pytest.param("", id="both guards", marks=pytest.mark.slurm), pytest.param("order", id="begin alone")],
)
def test_the_clock_of_a_login_node_decides_nothing(plants: str, project: Project) -> None:
    """The first submission came from a login node whose clock is 10 minutes ahead."""
    project.variables["CHAOS_PLANTS"] = plants
    project.add_sweep("skewed", "[grid]\nseed = [1]\n", steps=20, model="resnet18")
    project.variables["CHAOS_CLOCK_SKEW_S"] = "600"
    assert project.submit("skewed").returncode == 0
    wait_for("the run to begin", project.begun)
    assert project.call("cancel", "skewed", "--wait").returncode == 0
    del project.variables["CHAOS_CLOCK_SKEW_S"]
    assert "1 submitted" in project.submit("skewed").stderr
    again = project.submit("skewed").stderr
    if plants != "order":
        assert "0 submitted" in again
    project.variables.clear()
    project.finish("skewed")
    no_run_was_doubled(project, "skewed")


@pytest.mark.slurm
def test_a_measured_result_survives_a_full_disk(project: Project) -> None:
    """The file system is full for 20 s when the run ends."""
    project.add_sweep("full", "[grid]\nseed = [1]\n")
    results = project.folder / "results"
    results.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(results)], check=True)
    try:
        assert project.submit("full").returncode == 0
        (run_id,) = project.run_ids("full")
        ranks = project.tree.run_folder(run_id) / "attempts" / "1"
        wait_for("the ranks to start", (ranks / "out.log").exists)
        with open(results / "ballast", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        time.sleep(30)
        (results / "ballast").unlink()
        project.finish("full")
        (result,) = project.results("full")
        assert (result["status"], result["attempt"]) == ("ok", 1)
    finally:
        subprocess.run(["umount", "--lazy", str(results)], check=True)
