"""Every data-parallel strategy over nodes that shaped links connect, and compared with the reference there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.parallel.strategies import data
from tests.conftest import require_horovod
from tests.slurm.box import Box
from tests.slurm.box.paths import netns
from tests.slurm.test_sweeps import job_ids

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

FAMILY = [key for key in data.STRATEGIES if key != "single"]
NODES = (2, 4)
SWEEP = f"""name = "family"
[fixed]
model = "vit"
dataset = "mnist"
input_size = 8
batch_size = 4
warmup_steps = 1
steps = 4
profile_steps = 0
verify = true
time_limit_min = 5
[grid]
nodes = {list(NODES)}
strategy = {json.dumps(FAMILY)}
[submit]
pack = {len(FAMILY)}
"""


def test_the_family_over_two_and_four_nodes(
    box: Box,
    hpcbench: Callable[..., subprocess.CompletedProcess[str]],
    results: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    """Two jobs, of as many runs each as there are strategies."""
    require_horovod()
    path = tmp_path / "family.toml"
    path.write_text(SWEEP)
    done = hpcbench("run", str(path), "--cluster", "slurmbox")
    found = results()
    problems = {(one["spec"]["strategy"], len(one["ranks"])): one.get("error") for one in found if one.get("error")}
    assert done.returncode == 0, (problems, done.stderr)
    ran = {(one["spec"]["strategy"], one["spec"]["nodes"]) for one in found}
    assert ran == {(key, nodes) for key in FAMILY for nodes in NODES}
    for one in found:
        hosts = {rank["host"] for rank in one["ranks"]}
        assert len(hosts) == one["spec"]["nodes"], one["ranks"]
        assert hosts <= set(box.nodes)
        assert one["status"] == "ok"
        assert one["verification"]["passed"], one["verification"]
        assert one["verification"]["precision"] == STRATEGIES[one["spec"]["strategy"]].widest
    assert len(job_ids(tmp_path)) == len(NODES)


def rate_of(node: str) -> str:
    """What the kernel says of the queue in front of a node's link."""
    command = ["tc", "-n", netns(node), "qdisc", "show", "dev", "eth0", "root"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_links_are_shaped(box: Box) -> None:
    assert box.options is not None
    rate = f"rate {box.options.link // 10**9}Gbit"
    shown = [rate_of(node) for node in box.nodes]
    assert len(shown) == max(NODES)
    assert all("tbf" in one and rate in one for one in shown), shown
