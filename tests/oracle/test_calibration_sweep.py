"""The sweep of a calibration: as it is for this machine, and what becomes of it on others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tomli

from hpcbench.config.load import Sweep
from hpcbench.config.profiles import load_cluster
from hpcbench.config.spec import run_id
from hpcbench.oracle.calibration.sweep import (
    Size,
    World,
    collective_worlds,
    size_of,
    strategy_worlds,
    sweep_text,
)
from hpcbench.results.store import ClusterTree
from hpcbench.submit.plan import make_plan

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "calibration-local.toml"


def test_the_sweep_of_a_local_machine_with_two_cores() -> None:
    profile, _ = load_cluster("local")
    assert sweep_text(profile, None, 2, 0) == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("cluster", "partition", "expected"),
    [
        ("local", None, Size(1, 2)),
        ("slurmbox", None, Size(4, 8)),
        ("perlmutter", None, Size(4, 4)),
    ],
)
def test_sizes(cluster: str, partition: str | None, expected: Size) -> None:
    assert size_of(load_cluster(cluster)[0], partition, 2) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (Size(1, 1), []),
        (Size(1, 2), [World(1, 2)]),
        (Size(2, 1), [World(2, 1)]),
        (Size(4, 4), [World(1, 2), World(1, 4), World(2, 1), World(4, 1), World(2, 4)]),
        (Size(2, 64), [World(1, 2), World(1, 4), World(2, 1), World(2, 4)]),
    ],
)
def test_placements_of_collectives(size: Size, expected: list[World]) -> None:
    assert collective_worlds(size) == expected


@pytest.mark.parametrize(
    ("size", "device", "expected"),
    [
        (Size(1, 2), "cpu", [World(1, 2)]),
        (Size(1, 4), "cpu", [World(1, 2), World(1, 4)]),
        (Size(4, 8), "cpu", [World(2, 1), World(4, 1)]),
        (Size(3, 8), "cpu", [World(2, 1)]),
        (Size(4, 4), "cuda", [World(1, 2), World(1, 4)]),
        (Size(4, 1), "cuda", [World(2, 1), World(4, 1)]),
        (Size(1, 1), "cuda", []),
    ],
)
def test_placements_of_strategies(size: Size, device: str, expected: list[World]) -> None:
    assert strategy_worlds(size, device) == expected


@pytest.mark.parametrize("cluster", ["local", "slurmbox", "perlmutter", "frontier"])
def test_every_round_has_its_own_runs(cluster: str, tmp_path: Path, write_sweep: Callable[[str], Sweep]) -> None:
    profile, _ = load_cluster(cluster)
    known: set[str] = set()
    for number in (0, 1):
        text = sweep_text(profile, None, 2, number)
        plan = make_plan(write_sweep(text), profile, ClusterTree(tmp_path))
        assert known.isdisjoint(plan.runs)
        known |= {run_id(spec) for spec in plan.runs.values()}
        # What a pipeline of four ranks cannot be cut into is all that is dropped.
        assert {point.point["strategy"] for point in plan.dropped} <= {"interleaved_1f1b"}
        points = tomli.loads(text)["include"]
        assert len(plan.runs) == len(points) - len(plan.dropped)


def test_the_partition_is_said() -> None:
    profile, _ = load_cluster("slurmbox")
    parsed = tomli.loads(sweep_text(profile, "high", 2, 3, 5.0))
    assert parsed["name"] == "calibration-high-3"
    assert parsed["fixed"]["partition"] == "high"
    assert parsed["fixed"]["seed"] == 300
    options = [one["options"] for one in parsed["include"] if one["strategy"].startswith("probe_")]
    assert {one["budget_s"] for one in options} == {5.0}
