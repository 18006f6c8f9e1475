"""Several people at once, and more jobs than the scheduler takes."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpcbench.submit.lock import LockHolder
from tests.slurm.box import Box
from tests.slurm.faults.conftest import Verify
from tests.slurm.faults.project import CLUSTER, Project, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.faults, pytest.mark.timeout(900)]

USERS = ("boxuser1", "boxuser2")


@pytest.fixture
def shared(box: Box) -> Iterator[Project]:
    """A project in a folder where everybody may write, and an interpreter that everybody may run.

    pytest's folders are closed to others, and so may be the folder that holds this interpreter.
    """
    folder = Path(tempfile.mkdtemp(prefix="hpcbench-shared-", dir="/var/tmp"))
    folder.chmod(0o777)
    python = folder / "python"
    python.mkdir()
    subprocess.run(["mount", "-o", "bind,ro", sys.base_prefix, str(python)], check=True)
    try:
        yield Project(folder / "project", box)
    finally:
        # Lazily: what the last of the users' commands left behind may still be closing its files.
        subprocess.run(["umount", "--lazy", str(python)], check=True)
        shutil.rmtree(folder)


def start_as(
    user: str, project: Project, *arguments: str, umask: int = 0, group: str | None = None
) -> subprocess.Popen[str]:
    """The command as another user of the machine, whose files the others may change with the default ``umask``.

    ``group``: a further group of the user.
    """
    account = pwd.getpwnam(user)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = os.pathsep.join((project.environment()["PYTHONPATH"], sysconfig.get_paths()["purelib"]))
    env = {**project.environment(), "HOME": account.pw_dir, "USER": user, "LOGNAME": user, "PYTHONPATH": packages}
    env.pop("XDG_CONFIG_HOME", None)
    command = [str(project.folder.parent / "python" / "bin" / version), "-m", "hpcbench", *arguments]
    return subprocess.Popen(
        command, cwd=project.folder, env=env, user=account.pw_uid, group=account.pw_gid, extra_groups=[] if group is None else [grp.getgrnam(group).gr_gid], umask=umask,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_two_users_submit_the_same_sweep_at_once(shared: Project, verify: Verify) -> None:
    """two users submit a sweep into one tree at once, twice each, over a dead one's lock."""
    shared.add_sweep("both", '[grid]\npartition = ["normal", "low"]\nseed = [1, 2]\n')
    shared.tree.submissions.mkdir(parents=True)
    for folder in (shared.tree.submissions, shared.tree.root, shared.tree.root.parent):
        folder.chmod(0o777)
    dead = LockHolder(owner="nobody", host=socket.gethostname(), pid=2**22 + 1, since_unix_s=0.0, lease_s=120.0)
    (shared.tree.submissions / ".lock").write_bytes(msgspec.json.encode(dead))
    arguments = ("submit", "both", "--cluster", CLUSTER, "--wait")
    started = [start_as(user, shared, *arguments) for user in (*USERS, *USERS)]
    ended = [(process.communicate()[1], process.returncode) for process in started]
    assert [code for _, code in ended] == [0] * 4, ended
    submitted = sorted(err.split(" runs, ")[1].split(" submitted")[0] for err, _ in ended)
    assert submitted == ["0", "0", "0", "4"], ended
    verify(shared, "both")


@pytest.mark.parametrize("small_arrays", [3], indirect=True)
def test_more_runs_than_an_array_takes_are_all_submitted(small_arrays: None, project: Project, verify: Verify) -> None:
    """MaxArraySize 3 and 4 runs, submit killed between the two arrays."""
    project.add_sweep("four", "[grid]\nseed = [1, 2, 3, 4]\n")
    dying = [sys.executable, "-m", "tests.slurm.faults.dying", "between_two", "submit", "four", "--cluster", CLUSTER]
    assert project.call(command=dying).returncode == -9
    project.finish("four")
    ((_, record),) = project.submissions()
    lines = project.slurm("sacct", "-n", "-X", "-P", "-o", "JobName").splitlines()
    names = {line for line in lines if record.token in line}
    assert {name.rpartition("-0.")[2] for name in names} == {"0-2", "3-3"}
    verify(project, "four")


def too_many_jobs(folder: Path, box: Box) -> Project:
    project = Project(folder / "project", box)
    project.add_sweep("seven", f'partition = "limited"\n[grid]\nseed = {list(range(7))}\n')
    first = project.submit("seven")
    assert (first.returncode, "2 jobs held back" in first.stderr) == (0, True), first.stderr
    assert list(project.states("seven").values()).count("waiting") == 2
    wait_for("a place in the queue", lambda: len(project.jobs()) < 5, 600)
    second = project.submit("seven")
    assert second.returncode == 0, second.stderr
    assert "0 submitted" in second.stderr
    assert list(project.states("seven").values()).count("waiting") < 2
    project.finish("seven")
    return project


@pytest.mark.parametrize("scenario", [too_many_jobs], indirect=True)
def test_more_jobs_than_a_user_may_submit_wait(scenario: Project, verify: Verify) -> None:
    """MaxSubmitJobs 5 and 7 runs: the rest goes out with the next submit and with --wait."""
    verify(scenario, "seven")
