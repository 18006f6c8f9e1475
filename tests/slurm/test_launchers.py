"""Every launcher on the real box: two nodes with two ranks each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcbench.config.load import load_cluster
from tests.conftest import absent, require_horovod
from tests.slurm.box import Box

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SWEEP = """name = "four"
[fixed]
model = "resnet18"
dataset = "digits"
strategy = "{strategy}"
batch_size = 4
warmup_steps = 1
steps = 3
nodes = 2
tasks_per_node = 2
time_limit_min = 5
"""
INTERFACE = '["--allow-run-as-root", "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]'


def install_mpirun() -> None:
    """Open MPI from the distribution, as the box installs its own packages."""
    if shutil.which("mpirun"):
        return
    if not shutil.which("apt-get"):
        absent("mpirun", "Open MPI is not installed, and there is no apt-get to install it")
    command = ["apt-get", "install", "--yes", "--no-install-recommends", "openmpi-bin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        absent("mpirun", f"apt-get could not install openmpi-bin: {done.stderr.strip()[-200:]}")


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize(
    ("launcher", "arguments", "strategy"),
    [
        ("srun", "[]", "ddp"),
        ("torchrun", "[]", "ddp"),
        ("mpirun", INTERFACE, "ddp"),
        ("srun", "[]", "horovod"),
        pytest.param("mpirun", INTERFACE, "horovod", marks=pytest.mark.soak),
    ],
)
def test_two_nodes_with_two_ranks_each(launcher: str, arguments: str, strategy: str, tmp_path: Path) -> None:
    if launcher == "mpirun":
        install_mpirun()
    if strategy == "horovod":
        require_horovod()
    for folder in ("clusters", "sweeps"):
        (tmp_path / folder).mkdir()
    text = load_cluster("slurmbox")[1].text
    text = text.replace('name = "slurmbox"', 'name = "launched"')
    text = text.replace('launcher = "srun"', f'launcher = "{launcher}"\nlauncher_args = {arguments}')
    (tmp_path / "clusters" / "launched.toml").write_text(text)
    (tmp_path / "sweeps" / "four.toml").write_text(SWEEP.format(strategy=strategy))
    env = {**os.environ, "HPCBENCH_RESULTS": str(tmp_path / "results")}
    command = [sys.executable, "-m", "hpcbench", "run", "four", "--cluster", "launched"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (path,) = (tmp_path / "results" / "launched" / "runs").glob("*/*/result.json")
    result = json.loads(path.read_bytes())
    places = [(rank["rank"], rank["node_rank"], rank["local_rank"]) for rank in result["ranks"]]
    assert places == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    hosts = [rank["host"] for rank in result["ranks"]]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert result["provenance"]["launcher"] == launcher
    assert ("horovod" in result["provenance"]) == (strategy == "horovod")


def test_the_box_is_what_the_shipped_profile_says(box: Box) -> None:
    profile, _ = load_cluster("slurmbox")
    assert profile.scheduler.config_file == str(box.slurm_conf)
