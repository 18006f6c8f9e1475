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

from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.worker.strategy import resolve_runtime
from tests.conftest import require_horovod
from tests.slurm.box import Box
from tests.slurm.box.paths import netns
from tests.slurm.test_sweeps import job_ids

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

# A shipped table of layers exists for these images: rank 0 of each run need not trace the model for its FLOPs.
IMAGES: dict[str, Any] = {"model": "vit", "dataset": "digits"}
VOLUMES: dict[str, Any] = {"model": "cosmoflow", "dataset": "cosmoflow", "input_size": 8}
Run = tuple[str, dict[str, Any]]
DATA_KEYS = [key for key, entry in STRATEGIES.items() if entry.own_degree == "dp_degree"]
STAGES: dict[str, Any] = {**IMAGES, "micro_batches": 4}
# One key of each family and pattern of messages, on two nodes.
TWO_NODES: list[Run] = [
    *((key, IMAGES) for key in ("ddp", "fsdp", "horovod", "fairscale_sddp")),
    ("filter", {**VOLUMES, "tp_degree": 2}),
    ("channel", {**VOLUMES, "tp_degree": 2}),
    ("spatial", {**VOLUMES, "sp_degree": 2}),
    ("tensor", {**IMAGES, "tp_degree": 2}),
    ("model", IMAGES),
    *((key, STAGES) for key in ("interleaved_1f1b", "pipedream")),
]
OTHERS_ON_TWO_NODES: list[Run] = [
    *((key, IMAGES) for key in DATA_KEYS if key not in dict(TWO_NODES)),
    ("channel", {**VOLUMES, "tp_degree": 2, "options.form": "gathered"}),
    *((key, STAGES) for key in ("gpipe", "1f1b", "zero_bubble")),
]
# What two nodes do not have: a ring with neighbours on two sides, groups over some of the nodes, halos along two axes,
# and stages that both receive and send.
FOUR_NODES: list[Run] = [
    ("ddp", IMAGES),
    ("tensor", {**IMAGES, "dp_degree": 2, "tp_degree": 2}),
    ("spatial", {**VOLUMES, "sp_degree": 4, "options.grid": "1x2x2"}),
    ("zero_bubble", STAGES),
]
# Replicas of a stage, stages of several ranks, and the patterns above with other keys.
OTHERS_ON_FOUR_NODES: list[Run] = [
    ("1f1b", {**STAGES, "options.stage_replicas": "2-1-1"}),
    ("1f1b", {**STAGES, "tp_degree": 2}),
    *((key, IMAGES) for key in DATA_KEYS if key != "ddp"),
    ("channel", {**VOLUMES, "tp_degree": 4}),
    ("filter", {**VOLUMES, "dp_degree": 2, "tp_degree": 2}),
    ("spatial", {**VOLUMES, "dp_degree": 2, "sp_degree": 2}),
    ("1f1b", STAGES),
    ("pipedream", STAGES),
    ("1f1b", {**STAGES, "dp_degree": 2}),
]


def on_nodes(nodes: int, runs: list[Run]) -> list[dict[str, Any]]:
    """Return ``runs`` as parameters of a sweep, one rank on each of ``nodes`` nodes."""
    return [{"strategy": key, "nodes": nodes, **more} for key, more in runs]


RUNS = [*on_nodes(2, TWO_NODES), *on_nodes(4, FOUR_NODES)]
FIXED = {"batch_size": 4, "warmup_steps": 1, "steps": 2, "profile_steps": 0, "verify": True, "time_limit_min": 5}


def sweep(runs: list[dict[str, Any]], pack: int) -> str:
    """Return the text of a sweep of ``runs`` with up to ``pack`` of one number of nodes in a job."""
    parts: list[tuple[str, dict[str, Any]]] = [
        ("fixed", FIXED),
        *(("[include]", run) for run in runs),
        ("submit", {"pack": pack}),
    ]
    lines = ['name = "strategies"']
    for title, keys in parts:
        lines += [f"[{title}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("runs", "pack", "jobs"),
    [
        # Two jobs of two nodes beside one of four: a node that waits for another rank works for the other job.
        pytest.param(RUNS, math.ceil(len(TWO_NODES) / 2), 3, id="2 and 4 nodes"),
        pytest.param(
            on_nodes(4, OTHERS_ON_FOUR_NODES),
            math.ceil(len(OTHERS_ON_FOUR_NODES) / 2),
            2,
            marks=pytest.mark.soak,
            id="other keys on 4 nodes",
        ),
        pytest.param(
            on_nodes(2, OTHERS_ON_TWO_NODES),
            math.ceil(len(OTHERS_ON_TWO_NODES) / 2),
            2,
            marks=pytest.mark.soak,
            id="other keys on 2 nodes",
        ),
    ],
)
def test_every_strategy_runs_ok_over_nodes(
    box: Box,
    hpcbench: Callable[..., subprocess.CompletedProcess[str]],
    results: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
    runs: list[dict[str, Any]],
    pack: int,
    jobs: int,
) -> None:
    """All runs, packed into as few jobs as fill the box."""
    require_horovod()
    path = tmp_path / "strategies.toml"
    path.write_text(sweep(runs, pack))
    done = hpcbench("run", str(path), "--cluster", "slurmbox")
    found = results()
    problems = {(one["spec"]["strategy"], len(one["ranks"])): one.get("error") for one in found if one.get("error")}
    assert done.returncode == 0, (problems, done.stderr)
    ran = Counter((one["spec"]["strategy"], one["spec"]["nodes"]) for one in found)
    assert ran == Counter((run["strategy"], run["nodes"]) for run in runs)
    for one in found:
        hosts = {rank["host"] for rank in one["ranks"]}
        assert len(hosts) == len(one["ranks"]) == one["spec"]["nodes"], one["ranks"]
        assert hosts <= set(box.nodes)
        assert one["status"] == "ok"
        assert one["verification"]["passed"], one["verification"]
        assert one["verification"]["precision"] == resolve_runtime(one["spec"]["strategy"]).widest
    assert len(job_ids(tmp_path)) == jobs


def test_every_strategy_is_among_the_runs() -> None:
    several_ranks = {key for key, entry in STRATEGIES.items() if not entry.drives_several_devices} - {"single"}
    assert {key for key, _ in [*TWO_NODES, *OTHERS_ON_TWO_NODES]} == several_ranks


def rate_of(node: str) -> str:
    """Return the rate of the queue in front of a node's link, as the kernel reports it."""
    command = ["tc", "-n", netns(node), "qdisc", "show", "dev", "eth0", "root"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_links_are_shaped(box: Box) -> None:
    assert box.options is not None
    rate = f"rate {box.options.link // 10**9}Gbit"
    shown = [rate_of(node) for node in box.nodes]
    assert len(shown) == 4
    assert all("tbf" in one and rate in one for one in shown), shown
