"""Every strategy over nodes that shaped links connect, and compared with the reference there."""

from __future__ import annotations

import json
import math
import subprocess
from collections import Counter
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

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

NODES = (2, 4)
IMAGES = {"model": "vit", "dataset": "mnist", "input_size": 8, "steps": 4}
VOLUMES = {"model": "cosmoflow", "dataset": "cosmoflow", "input_size": 8, "steps": 3}
DATA_KEYS = [key for key in data.STRATEGIES if key != "single"]
# On four nodes a data-parallel key sends along a longer ring, and nothing else changes: one for each library.
DATA = [
    *((key, 2, IMAGES) for key in DATA_KEYS),
    *((key, 4, IMAGES) for key in ("ddp", "fsdp", "horovod", "fairscale_fsdp")),
]
MODEL = [
    ("filter", 2, {**VOLUMES, "tp_degree": 2}),
    ("channel", 2, {**VOLUMES, "tp_degree": 2, "options.form": "gathered"}),
    ("channel", 4, {**VOLUMES, "tp_degree": 4}),
    ("filter", 4, {**VOLUMES, "dp_degree": 2, "tp_degree": 2}),
    ("spatial", 2, {**VOLUMES, "sp_degree": 2}),
    ("spatial", 4, {**VOLUMES, "sp_degree": 4, "options.grid": "1x2x2"}),
    ("spatial", 4, {**VOLUMES, "dp_degree": 2, "sp_degree": 2}),
    ("tensor", 2, {**IMAGES, "tp_degree": 2}),
    ("tensor", 4, {**IMAGES, "dp_degree": 2, "tp_degree": 2}),
]
STAGES = {**IMAGES, "micro_batches": 4}
PIPELINES = [
    ("model", 2, IMAGES),
    ("gpipe", 2, STAGES),
    *((key, nodes, STAGES) for key in ("1f1b", "zero_bubble") for nodes in NODES),
    ("interleaved_1f1b", 2, STAGES),
    ("pipedream", 2, STAGES),
    ("pipedream", 4, STAGES),
    ("1f1b", 4, {**STAGES, "dp_degree": 2}),
    ("1f1b", 4, {**STAGES, "options.stage_replicas": "2-1-1"}),
    ("1f1b", 4, {**STAGES, "tp_degree": 2}),
]
RUNS: list[dict[str, Any]] = [
    {"strategy": key, "nodes": nodes, **more} for key, nodes, more in (*DATA, *MODEL, *PIPELINES)
]
FIXED = {"batch_size": 4, "warmup_steps": 1, "profile_steps": 0, "verify": True, "time_limit_min": 5}


def sweep(runs: list[dict[str, Any]], jobs: int) -> str:
    """Return the text of a sweep of ``runs``, packed into ``jobs`` jobs."""
    parts: list[tuple[str, dict[str, Any]]] = [
        ("fixed", FIXED),
        *(("[include]", run) for run in runs),
        ("submit", {"pack": math.ceil(len(runs) / jobs)}),
    ]
    lines = ['name = "strategies"']
    for title, keys in parts:
        lines += [f"[{title}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines)


OTHERS_ON_FOUR_NODES = [
    {"strategy": key, "nodes": 4, **IMAGES} for key in DATA_KEYS if (key, 4, IMAGES) not in DATA
]  # fmt: skip


@pytest.mark.parametrize(
    "runs",
    [
        *(pytest.param([run for run in RUNS if run["nodes"] == nodes], id=f"{nodes} nodes") for nodes in NODES),
        pytest.param(OTHERS_ON_FOUR_NODES, marks=pytest.mark.soak, id="other data-parallel keys on 4 nodes"),
    ],
)
def test_every_strategy_over_nodes(
    box: Box,
    hpcbench: Callable[..., subprocess.CompletedProcess[str]],
    results: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
    runs: list[dict[str, Any]],
) -> None:
    """All runs of a number of nodes, packed into as many jobs as the box runs at once."""
    require_horovod()
    (nodes,) = {run["nodes"] for run in runs}
    path = tmp_path / "strategies.toml"
    jobs = max(NODES) // nodes
    path.write_text(sweep(runs, jobs))
    done = hpcbench("run", str(path), "--cluster", "slurmbox")
    found = results()
    problems = {(one["spec"]["strategy"], len(one["ranks"])): one.get("error") for one in found if one.get("error")}
    assert done.returncode == 0, (problems, done.stderr)
    ran = Counter(one["spec"]["strategy"] for one in found)
    assert ran == Counter(str(run["strategy"]) for run in runs)
    for one in found:
        hosts = {rank["host"] for rank in one["ranks"]}
        assert len(hosts) == one["spec"]["nodes"] == nodes, one["ranks"]
        assert hosts <= set(box.nodes)
        assert one["status"] == "ok"
        assert one["verification"]["passed"], one["verification"]
        assert one["verification"]["precision"] == STRATEGIES[one["spec"]["strategy"]].widest
    assert len(job_ids(tmp_path)) == jobs


def rate_of(node: str) -> str:
    """Return the rate of the queue in front of a node's link, as the kernel reports it."""
    command = ["tc", "-n", netns(node), "qdisc", "show", "dev", "eth0", "root"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_links_are_shaped(box: Box) -> None:
    assert box.options is not None
    rate = f"rate {box.options.link // 10**9}Gbit"
    shown = [rate_of(node) for node in box.nodes]
    assert len(shown) == max(NODES)
    assert all("tbf" in one and rate in one for one in shown), shown
