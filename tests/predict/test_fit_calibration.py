"""Fits find what simulated runs were made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.calibration.calibration_store import CalibrationRun
from hpcbench.predict.calibration.fit_calibration import fit_calibration
from hpcbench.predict.cost_model import CostModel, expected_normal_maximum, row_kernels
from hpcbench.predict.machine import Machine, StrategyOverhead, nominal_machine
from hpcbench.predict.prediction import predict
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.traffic import MessageShape, format_messages
from tests.layer_tables import table_of
from tests.predict.planted_probes import SLOWDOWN, blocks_probe, finished_run, message_s, messages_probe, overlaps_probe

PROFILE, _ = load_cluster("slurmbox")
NOMINAL = nominal_machine(PROFILE)
SLOWER = {"vit": 3.0, "vgg11": 3.0, "resnet18": 4.0}


def spec_of(strategy: str, model: str = "vit", **more: Any) -> RunSpec:
    ranks = more.get("nodes", 1) * more.get("tasks_per_node", 1)
    spread = {"dp_degree": ranks} if ranks > 1 else {}
    return RunSpec(model=model, dataset="cifar10", strategy=strategy, **({"batch_size": 8} | spread | more))


def run_of(spec: RunSpec, step_s: float = 1.0, **more: Any) -> CalibrationRun:
    return CalibrationRun(finished_run(spec, step_s, **more), table_of(spec.model))


def blocks_run(model: str, step_s: float = 1.0, wall: float = 1.0, slower: float = 1.0, **more: Any) -> CalibrationRun:
    spec = spec_of(
        "probe_blocks", model, **{key: more.pop(key) for key in ("batch_size", "tasks_per_node") if key in more}
    )
    return run_of(spec, step_s, probe=blocks_probe(PROFILE, spec, slower * SLOWER[model], wall), **more)


def everything() -> list[CalibrationRun]:
    """Blocks of three models, a full node, messages and overlaps of two nodes and four."""
    runs = [blocks_run(model) for model in SLOWER]
    runs.append(blocks_run("vit", tasks_per_node=2, slower=1.25))
    for nodes in (2, 4):
        shapes = [
            MessageShape(operation, nodes, 1, 1, 1024 * 4**power)
            for operation in ("all_reduce", "all_gather", "broadcast")
            for power in range(8)
        ]
        spec = spec_of(
            "collectives", workload="collectives", nodes=nodes, options={"messages": format_messages(shapes)}
        )
        runs.append(run_of(spec, probe=messages_probe(spec)))
        overlap = format_messages([MessageShape("all_reduce", nodes, 1, 1, 2**20)])
        spec = spec_of("probe_blocks", nodes=nodes, options={"overlaps": overlap})
        step_s = 1 + 0.04 * expected_normal_maximum(nodes)
        runs.append(run_of(spec, step_s, probe=overlaps_probe(PROFILE, spec, SLOWER["vit"])))
    return runs


@pytest.fixture(scope="module")
def machine() -> Machine:
    return fit_calibration(PROFILE, None, everything()).machine


def compute_s(spec: RunSpec, machine: Machine) -> float:
    """Of all layers, without updates."""
    cost_model = CostModel(machine, spec)
    rows = table_of(spec.model).layers
    return sum(cost_model.kernel_s(kernel) for row in rows for kernel in row_kernels(spec, row, spec.batch_size))


def test_a_model_takes_what_its_blocks_did_and_others_what_similar_kernels_did(machine: Machine) -> None:
    for model, slower in SLOWER.items():
        spec = spec_of("single", model)
        # Some kernels, such as the loss, are in several models.
        assert compute_s(spec, machine) == pytest.approx(slower * compute_s(spec, NOMINAL), rel=0.01)
        before, after = (predict(spec, table_of(model), one) for one in (NOMINAL, machine))
        assert (before.rests_on.kind, after.rests_on.kind) == ("profile", "calibrated for this sweep")
        assert after.interval.high / after.interval.low < before.interval.high / before.interval.low
    other = spec_of("single", "vgg16")
    assert compute_s(other, machine) == pytest.approx(3.0 * compute_s(other, NOMINAL), rel=0.15)
    assert predict(other, table_of("vgg16"), machine).rests_on.kind == "calibrated"


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 16}, {"precision": "bf16"}, {"channels_last": True}, {"compile": True},
        {"env": {"OMP_PROC_BIND": "true"}}, {"tasks_per_node": 4, "strategy": "ddp"},
    ],
)  # fmt: skip
def test_only_equal_shapes_and_conditions_rest_on_measured_shapes_alone(
    machine: Machine, change: dict[str, Any]
) -> None:
    spec = spec_of(**({"strategy": "single", "model": "vgg11"} | change))
    assert predict(spec, table_of("vgg11"), machine).rests_on.kind == "calibrated"
    if "precision" not in change:
        beside = machine.compute.crowding[2] * 2 - 0.5 if "tasks_per_node" in change else 1.0
        assert compute_s(spec, machine) == pytest.approx(3.0 * beside * compute_s(spec, NOMINAL), rel=0.25)


def test_crowding_straggling_messages_and_overlap_are_found(machine: Machine) -> None:
    assert machine.compute.crowding == {1: 1.0, 2: pytest.approx(1.25, rel=0.01)}
    assert machine.straggling == pytest.approx(0.04, rel=1e-6)
    assert [one.slowdown for one in machine.comm.overlaps] == [pytest.approx(SLOWDOWN)] * 2
    spec = spec_of("ddp", nodes=4)
    from hpcbench.predict.placement import GroupPlacement

    for operation in ("all_reduce", "all_gather", "broadcast"):
        for size in (1024, 3 * 2**18, 2**24):
            priced = CostModel(machine, spec).collective(operation, size, GroupPlacement(4, 4, 1, 1)).seconds
            assert priced == pytest.approx(message_s(size), rel=0.02)


def test_a_calibration_has_its_runs_and_what_it_lacks() -> None:
    runs = everything()
    found = fit_calibration(PROFILE, None, runs)
    assert (found.partition, found.environment_digests) == ("normal", ["e"])
    assert found.run_ids == sorted(one.result.run_id for one in runs)
    assert found.notes == []
    assert {one.part for one in found.residuals} == {"kernels", "messages"}
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
    nothing = fit_calibration(PROFILE, None, [])
    assert msgspec.structs.replace(nothing.machine, depth="nominal", source=NOMINAL.source) == msgspec.structs.replace(
        NOMINAL, notes=[]
    )
    assert nothing.notes == [
        "no kernel was measured: a step's computation is the profile's",
        "no two ranks were measured on one node: they are taken not to be in each other's way",
        "no message was measured: links are the profile's",
    ]


def test_a_later_calibration_extends_the_one_before() -> None:
    first = fit_calibration(PROFILE, None, everything())
    again = blocks_run("vit", slower=2.0)
    both = fit_calibration(PROFILE, None, [again], first, sweep="mine", environment="cpu", environment_key="k")
    assert (both.sweeps, both.environment, both.environment_key) == (["mine"], "cpu", "k")
    assert both.made_at > first.made_at
    assert both.run_ids == sorted({*first.run_ids, again.result.run_id})
    for model, slower in {**SLOWER, "vit": 6.0}.items():
        spec = spec_of("single", model)
        assert compute_s(spec, both.machine) == pytest.approx(slower * compute_s(spec, NOMINAL), rel=0.01)
    assert both.machine.comm.messages == first.machine.comm.messages
    # Of other software or another machine nothing is kept.
    other = fit_calibration(PROFILE, None, [blocks_run("vit", environment_digest="f")], first)
    assert other.machine.comm.messages == []
    assert other.made_at > first.made_at
    assert other.notes[0].endswith("is of another machine or software: nothing of it was kept")


def trained(machine: Machine, added: Sequence[float], sizes: Sequence[int] = (8, 16)) -> list[CalibrationRun]:
    """Two trainings of ``ddp`` that take a factor of their computation and seconds a step longer than predicted."""
    bare, runs = msgspec.structs.replace(machine, strategies={}), []
    for nodes, size in zip((2, 4), sizes, strict=True):
        spec = spec_of("ddp", nodes=nodes, batch_size=size)
        cost, table = resolve_cost("ddp"), table_of("vit")
        step = cost.step(spec, table, CostModel(bare, spec))
        peak = cost.memory(spec, table, 0).total_bytes + 222 * 2**20
        runs.append(run_of(spec, step.step_time_s + added[0] * step.compute_s + added[1], peak_bytes=peak))
    return runs


def test_runs_of_a_strategy_give_its_overhead_and_the_memory_of_a_process(machine: Machine) -> None:
    runs = trained(machine, (0.02, 0.004))
    found = fit_calibration(PROFILE, None, [*everything(), *runs])
    predicted = [predict(one.spec, one.table, found.machine) for one in runs]
    assert [one.step_time_s for one in predicted] == [pytest.approx(one.step_s, rel=0.02) for one in runs]
    assert found.machine.strategies["ddp"].step_s > 0
    assert found.machine.base_bytes == pytest.approx(222 * 2**20)
    assert [one.error for one in found.residuals if one.part == "strategies"] == [pytest.approx(0, abs=0.02)]


def test_no_library_takes_negative_time(machine: Machine) -> None:
    for added in ((-0.3, 0.0), (-0.2, 0.004), (0.1, -0.01)):
        runs = trained(machine, added, (8, 40))
        fitted = fit_calibration(PROFILE, None, [*everything(), *runs]).machine.strategies["ddp"]
        assert fitted.compute_factor >= 1.0
        assert fitted.step_s >= 0.0


def test_a_librarys_factor_applies_to_blocks_that_were_measured_without_it(machine: Machine) -> None:
    spec = spec_of("horovod", nodes=2)
    slower = msgspec.structs.replace(machine, strategies={"horovod": StrategyOverhead(compute_factor=1.25)})
    assert compute_s(spec, slower) == pytest.approx(1.25 * compute_s(spec, machine))
    assert compute_s(spec_of("ddp", nodes=2), slower) == pytest.approx(compute_s(spec, machine))


def test_a_busy_machine_widens_intervals() -> None:
    """Half of two cores: a rank that shares a core takes twice as long. One busy probe of several is no busy machine."""
    beside = "other processes used the cores during the timed steps:"
    spec = spec_of("single")
    for shares, width in (((50, 50, 10), 4.0), ((50, 0, 0), 1.2)):
        runs = [
            blocks_run("vit", batch_size=8, warnings=[f"{beside} {share}% of the 2 cores"] if share else [])
            for share in shares
        ]
        interval = predict(spec, table_of("vit"), fit_calibration(PROFILE, None, runs).machine).interval
        assert interval.high / interval.low == pytest.approx(width, rel=0.1)
