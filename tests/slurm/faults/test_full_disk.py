"""A results tree whose disk is full: before submit, before the job begins, while it runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.faults.conftest import Verify
from tests.slurm.faults.project import CLUSTER, Project, rank_process, wait_for

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.faults, pytest.mark.timeout(600)]


@pytest.fixture
def disk(project: Project) -> Iterator[Path]:
    """A small file system in the place of the results tree; the nodes see it too."""
    folder = project.folder / "results"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "fill", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(disk).f_bavail == 0


def test_the_disk_is_full_at_submit(project: Project, disk: Path, verify: Verify) -> None:
    """disk full at submit; then freed."""
    project.add_sweep("two", "[grid]\nseed = [1, 2]\n")
    fill(disk)
    full = project.submit("two")
    assert full.returncode == 3, full.stderr
    assert "No space left on device" in full.stderr
    assert "Traceback" not in full.stderr
    assert project.submissions() == []
    (disk / "fill").unlink()
    assert "2 submitted" in project.finish("two").stderr
    verify(project, "two")


def test_the_disk_is_full_when_the_job_begins(project: Project, disk: Path, verify: Verify) -> None:
    """disk full when the jobs begin; then freed and submitted again."""
    project.add_sweep("two", "[grid]\nseed = [1, 2]\n")
    project.slurm("scontrol", "update", "partitionname=normal", "state=down")
    try:
        assert project.submit("two").returncode == 0
        fill(disk)
    finally:
        project.slurm("scontrol", "update", "partitionname=normal", "state=up")
    wait_for("the jobs to end", lambda: not project.jobs())
    assert (project.begun(), project.results("two")) == (0, [])
    assert set(project.states("two").values()) == {"failed"}
    (disk / "fill").unlink()
    project.finish("two")
    verify(project, "two")


def test_the_disk_is_full_while_a_run_is_under_way(project: Project, disk: Path, verify: Verify) -> None:
    """disk full while a run is under way; then freed and submitted again."""
    project.add_sweep("two", "[grid]\nseed = [1, 2]\n", steps=5)
    waiting = project.start("submit", "two", "--cluster", CLUSTER, "--wait")
    wait_for("its ranks", lambda: rank_process(project, index=0) and rank_process(project, index=1))
    fill(disk)
    _, err = waiting.communicate()
    assert waiting.returncode == 1, err
    assert "Traceback" not in err
    assert set(project.states("two").values()) == {"failed"}
    (disk / "fill").unlink()
    project.finish("two")
    assert project.begun() == 4
    verify(project, "two")
