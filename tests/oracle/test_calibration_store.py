"""Calibrations are kept whole, found by date, and named when they are damaged."""

from __future__ import annotations

import os
from math import exp, log
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis.strategies import floats, just, one_of, tuples

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.errors import StorageError
from hpcbench.oracle.calibration.calibration_store import (
    Calibration,
    machine_for,
    read_calibration,
    read_calibrations,
    slowdowns_at_rate,
    user_calibration_folder,
    write_calibration,
)
from hpcbench.oracle.collective_formulas import HockneyLink
from hpcbench.oracle.machine import CollectiveSample, StrategyOverhead, nominal_machine
from hpcbench.results.results_tree import ClusterTree

PROFILE, _ = load_cluster("slurmbox")


def calibration(made_at: str = "2026-11-21T20:00:00Z", straggling: float = 0.02, **more: Any) -> Calibration:
    nominal = nominal_machine(PROFILE)
    found = CollectiveSample(operation="all_reduce", ranks=2, nodes=2, latency_s=3e-4, beta_ratio=1.1)
    links = {"intra_node": nominal.comm.intra_node, "inter_node": more.pop("inter_node", nominal.comm.inter_node)}
    comm = msgspec.structs.replace(nominal.comm, collectives=[found], **links)
    machine = msgspec.structs.replace(nominal, depth="calibrated", comm=comm, straggling=straggling)
    return Calibration(cluster="slurmbox", made_at=made_at, machine=machine, **(links | {"partition": "normal"} | more))


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
    newer.write_bytes(newer.read_bytes().replace(b'"ranks": 2', b'"ranks": 4'))
    with pytest.raises(StorageError, match="damaged"):
        read_calibration(newer)
    machine = machine_for(PROFILE, tree)
    assert machine.source.startswith("calibration of 2026-11-21")
    assert [str(newer) in note for note in machine.notes] == [True]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "is no calibration"),
        (b'{"cluster": 3}', "is no calibration"),
        (msgspec.json.encode(calibration(calibration_version=7)), "another version"),
    ],
)
def test_an_invalid_calibration_file_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(data)
    with pytest.raises(StorageError, match=said):
        read_calibration(path)


def test_a_changed_link_is_noted_and_scales_the_calibration(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path)
    write_calibration(calibration(inter_node=HockneyLink(1e-4, 1 / 1e9)), tree)
    machine = machine_for(PROFILE, tree)
    assert machine.comm.inter_node == nominal_machine(PROFILE).comm.inter_node
    assert [note.partition(":")[0] for note in machine.notes] == [
        "the profile's link between nodes has changed since the calibration"
    ]


@pytest.mark.parametrize(
    ("bytes_per_s", "slowdowns", "found"),
    [
        (250e6, (3.0, 1.2), (2.0, 1.1)),
        (250e6, (1.5, 1.0), (1.25, 1.0)),
        (125e6, (3.0, 1.2), (3.0, 1.2)),
        (62.5e6, (3.0, 1.2), (5.0, 1.4)),
        # Another unit than the processor sends.
        (62.5e6, (1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_slowdowns_are_in_proportion_to_the_rate_of_the_link(
    bytes_per_s: float, slowdowns: tuple[float, float], found: tuple[float, float], tmp_path: Path
) -> None:
    then = HockneyLink(1e-4, 1 / bytes_per_s)
    made = calibration(inter_node=then)
    comm = msgspec.structs.replace(made.machine.comm, comm_slowdown=slowdowns[0], overlap_slowdown=slowdowns[1])
    made = msgspec.structs.replace(made, machine=msgspec.structs.replace(made.machine, comm=comm))
    write_calibration(made, ClusterTree(tmp_path))
    today = machine_for(PROFILE, ClusterTree(tmp_path)).comm
    assert (today.comm_slowdown, today.overlap_slowdown) == pytest.approx(found)


_RATES = floats(min_value=0.01, max_value=100.0)


@given(comm_slowdown=floats(1.0, 20.0), overlap_slowdown=floats(1.0, 10.0), rates=tuples(_RATES, _RATES))
def test_a_faster_link_takes_no_longer_and_computation_is_no_faster_beside_it(
    comm_slowdown: float, overlap_slowdown: float, rates: tuple[float, float]
) -> None:
    comm = msgspec.structs.replace(
        nominal_machine(PROFILE).comm, comm_slowdown=comm_slowdown, overlap_slowdown=overlap_slowdown
    )
    assert slowdowns_at_rate(comm, 1.0) == pytest.approx((overlap_slowdown, comm_slowdown))
    low, high = sorted(rates)
    (slow_kappa, slow_comm), (fast_kappa, fast_comm) = (slowdowns_at_rate(comm, rate) for rate in (low, high))
    almost = 1 + 1e-9
    assert min(slow_kappa, slow_comm) * almost >= 1.0
    assert fast_kappa * almost >= slow_kappa
    assert fast_comm / high <= slow_comm / low * almost


@given(
    comm_slowdown=floats(1.01, 20.0), overlap_slowdown=floats(1.0, 10.0), rate=one_of(just(1.0), _RATES),
    step=floats(-1e-3, 1e-3),
)  # fmt: skip
def test_slowdowns_have_no_step_at_any_rate(
    comm_slowdown: float, overlap_slowdown: float, rate: float, step: float
) -> None:
    comm = msgspec.structs.replace(
        nominal_machine(PROFILE).comm, comm_slowdown=comm_slowdown, overlap_slowdown=overlap_slowdown
    )
    (kappa, slowed), (near_kappa, near_slowed) = (slowdowns_at_rate(comm, rate * exp(by)) for by in (0.0, step))
    # The logarithm of the largest slowdown, 20, bounds the first, and with the rate itself the second.
    assert abs(log(near_slowed / slowed)) <= log(20.0) * abs(step) + 1e-9
    assert abs(1 / near_kappa - 1 / kappa) <= (1 + log(20.0)) * abs(step) + 1e-9


def test_compute_factors_below_one_are_ignored(tmp_path: Path) -> None:
    made = calibration()
    strategies = {
        "ddp": StrategyOverhead(compute_factor=0.9, step_s=0.2),
        "fsdp": StrategyOverhead(compute_factor=1.1, step_s=0.1),
    }
    made = msgspec.structs.replace(made, machine=msgspec.structs.replace(made.machine, strategies=strategies))
    write_calibration(made, ClusterTree(tmp_path))
    today = machine_for(PROFILE, ClusterTree(tmp_path)).strategies
    assert today == {"ddp": StrategyOverhead(), "fsdp": strategies["fsdp"]}


def test_a_link_that_runs_were_fitted_with_moves_with_the_profiles(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path)
    then, today = HockneyLink(1e-4, 1 / 1e9), nominal_machine(PROFILE).comm.inter_node
    found = calibration(inter_node=then)
    comm = msgspec.structs.replace(found.machine.comm, inter_node=HockneyLink(3e-4, 2 / 1e9))
    machine = msgspec.structs.replace(found.machine, depth="fitted", comm=comm)
    write_calibration(msgspec.structs.replace(found, machine=machine), tree)
    chosen = machine_for(PROFILE, tree)
    assert tuple(chosen.comm.inter_node) == pytest.approx((3 * today.latency_s, 2 * today.beta_s_per_byte))
    assert chosen.source.startswith("fit of whole runs of 2026-11-21")


def test_another_partition_of_the_same_nodes_is_as_good(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path)
    write_calibration(calibration(partition="low"), tree)
    assert machine_for(PROFILE, tree, "high").depth == "calibrated"
    own = PROFILE.model_copy(update={"partitions": {**PROFILE.partitions, "big": PROFILE.partitions["low"].model_copy(
        update={"node": PROFILE.node.model_copy(update={"cores": 64})}
    )}})  # fmt: skip
    assert machine_for(own, tree, "big").depth == "nominal"
