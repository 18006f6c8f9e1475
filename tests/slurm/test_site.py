"""A profile written from the live scheduler, on boxes of three shapes: with it the quickstart runs at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import load_cluster_file
from tests.slurm.box import Box, Options

pytestmark = pytest.mark.slurm

Here = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def here(box: Box, tmp_path: Path) -> Here:
    """hpcbench as a person calls it in an empty project, on a login node whose shell knows the scheduler."""
    (tmp_path / "project" / "clusters").mkdir(parents=True)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCBENCH_"))}
        env |= {"SLURM_CONF": str(box.slurm_conf), "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-m", "hpcbench", *arguments]
        cwd = tmp_path / "project"
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=3000)

    return call


@pytest.fixture
def usual_box(box: Box) -> Iterator[Box]:
    """Whatever a test makes of the box, the next one finds the usual one."""
    yield box
    box.up()


def administer(box: Box, *commands: str) -> None:
    env = {**os.environ, "SLURM_CONF": str(box.slurm_conf)}
    for command in commands:
        subprocess.run(command.split(), env=env, check=True, capture_output=True)


def statuses(tmp_path: Path) -> list[str]:
    paths = (tmp_path / "project" / "results").glob("*/runs/*/*/result.json")
    return [json.loads(path.read_bytes())["status"] for path in paths]


def test_a_profile_written_from_the_scheduler_passes_its_check(box: Box, here: Here, tmp_path: Path) -> None:
    done = here("cluster", "init", "mine")
    assert done.returncode == 0, done.stderr
    profile, _ = load_cluster_file(tmp_path / "project" / "clusters" / "mine.toml")
    assert (profile.default_partition, list(profile.partitions)) == ("normal", ["normal", "high", "low"])
    assert (profile.node.cores, profile.node.devices, profile.request.gpus) == (8, 4, "gpus-per-node")
    assert (profile.partitions["low"].max_nodes, profile.partitions["low"].max_time_min) == (4, 1440.0)
    checked = here("check", "clusters/mine.toml")
    assert (checked.returncode, "and the scheduler agrees" in checked.stderr) == (0, True), checked.stderr
    again = here("cluster", "init", "mine")
    assert (again.returncode, "mine.toml exists" in again.stderr) == (2, True)


def test_check_reports_refusals_of_sbatch(box: Box, here: Here, tmp_path: Path) -> None:
    path = tmp_path / "project" / "clusters" / "wrong.toml"
    path.write_text(
        'name = "wrong"\n[partitions.normal]\n[partitions.low]\ndirectives = { reservation = "none" }\n'
        "[partitions.high]\ndirectives = { no-such-option = true }\n"
    )
    done = here("check", str(path))
    assert done.returncode == 2
    assert "wrong.toml:3: sbatch refuses a job in low: " in done.stderr
    assert "reservation" in done.stderr
    assert "wrong.toml:5: sbatch refuses a job in high: unrecognized option '--no-such-option'\n" in done.stderr
    assert "in normal" not in done.stderr


def test_check_sweep_what_the_live_scheduler_would_refuse(box: Box, here: Here, tmp_path: Path) -> None:
    path = tmp_path / "project" / "clusters" / "wrong.toml"
    path.write_text(
        'name = "wrong"\naccount = "nobody"\n[scheduler]\nmax_array_size = 2000\n[node]\ncores = 9\nmemory_bytes = "9 GiB"\n'
        'devices = 5\ngres_type = "h100"\n[request]\ngpus = "gres-typed"\nmemory = "node"\n'
        '[partitions.normal]\nmax_nodes = 5\nmax_time_min = "2 days"\nqos = "none"\n[partitions.lwo]\n'
        '[partitions.high]\nconstraint = "fast"\n'
    )
    done = here("check", str(path))
    assert done.returncode == 2
    lines = {
        int(line.split("wrong.toml:")[1].split(":")[0]) for line in done.stderr.splitlines() if "wrong.toml:" in line
    }
    assert lines == {2, 4, 6, 7, 8, 9, 14, 15, 16, 17, 19}


def test_doctor_probes_a_node_within_a_job(box: Box, here: Here) -> None:
    done = here("doctor", "--cluster", "slurmbox", "--json")
    found = {one["what"]: one for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, done.stdout
    assert found["job"]["detail"].startswith("ran on n")
    assert (found["interface"]["works"], found["torch"]["works"]) == (True, True)
    assert "looks at a node" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "commands", "devices", "submitted", "partition"),
    [
        (
            Options(nodes=3, gpu_type="a100"),
            ("scontrol update PartitionName=high MaxTime=20 MaxNodes=2",),
            ("a100", 4),
            None,
            ("high", 20.0, 2),
        ),
        (
            Options(nodes=2, gpus=0, slots=4, max_array_size=101),
            ("scontrol update PartitionName=low MaxTime=25 MaxNodes=1",),
            (None, 0),
            None,
            ("low", 25.0, 1),
        ),
        (
            Options(nodes=1, gpus=8, cpus=0.8),
            (
                "sacctmgr -i modify user root where account=box set qos=limited,normal defaultqos=limited",
                "sacctmgr -i modify qos limited set maxwall=02:00:00",
            ),
            ("gpu", 8),
            5,
            ("normal", 120.0, 1),
        ),
    ],
    ids=["devices-of-a-type", "no-devices", "a-limiting-qos"],
)
def test_the_quickstart_runs_at_once(
    usual_box: Box, here: Here, tmp_path: Path, options: Options, commands: tuple[str, ...],
    devices: tuple[str | None, int], submitted: int | None, partition: tuple[str, float, int],
) -> None:  # fmt: skip
    usual_box.up(options)
    administer(usual_box, *commands)
    assert here("init", ".").returncode == 0
    done = here("cluster", "init", "mine", "--probe")
    assert done.returncode == 0, done.stderr
    profile, _ = load_cluster_file(tmp_path / "project" / "clusters" / "mine.toml")
    # The devices are pretended: the scheduler hands them out, the probe sees no driver.
    assert (profile.node.device_type, profile.node.devices, profile.device) == (*devices, "cpu")
    name, longest, largest = partition
    found = profile.partitions[name]
    assert (found.max_time_min, found.max_nodes) == (longest, largest)
    assert profile.scheduler.max_submitted_jobs == submitted
    checked = here("check", "clusters/mine.toml")
    assert checked.returncode == 0, checked.stderr
    ran = here("run", "quickstart", "--cluster", "mine")
    assert ran.returncode == 0, ran.stderr
    assert statuses(tmp_path) == ["ok"] * 6
