"""Calibrations are kept whole, found by date, and named when they are damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.errors import StorageError
from hpcbench.predict.calibration.calibration_store import (
    Calibration,
    machine_for,
    read_calibration,
    read_calibrations,
    user_calibration_folder,
    write_calibration,
)
from hpcbench.predict.collective_formulas import HockneyLink
from hpcbench.predict.machine import nominal_machine
from hpcbench.predict.message_prices import MeasuredMessage
from hpcbench.results.results_tree import ClusterTree
from hpcbench.strategies.traffic import MessageShape

PROFILE, _ = load_cluster("slurmbox")


def calibration(made_at: str = "2026-11-21T20:00:00Z", straggling: float = 0.02, **more: Any) -> Calibration:
    nominal = nominal_machine(PROFILE)
    found = MeasuredMessage(shape=MessageShape("all_reduce", 2, 1, 1, 1024), tasks_per_node=1, seconds=3e-4)
    links = (nominal.comm.intra_node, more.pop("inter_node", nominal.comm.inter_node))
    comm = msgspec.structs.replace(nominal.comm, messages=[found], measured_links=links)
    machine = msgspec.structs.replace(nominal, depth="calibrated", comm=comm, straggling=straggling)
    return Calibration(cluster="slurmbox", made_at=made_at, machine=machine, **({"partition": "normal"} | more))


def test_a_written_calibration_is_read_back(tmp_path: Path) -> None:
    path = write_calibration(calibration(), ClusterTree(tmp_path))
    assert path.parent == tmp_path / "calibrations"
    assert path.name.startswith("2026-11-21-")
    assert read_calibration(path) == calibration()
    assert os.listdir(path.parent) == [path.name]


def test_an_equal_calibration_is_written_once(tmp_path: Path) -> None:
    assert write_calibration(calibration(), ClusterTree(tmp_path)) == write_calibration(
        calibration(), ClusterTree(tmp_path)
    )


def test_a_tree_that_may_not_be_written_leaves_the_users_folder(tmp_path: Path) -> None:
    # Root may write anywhere: a file in the folder's place refuses root, too.
    (tmp_path / "calibrations").write_text("")
    path = write_calibration(calibration(), ClusterTree(tmp_path))
    assert path.parent == user_calibration_folder("slurmbox")
    assert machine_for(PROFILE, ClusterTree(tmp_path)).straggling == 0.02


def test_the_newest_calibration_is_used(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path)
    for made_at, straggling in (
        ("2026-11-21T20:00:00Z", 0.02),
        ("2026-11-21T21:00:00Z", 0.03),
        ("2025-12-31T23:00:00Z", 0.04),
    ):
        write_calibration(calibration(made_at, straggling), tree)
    machine = machine_for(PROFILE, tree)
    assert (machine.straggling, machine.depth) == (0.03, "calibrated")
    newest = read_calibrations(tree, "slurmbox")[0][0]
    assert machine.source == f"calibration of 2026-11-21 ({newest.digest})"
    assert machine.notes == []


def test_machine_is_nominal_without_calibration(tmp_path: Path) -> None:
    assert machine_for(PROFILE, ClusterTree(tmp_path), None, 2) == nominal_machine(PROFILE, None, 2)
    assert machine_for(PROFILE, None) == nominal_machine(PROFILE)


def test_a_damaged_calibration_is_named_and_skipped(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path)
    write_calibration(calibration(), tree)
    newer = write_calibration(calibration("2026-11-22T20:00:00Z"), tree)
    newer.write_bytes(newer.read_bytes().replace(b'"slurmbox"', b'"otherbox"'))
    with pytest.raises(StorageError, match="damaged"):
        read_calibration(newer)
    machine = machine_for(PROFILE, tree)
    assert machine.source.startswith("calibration of 2026-11-21")
    assert [str(newer) in note for note in machine.notes] == [True]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "is not a calibration"),
        (b'{"cluster": 3}', "is not a calibration"),
        (msgspec.json.encode(calibration(calibration_version=7)), "another version"),
    ],
)
def test_an_invalid_calibration_file_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(data)
    with pytest.raises(StorageError, match=said):
        read_calibration(path)


def test_a_changed_link_is_noted_and_its_times_follow(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path)
    write_calibration(calibration(inter_node=HockneyLink(1e-4, 1 / 1e9)), tree)
    machine = machine_for(PROFILE, tree)
    assert machine.comm.inter_node == nominal_machine(PROFILE).comm.inter_node
    assert machine.comm.rate(crosses=True) == pytest.approx(0.125)
    assert [note.partition(":")[0] for note in machine.notes] == [
        "the profile's link between nodes has changed since the calibration"
    ]


def test_another_partition_of_the_same_nodes_is_as_good(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path)
    write_calibration(calibration(partition="low"), tree)
    assert machine_for(PROFILE, tree, "high").depth == "calibrated"
    own = PROFILE.model_copy(update={"partitions": {**PROFILE.partitions, "big": PROFILE.partitions["low"].model_copy(
        update={"node": PROFILE.node.model_copy(update={"cores": 64})}
    )}})  # fmt: skip
    assert machine_for(own, tree, "big").depth == "nominal"
