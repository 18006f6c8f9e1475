"""The sweep of a calibration: as it is for this machine and on others, and for the shapes of one sweep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec, run_id
from hpcbench.config.sweep_loader import Sweep
from hpcbench.predict.calibration.calibration_sweep import (
    CalibrationScale,
    SweepProbe,
    calibration_sweep_toml,
    cluster_size,
    price_run,
    sweep_probes,
)
from hpcbench.predict.calibration.fit_calibration import fit_calibration
from hpcbench.predict.machine import Machine, nominal_machine
from hpcbench.predict.prediction import predict
from hpcbench.results.results_tree import ClusterTree
from hpcbench.strategies.resolve import PartitionLimits, resolve_point
from hpcbench.strategies.traffic import MessageShape, format_messages, parse_messages
from hpcbench.submit.plan import make_plan
from tests.layer_tables import table_of_run
from tests.predict.planted_probes import COMM_SLOWDOWN, SLOWDOWN, probe_run

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


@pytest.mark.parametrize("cluster", ["local", "slurmbox", "perlmutter", "frontier"])
def test_every_round_has_its_own_runs(cluster: str, tmp_path: Path, write_sweep: Callable[[str], Sweep]) -> None:
    profile, _ = load_cluster(cluster)
    known: set[str] = set()
    for number in (0, 1):
        text = calibration_sweep_toml(profile, None, 2, number)
        plan = make_plan(write_sweep(text), profile, ClusterTree(tmp_path))
        assert known.isdisjoint(plan.runs)
        known |= {run_id(spec) for spec in plan.runs.values()}
        assert plan.dropped == []
        assert len(plan.runs) == len(tomli.loads(text)["include"])


def test_a_calibration_sweep_names_its_partition() -> None:
    profile, _ = load_cluster("slurmbox")
    parsed = tomli.loads(calibration_sweep_toml(profile, "high", 2, 3, 5.0))
    assert parsed["name"] == "calibration-high-3"
    assert parsed["fixed"]["partition"] == "high"
    assert parsed["fixed"]["seed"] == 300
    options = [one["options"] for one in parsed["include"] if "options" in one and "budget_s" in one["options"]]
    assert {one["budget_s"] for one in options} == {5.0}


PROFILE, _ = load_cluster("slurmbox")
NOMINAL = nominal_machine(PROFILE)


def spec_of(strategy: str = "", **more: Any) -> RunSpec:
    point = {"model": "vgg11", "dataset": "cifar10", "batch_size": 8, "strategy": strategy} | more
    spec = resolve_point(point, PartitionLimits("any"))
    assert isinstance(spec, RunSpec), spec
    return spec


def probes_for(specs: list[RunSpec], machine: Machine = NOMINAL) -> list[SweepProbe]:
    return sweep_probes([price_run(spec, table_of_run(spec), machine) for spec in specs], 1.0)


def measured(specs: list[RunSpec]) -> Machine:
    """The machine that the probes for ``specs`` give."""
    runs = [probe_run(PROFILE, spec_of(**probe.point)) for probe in probes_for(specs)]
    return fit_calibration(PROFILE, None, runs, sweep="s").machine


def of_kind(probes: list[SweepProbe], strategy: str, option: str = "") -> list[SweepProbe]:
    return [
        one
        for one in probes
        if strategy in (one.point.get("strategy"), one.point.get("workload"))
        and (not option or option in one.point["options"])
    ]


def test_a_sweep_is_probed_in_its_own_sizes_and_places() -> None:
    specs = [
        spec_of("ddp", nodes=2),
        spec_of("gpipe", nodes=2, micro_batches=8),
        spec_of("filter", tasks_per_node=2),
        spec_of("single"),
    ]
    probes = probes_for(specs)
    blocks = [one for one in of_kind(probes, "probe_blocks") if "overlaps" not in one.point["options"]]
    assert sorted((one.point["batch_size"], one.point.get("tasks_per_node", 1), one.runs) for one in blocks) == [
        (1, 1, 1), (8, 1, 2), (8, 2, 1),
    ]  # fmt: skip
    messages = {(one.point.get("nodes", 1), one.point.get("tasks_per_node", 1)): one
                for one in of_kind(probes, "collectives")}  # fmt: skip
    assert messages.keys() == {(2, 1), (1, 2)}
    shapes = parse_messages(messages[2, 1].point["options"]["messages"])
    assert {shape.operation for shape in shapes} == {"all_reduce", "broadcast", "send"}
    assert messages[2, 1].runs == 2
    machine = measured(specs)
    for spec in (specs[0], specs[1], specs[3]):
        assert predict(spec, table_of_run(spec), machine).rests_on.kind == "calibrated for this sweep"
    # Parts of layers are priced by the whole ones; nothing is measured twice, whatever the sweep is called.
    assert predict(specs[2], table_of_run(specs[2]), machine).rests_on.kind == "calibrated"
    assert probes_for([*specs, spec_of("1f1b", nodes=2, micro_batches=8)], machine) == []


def test_a_run_overlaps_as_its_own_blocks_and_collectives_did() -> None:
    spec = spec_of("ddp", nodes=4)
    (probe,) = of_kind(probes_for([spec]), "probe_blocks", "overlaps")
    assert (probe.point["nodes"], probe.point["batch_size"]) == (4, 8)
    (shape,) = parse_messages(probe.point["options"]["overlaps"])
    assert (shape.operation, shape.ranks, shape.ranks_per_node) == ("all_reduce", 4, 1)
    machine = measured([spec])
    (overlap,) = machine.comm.overlaps
    assert [overlap.slowdown, overlap.comm_slowdown] == pytest.approx([SLOWDOWN, COMM_SLOWDOWN])
    # Another number of nodes takes the nearest; ranks of one node send inside it, another model computes otherwise.
    assert of_kind(probes_for([spec_of("ddp", nodes=2)], machine), "probe_blocks", "overlaps") == []
    for other in (spec_of("ddp", tasks_per_node=2), spec_of("ddp", nodes=4, model="resnet18")):
        assert len(of_kind(probes_for([other], machine), "probe_blocks", "overlaps")) == 1
    # Without computation beside collectives there is nothing to measure.
    assert of_kind(probes_for([spec_of("filter", nodes=2, tp_degree=2)]), "probe_blocks", "overlaps") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sum:2:1:1:64", "begins with no operation"),
        ("all_reduce:2:1:64", "operation:ranks:ranks_per_node:rivals:payload_bytes is right"),
        ("send:3:1:1:64", "3 ranks, 1 on every node, cannot be"),
        ("all_reduce:3:2:1:64", "3 ranks, 2 on every node, cannot be"),
    ],
)
def test_wrong_messages_are_named(text: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        parse_messages(text)
    shapes = [MessageShape("send", 2, 1, 1, 64), MessageShape("all_gather", 4, 2, 2, 128)]
    assert parse_messages(format_messages(shapes)) == shapes
