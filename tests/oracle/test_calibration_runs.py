"""The sweep of a calibration: as it is for this machine, and what becomes of it on others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tomli

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import run_id
from hpcbench.config.sweep_loader import Sweep
from hpcbench.oracle.calibration.calibration_runs import (
    CalibrationScale,
    calibration_sweep_toml,
    cluster_size,
    collective_scales,
    strategy_scales,
)
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import make_plan

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "calibration-local.toml"


def test_the_sweep_of_a_local_machine_with_two_cores() -> None:
    profile, _ = load_cluster("local")
    assert calibration_sweep_toml(profile, None, 2, 0) == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("cluster", "partition", "expected"),
    [
        ("local", None, CalibrationScale(1, 2)),
        ("slurmbox", None, CalibrationScale(4, 8)),
        ("perlmutter", None, CalibrationScale(4, 4)),
    ],
)
def test_the_calibration_size_follows_the_clusters_partition(
    cluster: str, partition: str | None, expected: CalibrationScale
) -> None:
    assert cluster_size(load_cluster(cluster)[0], partition, 2) == expected


@pytest.mark.parametrize(("devices", "ranks"), [(None, 1), (1, 1), (2, 2)])
def test_ranks_of_this_machine_have_a_gpu_each(devices: int | None, ranks: int) -> None:
    """16 cores and one GPU: nothing is planned for two ranks."""
    local, _ = load_cluster("local")
    node = local.node.model_copy(update={"devices": devices})
    profile = local.model_copy(update={"device": "cuda", "node": node})
    assert cluster_size(profile, None, 16) == CalibrationScale(1, ranks)
    text = calibration_sweep_toml(profile, None, 16, 0)
    assert ("tasks_per_node = 2" in text) == (ranks > 1)
    assert "tasks_per_node = 4" not in text


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (CalibrationScale(1, 1), []),
        (CalibrationScale(1, 2), [CalibrationScale(1, 2)]),
        (CalibrationScale(2, 1), [CalibrationScale(2, 1)]),
        (
            CalibrationScale(4, 4),
            [
                CalibrationScale(1, 2),
                CalibrationScale(1, 4),
                CalibrationScale(2, 1),
                CalibrationScale(4, 1),
                CalibrationScale(2, 4),
            ],
        ),
        (
            CalibrationScale(2, 64),
            [CalibrationScale(1, 2), CalibrationScale(1, 4), CalibrationScale(2, 1), CalibrationScale(2, 4)],
        ),
    ],
)
def test_collectives_are_probed_inside_and_between_nodes(
    size: CalibrationScale, expected: list[CalibrationScale]
) -> None:
    assert collective_scales(size) == expected


@pytest.mark.parametrize(
    ("size", "device", "expected"),
    [
        (CalibrationScale(1, 2), "cpu", [CalibrationScale(1, 2)]),
        (CalibrationScale(1, 4), "cpu", [CalibrationScale(1, 2), CalibrationScale(1, 4)]),
        (CalibrationScale(4, 8), "cpu", [CalibrationScale(2, 1), CalibrationScale(4, 1)]),
        (CalibrationScale(3, 8), "cpu", [CalibrationScale(2, 1)]),
        (CalibrationScale(4, 4), "cuda", [CalibrationScale(1, 2), CalibrationScale(1, 4)]),
        (CalibrationScale(4, 1), "cuda", [CalibrationScale(2, 1), CalibrationScale(4, 1)]),
        (CalibrationScale(1, 1), "cuda", []),
    ],
)
def test_strategies_are_probed_inside_and_between_nodes(
    size: CalibrationScale, device: str, expected: list[CalibrationScale]
) -> None:
    assert strategy_scales(size, device) == expected


@pytest.mark.parametrize("cluster", ["local", "slurmbox", "perlmutter", "frontier"])
def test_every_round_has_its_own_runs(cluster: str, tmp_path: Path, write_sweep: Callable[[str], Sweep]) -> None:
    profile, _ = load_cluster(cluster)
    known: set[str] = set()
    for number in (0, 1):
        text = calibration_sweep_toml(profile, None, 2, number)
        plan = make_plan(write_sweep(text), profile, ClusterTree(tmp_path))
        assert known.isdisjoint(plan.runs)
        known |= {run_id(spec) for spec in plan.runs.values()}
        # What a pipeline of four ranks cannot be cut into is all that is dropped.
        assert {point.point["strategy"] for point in plan.dropped} <= {"interleaved_1f1b"}
        points = tomli.loads(text)["include"]
        assert len(plan.runs) == len(points) - len(plan.dropped)


def test_a_calibration_sweep_names_its_partition() -> None:
    profile, _ = load_cluster("slurmbox")
    parsed = tomli.loads(calibration_sweep_toml(profile, "high", 2, 3, 5.0))
    assert parsed["name"] == "calibration-high-3"
    assert parsed["fixed"]["partition"] == "high"
    assert parsed["fixed"]["seed"] == 300
    options = [one["options"] for one in parsed["include"] if one["strategy"].startswith("probe_")]
    assert {one["budget_s"] for one in options} == {5.0}
