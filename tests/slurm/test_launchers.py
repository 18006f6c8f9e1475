"""Every launcher on the real box: two nodes with two ranks each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpcbench.config.cluster_profile import load_cluster
from tests.conftest import require_horovod
from tests.packages import require_mpirun
from tests.slurm.box import Box

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SWEEP = """name = "four"
[fixed]
model = "vit"
dataset = "digits"
strategy = "{strategy}"
batch_size = 4
warmup_steps = 1
steps = 3
profile_steps = 0
nodes = 2
tasks_per_node = 2
time_limit_min = 5
"""
# As it was when the tests were collected: launches run in threads, while tests change and restore variables.
ENVIRONMENT = dict(os.environ)
INTERFACE = '["--allow-run-as-root", "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]'


class Launch(NamedTuple):
    """The launcher and the strategy of a run."""

    launcher: str
    arguments: str
    strategy: str

    def run(self, folder: Path) -> dict[str, Any]:
        """The result of a sweep of one run, in a project in ``folder``."""
        if self.launcher == "mpirun":
            require_mpirun()
        if self.strategy == "horovod":
            require_horovod()
        for name in ("clusters", "sweeps"):
            (folder / name).mkdir()
        text = load_cluster("slurmbox")[1].text
        text = text.replace('name = "slurmbox"', 'name = "launched"')
        text = text.replace('launcher = "srun"', f'launcher = "{self.launcher}"\nlauncher_args = {self.arguments}')
        (folder / "clusters" / "launched.toml").write_text(text)
        (folder / "sweeps" / "four.toml").write_text(SWEEP.format(strategy=self.strategy))
        env = {**ENVIRONMENT, "HPCBENCH_RESULTS": str(folder / "results"), "XDG_CONFIG_HOME": str(folder / "xdg")}
        command = [sys.executable, "-m", "hpcbench", "run", "four", "--cluster", "launched"]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        (path,) = (folder / "results" / "launched" / "runs").glob("*/*/result.json")
        result: dict[str, Any] = json.loads(path.read_bytes())
        return result


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, box: Box, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Launch, Future[dict[str, Any]]]]:
    """All that are selected, at once: two of them fill the box, and each waits for the scheduler much of the time."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    params = [getattr(getattr(item, "callspec", None), "params", {}) for item in items]
    launches = [one["launch"] for one in params if "launch" in one]
    with ThreadPoolExecutor(len(launches)) as pool:
        yield {one: pool.submit(one.run, tmp_path_factory.mktemp(one.launcher)) for one in launches}


@pytest.mark.parametrize(
    "launch",
    [
        Launch("srun", "[]", "ddp"),
        Launch("torchrun", "[]", "ddp"),
        Launch("mpirun", INTERFACE, "ddp"),
        Launch("srun", "[]", "horovod"),
        pytest.param(Launch("mpirun", INTERFACE, "horovod"), marks=pytest.mark.soak),
    ],
    ids=lambda launch: f"{launch.launcher}-{launch.strategy}",
)
def test_ranks_on_two_nodes_have_their_places(launch: Launch, started: dict[Launch, Future[dict[str, Any]]]) -> None:
    result = started[launch].result()
    places = [(rank["rank"], rank["node_rank"], rank["local_rank"]) for rank in result["ranks"]]
    assert places == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    hosts = [rank["host"] for rank in result["ranks"]]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert result["provenance"]["launcher"] == launch.launcher
    assert ("horovod" in result["provenance"]) == (launch.strategy == "horovod")


def test_the_shipped_profile_describes_the_box(box: Box) -> None:
    profile, _ = load_cluster("slurmbox")
    assert profile.scheduler.config_file == str(box.slurm_conf)
