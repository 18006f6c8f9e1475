"""A submit that is killed with SIGKILL, at every step that it takes, and submitted again."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.slurm.box import Box
from tests.slurm.faults.conftest import Verify
from tests.slurm.faults.project import CLUSTER, Project

pytestmark = [pytest.mark.slurm, pytest.mark.faults, pytest.mark.timeout(900)]

# Two shapes, so two calls of sbatch.
TWO = '[grid]\npartition = ["normal", "low"]\n'

SBATCH = """#!/bin/sh
# The real sbatch, but for call number {call}: that one has its caller killed.
echo >> {folder}/calls
[ "$(wc -l < {folder}/calls)" -eq {call} ] || exec {real} "$@"
case {when} in
    before) ;;
    after) {real} "$@" > /dev/null ;;
    late) setsid sh -c 'sleep 6; exec "$0" "$@"' {real} "$@" > /dev/null 2>&1 & ;;
esac
kill -KILL "$PPID"
sleep 60
"""

IN_PYTHON = {
    "before_the_record": "submit killed before its folder is complete",
    "after_the_record": "submit killed with the record written, before sbatch",
    "before_sbatch": "submit killed with the call noted, before sbatch",
    "between_two": "submit killed between two calls of sbatch",
    "after_the_last": "submit killed after the last sbatch",
}
IN_SBATCH = {
    ("before", 1): "submit and sbatch killed before the scheduler has the job",
    ("after", 1): "submit killed with the job taken, before its answer",
    ("late", 1): "submit killed, the scheduler takes the job 6 s later",
    ("after", 2): "submit killed in the second sbatch, the job taken",
}
FAULTS = [*IN_PYTHON.values(), *IN_SBATCH.values()]
KILLED_WITH_JOBS = {
    IN_PYTHON["between_two"]: 1, IN_PYTHON["after_the_last"]: 2,
    IN_SBATCH["after", 1]: 1, IN_SBATCH["after", 2]: 2,
}  # fmt: skip


def dying(step: str, project: Project) -> list[str]:
    return [sys.executable, "-m", "tests.slurm.faults.dying", step, "submit", "two", "--cluster", CLUSTER]


def with_sbatch(folder: Path, box: Box, when: str, call: int) -> Project:
    bin_folder = folder / "bin"
    project = Project(folder, box, f'retry_s = "2 s"\nbin_folder = "{bin_folder}"')
    bin_folder.mkdir()
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    (bin_folder / "sbatch").write_text(SBATCH.format(folder=bin_folder, call=call, when=when, real=real))
    (bin_folder / "sbatch").chmod(0o755)
    return project


def killed_submits(folder: Path, box: Box) -> dict[str, Project]:
    """All of them at once, in trees of their own: each is killed, and submitted again until it is done."""
    projects: dict[str, Project] = {}
    commands: dict[str, list[str] | None] = {}
    for step, fault in IN_PYTHON.items():
        projects[fault] = Project(folder / step, box)
        commands[fault] = dying(step, projects[fault])
    for (when, call), fault in IN_SBATCH.items():
        projects[fault] = with_sbatch(folder / f"{when}-{call}", box, when, call)
        commands[fault] = None
    for project in projects.values():
        project.add_sweep("two", TWO)
    arguments = ("submit", "two", "--cluster", CLUSTER)
    first = {fault: project.start(*arguments, command=commands[fault]) for fault, project in projects.items()}
    for fault, process in first.items():
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, (fault, process.returncode, err)
    queued = {fault: len(projects[fault].jobs()) for fault in KILLED_WITH_JOBS}
    assert queued == KILLED_WITH_JOBS

    def finish(project: Project) -> None:
        project.submit("two", "--wait")

    with ThreadPoolExecutor(len(projects)) as pool:
        list(pool.map(finish, projects.values()))
    return projects


@pytest.mark.parametrize("scenario", [killed_submits], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_submit_that_is_killed_is_submitted_again(fault: str, scenario: dict[str, Project], verify: Verify) -> None:
    project = scenario[fault]
    assert "0 submitted, 2 done before" in project.finish("two").stderr
    verify(project, "two")
