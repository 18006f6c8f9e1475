"""Faults around a user's own program: nothing runs twice, nothing is lost, and no process outlives its run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

import pytest

from tests.slurm.faults.conftest import Verify
from tests.slurm.faults.project import CLUSTER, Project, wait_for

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.faults, pytest.mark.timeout(900)]

TRAIN = """\
import os, sys, time
for step in range(int(sys.argv[1])):
    time.sleep(1)
    print("step", step, "elapsed 1.0", flush=True)
print("training completed")
"""
SWEEP = """\
name = "{name}"
[command]
argv = [{python}, "{{HPCBENCH_SWEEP_FOLDER}}/train.py", "{{seconds}}"]
parameters.seconds = {{ type = "int", default = 5 }}
must_match = ["training completed"]
[[command.metrics]]
name = "step_time"
unit = "s"
better = "lower"
per = "step"
pattern = 'elapsed ([0-9.]+)'
[fixed]
nodes = {nodes}
warmup_steps = 1
time_limit_min = 5
parameters.seconds = {seconds}
"""


def add_command(project: Project, name: str, nodes: int, seconds: int) -> None:
    (project.folder / "sweeps" / "train.py").write_text(TRAIN)
    text = SWEEP.format(name=name, python=json.dumps(sys.executable), nodes=nodes, seconds=seconds)
    (project.folder / "sweeps" / f"{name}.toml").write_text(text)


def programs(project: Project) -> list[str]:
    """The processes of the program; the nodes of the box share this machine."""
    script = str(project.folder / "sweeps" / "train.py")
    found = subprocess.run(["pgrep", "-f", f"^[^ ]*python[^ ]* {script}"], capture_output=True, text=True, check=False)
    return found.stdout.split()


@pytest.mark.slurm
def test_a_requeued_job_starts_the_program_once_more(project: Project, verify: Verify) -> None:
    add_command(project, "again", nodes=2, seconds=25)
    assert project.submit("again").returncode == 0
    wait_for("both processes", lambda: len(programs(project)) == 2)
    first = programs(project)
    (job,) = project.jobs("RUNNING")
    project.slurm("scontrol", "requeue", job)
    wait_for("the first processes to end", lambda: not set(first) & set(programs(project)))
    wait_for("the second start", lambda: project.begun() == 2, 240)
    project.finish("again")
    verify(project, "again")
    (result,) = project.results("again")
    assert (result["status"], result["attempt"], result["step_times_s"]) == ("ok", 2, [1.0] * 24)
    assert programs(project) == []


def test_a_program_on_a_dead_node_begins_again_elsewhere(project: Project, verify: Verify) -> None:
    add_command(project, "lost", nodes=2, seconds=25)
    waiting = project.start("submit", "lost", "--cluster", CLUSTER, "--wait")
    wait_for("both processes", lambda: len(programs(project)) == 2)
    (job,) = project.jobs("RUNNING")
    names = project.slurm("squeue", "-h", "-j", job, "-o", "%N").strip()
    dead = project.slurm("scontrol", "show", "hostnames", names).split()[-1]
    project.box.kill_node(dead)
    try:
        wait_for("the job to begin anew", lambda: project.begun() == 2, 240)
        _, err = waiting.communicate()
        assert waiting.returncode == 0, err
    finally:
        project.box.restart_node(dead)
    verify(project, "lost")
    assert programs(project) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_wrapper_takes_its_program_with_it(project: Project, rank: int) -> None:
    add_command(project, "killed", nodes=2, seconds=120)
    assert project.submit("killed").returncode == 0
    wait_for("both processes", lambda: len(programs(project)) == 2)
    program = sorted(programs(project), key=int)[rank]
    wrapper = subprocess.run(["ps", "-o", "ppid=", "-p", program], capture_output=True, text=True, check=True)
    subprocess.run(["kill", "-9", wrapper.stdout.strip()], check=True)
    project.submit("killed", "--wait")
    wait_for("all programs to end", lambda: programs(project) == [], 60)
    (result,) = project.results("killed")
    assert result["status"] == "failed"
    assert result["error"]["message"]


def test_a_result_of_a_command_survives_a_full_disk(project: Project) -> None:
    add_command(project, "full", nodes=1, seconds=8)
    results = project.folder / "results"
    results.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(results)], check=True)
    try:
        assert project.submit("full").returncode == 0
        wait_for("the program", lambda: programs(project))
        with open(results / "ballast", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        time.sleep(20)
        (results / "ballast").unlink()
        project.finish("full")
        (result,) = project.results("full")
        assert (result["status"], result["attempt"], result["step_times_s"]) == ("ok", 1, [1.0] * 7)
    finally:
        subprocess.run(["umount", "--lazy", str(results)], check=True)
