"""Trees of several users: a group under a usual umask, and a scheduler that hides the jobs of others."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.slurm.box import Box, paths
from tests.slurm.faults.conftest import Verify
from tests.slurm.faults.project import CLUSTER, Project, wait_for
from tests.slurm.faults.test_crowds import USERS, shared, start_as

__all__ = ["shared"]

pytestmark = [pytest.mark.slurm, pytest.mark.faults, pytest.mark.timeout(900)]

GROUP = "users"


def ended(process: subprocess.Popen[str]) -> str:
    """What a command has printed on standard error; it must have succeeded."""
    err = process.communicate()[1]
    assert process.returncode == 0, err
    return err


def test_a_group_shares_a_tree_under_umask_022(shared: Project, verify: Verify) -> None:
    """two users of a group under umask 022, after init --shared: both submit, each run goes once."""
    shared.add_sweep("group", "[grid]\nseed = [1, 2]\n")
    done = shared.call("init", str(shared.folder), "--shared", GROUP)
    assert done.returncode == 0, done.stderr
    arguments = ("submit", "group", "--cluster", CLUSTER, "--wait")
    started = [start_as(user, shared, *arguments, umask=0o022, group=GROUP) for user in USERS]
    submitted = sorted(ended(process).split(" runs, ")[1].split(" submitted")[0] for process in started)
    assert submitted == ["0", "2"]
    verify(shared, "group")


@pytest.fixture
def private_jobs(box: Box, alone: None) -> Iterator[None]:
    """SLURM and its accounting show every user their own jobs alone."""
    texts = {path: path.read_text() for path in (paths.SLURM_CONF, paths.SLURMDBD_CONF)}

    def restart(more: str) -> None:
        for daemon in ("slurmctld", "slurmdbd"):
            box.stop_daemon(daemon)
        for path, text in texts.items():
            path.write_text(text + more)
        for daemon in ("slurmdbd", "slurmctld"):
            box.start_daemon(daemon)

    restart("PrivateData=jobs,usage\n")
    yield
    restart("")


def test_hidden_jobs_are_not_run_twice(private_jobs: None, shared: Project, verify: Verify) -> None:
    """PrivateData = jobs: another user's queued jobs are neither lost nor retried."""
    shared.add_sweep("hidden", 'partition = "low"\n[grid]\nseed = [1, 2]\n')
    assert shared.call("init", str(shared.folder), "--shared", GROUP).returncode == 0
    owner, other = USERS
    shared.slurm("scontrol", "update", "PartitionName=low", "State=DOWN")
    try:
        ended(start_as(owner, shared, "submit", "hidden", "--cluster", CLUSTER, umask=0o022, group=GROUP))
        # Longer than a job may take to be registered.
        wait_for("the registration delay", lambda: shared.age_of_newest_submission_s() > 35)
        process = start_as(other, shared, "status", "hidden", umask=0o022, group=GROUP)
        text, _ = process.communicate()
        assert f"submitted by {owner}" in text
        assert "lost" not in text
        for command in ("submit", "retry"):
            ended(start_as(other, shared, command, "hidden", "--cluster", CLUSTER, umask=0o022, group=GROUP))
        assert len(shared.submissions()) == 1
    finally:
        shared.slurm("scontrol", "update", "PartitionName=low", "State=UP")
    ended(start_as(owner, shared, "submit", "hidden", "--cluster", CLUSTER, "--wait", umask=0o022, group=GROUP))
    verify(shared, "hidden")
