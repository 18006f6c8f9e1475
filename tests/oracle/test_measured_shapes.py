"""Measured shapes replace formulas where shape, samples, precision and ranks per node are equal, and nowhere else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.calibration.fit_shapes import busy_notes, fit_shapes
from hpcbench.oracle.calibration.sweep_needs import (
    MAX_SIZES_PER_GROUP,
    block_probes,
    message_probes,
    overlap_probes,
    price_run,
)
from hpcbench.oracle.collective_formulas import HockneyLink
from hpcbench.oracle.cost_model import CostModel, main_overlapped_call, row_kernels
from hpcbench.oracle.machine import Machine, StrategyOverhead, nominal_machine
from hpcbench.oracle.measured_shapes import (
    KernelConditions,
    MeasuredKernel,
    MeasuredShapes,
    MeasuredTimes,
    SizeCurve,
)
from hpcbench.oracle.prediction import predict
from hpcbench.oracle.strategies.base import resolve_cost
from hpcbench.oracle.stream_simulator import CommCall, ComputeEvent, StreamEvent, WaitEvent
from hpcbench.parallel.resolve import PartitionLimits, resolve_point
from hpcbench.parallel.roofline import FORWARD, Kernel
from hpcbench.parallel.traffic import MessageShape, Traffic, format_messages, parse_messages
from tests.oracle.planted_probes import (
    COMM_SLOWDOWN,
    CUT_PENALTY,
    SLOWDOWN,
    blocks_probe,
    message_s,
    probe_run,
    table_of,
)

PROFILE, _ = load_cluster("slurmbox")
NOMINAL = nominal_machine(PROFILE)
SLOWER = 3.0


def spec_of(strategy: str, **more: Any) -> RunSpec:
    point = {"model": "vgg11", "dataset": "cifar10", "batch_size": 8, "strategy": strategy} | more
    spec = resolve_point(point, PartitionLimits("any"))
    assert isinstance(spec, RunSpec), spec
    return spec


def measured(specs: list[RunSpec], machine: Machine = NOMINAL) -> Machine:
    """``machine`` with what the probes for ``specs`` find."""
    priced = [price_run(spec, table_of(spec), machine) for spec in specs]
    probes = [*block_probes(priced, 1.0), *overlap_probes(priced, 1.0), *message_probes(priced, 1.0)]
    runs = [probe_run(PROFILE, spec_of(**probe.point), SLOWER) for probe in probes]
    return msgspec.structs.replace(machine, measured=fit_shapes(NOMINAL, runs, "s"))


def compute_s(spec: RunSpec, machine: Machine) -> float:
    """Of all layers, without updates."""
    cost_model = CostModel(machine, spec)
    samples = spec.batch_size / spec.micro_batches
    return sum(
        cost_model.kernel_s(kernel) for row in table_of(spec).layers for kernel in row_kernels(spec, row, samples)
    )


def test_a_curve_never_falls_and_ends_where_nothing_was_measured() -> None:
    curve = SizeCurve([(1, 1.0), (4, 4.0), (16, 2.0), (64, 64.0), (4, 4.0)])
    # 4 and 16 are pooled.
    assert curve.at(4) == curve.at(16) == pytest.approx(8**0.5)
    assert curve.at(8) == pytest.approx(8**0.5)
    assert curve.at(2) == pytest.approx(8**0.25)
    assert curve.at(64) == pytest.approx(64.0)
    assert curve.at(0.5) is None
    assert curve.at(65) is None


def test_equal_shapes_take_what_was_measured() -> None:
    spec = spec_of("single")
    machine = measured([spec])
    assert compute_s(spec, machine) == pytest.approx(SLOWER * compute_s(spec, NOMINAL), rel=1e-6)
    before, after = (predict(spec, table_of(spec), one) for one in (NOMINAL, machine))
    assert before.rests_on.kind == "profile"
    assert after.rests_on.kind == "calibrated for this sweep"
    assert after.interval.high / after.interval.low < before.interval.high / before.interval.low


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 16},
        {"precision": "bf16"},
        {"channels_last": True},
        {"compile": True},
        {"env": {"OMP_PROC_BIND": "true"}},
        {"environment": "other"},
        {"model": "resnet18"},
        {"strategy": "ddp", "tasks_per_node": 2},
        {"micro_batches": 2, "batch_size": 16},
    ],
)
def test_other_shapes_and_conditions_are_priced_as_before(change: dict[str, Any]) -> None:
    machine = measured([spec_of("single")])
    spec = msgspec.structs.replace(spec_of(**({"strategy": "single"} | change)))
    before, after = (predict(spec, table_of(spec), one) for one in (NOMINAL, machine))
    assert after.rests_on.kind == "profile"
    # Layers without weights are alike in their bytes alone.
    assert compute_s(spec, machine) == pytest.approx(compute_s(spec, NOMINAL), rel=0.2)
    if "batch_size" not in change and "model" not in change:
        assert after.step_time_s == before.step_time_s


def test_samples_between_two_measured_numbers_are_interpolated() -> None:
    machine = measured([spec_of("single", batch_size=2), spec_of("single", batch_size=8)])
    for samples in (3, 4, 7):
        spec = spec_of("single", batch_size=samples)
        assert compute_s(spec, machine) == pytest.approx(SLOWER * compute_s(spec, NOMINAL), rel=0.15)
        assert predict(spec, table_of(spec), machine).rests_on.kind == "calibrated for this sweep"
    assert predict(spec_of("single", batch_size=9), table_of(spec), machine).rests_on.kind == "profile"


def test_a_sweep_is_probed_in_its_own_sizes_shares_and_places() -> None:
    specs = [
        spec_of("ddp", nodes=2),
        spec_of("gpipe", nodes=2, micro_batches=8),
        spec_of("filter", tasks_per_node=2),
        spec_of("single"),
    ]
    priced = [price_run(spec, table_of(spec), NOMINAL) for spec in specs]
    blocks = block_probes(priced, 1.0)
    assert sorted(
        (probe.point["batch_size"], probe.point.get("tasks_per_node", 1), str(probe.point["options"].get("shares", "")),
         bool(probe.point["options"].get("accumulates")), probe.runs)
        for probe in blocks
    ) == [(1, 1, "", True, 1), (8, 1, "", False, 2), (8, 2, "2", False, 1)]  # fmt: skip
    messages = {(probe.point.get("nodes", 1), probe.point.get("tasks_per_node", 1)): probe
                for probe in message_probes(priced, 1.0)}  # fmt: skip
    assert messages.keys() == {(2, 1), (1, 2)}
    shapes = parse_messages(messages[2, 1].point["options"]["messages"])
    assert {shape.operation for shape in shapes} == {"all_reduce", "broadcast", "send"}
    assert messages[2, 1].runs == 2
    machine = measured(specs)
    for spec in specs:
        assert not any(price_run(spec, table_of(spec), machine).unmeasured), spec.strategy
        assert predict(spec, table_of(spec), machine).rests_on.kind == "calibrated for this sweep"
    # Nothing is measured twice, whatever the sweep is called.
    again = [price_run(spec, table_of(spec), machine) for spec in (specs[0], spec_of("1f1b", nodes=2, micro_batches=8))]
    assert block_probes(again, 1.0) == []
    assert message_probes(again, 1.0) == []


def test_parts_that_no_probe_can_measure_are_not_probed_again() -> None:
    spec = spec_of("filter", tasks_per_node=2, batch_size=2)
    machine = measured([spec])
    again = price_run(spec, table_of(spec), machine)
    # In two parts of two samples a layer without weights is as one sample, which is not measured.
    assert {kernel.kind for kernel in again.unmeasured.kernels} == {"MaxPool2d", "ReLU"}
    assert block_probes([again], 1.0) == []
    assert machine.measured is not None
    unlisted = msgspec.structs.replace(machine.measured, cuts=[])
    assert len(block_probes([again._replace(measured=unlisted)], 1.0)) == 1


def test_a_cut_layer_takes_its_share_of_the_block() -> None:
    spec = spec_of("filter", tasks_per_node=2)
    machine = measured([spec])
    before, after = (CostModel(one, spec) for one in (NOMINAL, machine))
    steps = [resolve_cost("filter").step(spec, table_of(spec), one) for one in (before, after)]
    # Convolutions are cut, and what is between them is as long as its bytes.
    assert SLOWER * 1.1 < steps[1].compute_s / steps[0].compute_s < SLOWER * CUT_PENALTY


def kernel_of(flops: float, weights: float, moved: float, kind: str = "Conv2d") -> Kernel:
    """A forward kernel of one sample."""
    return Kernel(kind, FORWARD, "fp32", flops, moved, weights, moved / 4, moved / 2)


def times_of(kernels: list[Kernel], seconds: list[float]) -> MeasuredTimes:
    measured = [
        MeasuredKernel(kernel=kernel, samples=1, conditions=KernelConditions(1), seconds=own)
        for kernel, own in zip(kernels, seconds, strict=True)
    ]
    return MeasuredTimes(MeasuredShapes(kernels=measured))


def test_parts_with_halos_lie_between_measured_parts_of_their_layer() -> None:
    times = times_of([kernel_of(100.0, 36.0, 10.0), kernel_of(400.0, 36.0, 40.0)], [1.0, 4.0])
    # Half of the positions, one row of the neighbours and other bytes per FLOP.
    assert times.kernel_s(kernel_of(200.0, 36.0, 21.0), KernelConditions(1), [1]) == pytest.approx(2.0)
    for other in (
        kernel_of(50.0, 36.0, 5.0), kernel_of(200.0, 37.0, 21.0), kernel_of(200.0, 36.0, 21.0, "Linear"),
    ):  # fmt: skip
        assert times.kernel_s(other, KernelConditions(1), [1]) is None
    assert times.kernel_s(kernel_of(200.0, 36.0, 21.0), KernelConditions(2), [1]) is None
    # Another number of samples has no measured parts.
    assert times.kernel_s(kernel_of(200.0, 36.0, 21.0), KernelConditions(1), [2]) is None


def test_a_librarys_factor_applies_to_blocks_that_were_measured_without_it() -> None:
    spec = spec_of("horovod", nodes=2)
    machine = measured([spec])
    slower = msgspec.structs.replace(machine, strategies={"horovod": StrategyOverhead(compute_factor=1.25)})
    assert compute_s(spec, slower) == pytest.approx(1.25 * compute_s(spec, machine))
    assert compute_s(spec_of("ddp", nodes=2), slower) == pytest.approx(compute_s(spec, machine))


def test_a_part_counts_only_where_the_same_kernel_was_not_measured_as_a_whole() -> None:
    kernel, conditions = kernel_of(100.0, 36.0, 10.0), KernelConditions(1)
    whole = MeasuredKernel(kernel=kernel, samples=1, conditions=conditions, seconds=1.0)
    part = msgspec.structs.replace(whole, seconds=2.0, is_part=True)
    for kernels, expected_s in (([whole, part], 1.0), ([part], 2.0)):
        times = MeasuredTimes(MeasuredShapes(kernels=kernels))
        assert times.kernel_s(kernel, conditions, [1]) == pytest.approx(expected_s)
    assert len(MeasuredShapes(kernels=[whole]).joined(MeasuredShapes(kernels=[part])).kernels) == 2


def test_half_of_the_heads_is_as_half_of_the_samples() -> None:
    attention = "Attention.other"
    times = times_of([kernel_of(100.0, 0.0, 10.0, attention), kernel_of(400.0, 0.0, 40.0, attention)], [1.0, 4.0])
    assert times.kernel_s(kernel_of(200.0, 0.0, 20.0, attention), KernelConditions(1), [3]) == pytest.approx(2.0)
    assert times.kernel_s(kernel_of(200.0, 0.0, 30.0, attention), KernelConditions(1), [3]) is None


def test_messages_take_what_was_measured_and_only_their_own_links() -> None:
    spec = spec_of("ddp", nodes=2)
    machine = measured([spec])
    assert machine.measured is not None
    (shape, *_) = [message.shape for message in machine.measured.messages]
    assert shape[:-1] == ("all_reduce", 2, 1, 1)
    alone = msgspec.structs.replace(machine, measured=msgspec.structs.replace(machine.measured, overlaps=[]))
    step = resolve_cost("ddp").step(spec, table_of(spec), CostModel(alone, spec))
    sizes = [message.shape.payload_bytes for message in machine.measured.messages]
    assert step.comm_s == pytest.approx(sum(map(message_s, sizes)))
    links = machine.comm.intra_node, HockneyLink(1e-3, 1e-9)
    changed = machine.measured.over_links(links)
    assert changed.messages == []
    assert changed.kernels == machine.measured.kernels
    assert predict(
        spec, table_of(spec), msgspec.structs.replace(machine, measured=changed)
    ).rests_on.kind == "profile"  # fmt: skip


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # The computation between the call and the wait overlaps with it.
        ("reduce@8 compute wait", "all_reduce@8"),
        ("reduce@8 wait compute", None),
        ("reduce@8 wait", None),
        # Of one operation the largest call, of several the one that moves most.
        ("reduce@8 compute reduce@9 compute gather@10 compute wait", "all_reduce@9"),
        ("reduce@8 compute gather@10 compute wait", "all_gather@10"),
        ("send@99 compute wait", None),
    ],
)
def test_the_main_overlapped_call_moves_most_bytes_beside_computation(events: str, expected: str | None) -> None:
    def event_of(word: str) -> StreamEvent:
        if word in ("compute", "wait"):
            return ComputeEvent(1.0) if word == "compute" else WaitEvent()
        name, size = word.split("@")
        operation = name if name == "send" else f"all_{name}"
        return CommCall(1.0, key=word, traffic=Traffic(operation=operation, group_size=2, payload_bytes=int(size)))

    call = main_overlapped_call([event_of(word) for word in events.split()])
    assert (None if call is None else f"{call.operation}@{call.payload_bytes}") == expected


def test_a_run_overlaps_as_its_own_blocks_and_collectives_did() -> None:
    spec = spec_of("ddp", nodes=4)
    priced = price_run(spec, table_of(spec), NOMINAL)
    (probe,) = overlap_probes([priced], 1.0)
    assert (probe.point["nodes"], probe.point["batch_size"]) == (4, 8)
    (shape,) = parse_messages(probe.point["options"]["overlaps"])
    assert (shape.operation, shape.ranks, shape.ranks_per_node) == ("all_reduce", 4, 1)
    machine = measured([spec])
    assert machine.measured is not None
    (overlap,) = machine.measured.overlaps
    assert [overlap.slowdown, overlap.comm_slowdown] == pytest.approx([SLOWDOWN, COMM_SLOWDOWN])
    # Nothing is left to measure, and another number of nodes takes the nearest.
    assert overlap_probes([price_run(spec, table_of(spec), machine)], 1.0) == []
    assert overlap_probes([price_run(spec_of("ddp", nodes=2), table_of(spec), machine)], 1.0) == []
    # Ranks of one node send inside it; another model computes otherwise.
    assert len(overlap_probes([price_run(spec_of("ddp", tasks_per_node=2), table_of(spec), machine)], 1.0)) == 1
    other = spec_of("ddp", nodes=4, model="resnet18")
    assert len(overlap_probes([price_run(other, table_of(other), machine)], 1.0)) == 1
    # Without computation beside collectives there is nothing to measure.
    alone = spec_of("filter", nodes=2, tp_degree=2)
    assert overlap_probes([price_run(alone, table_of(alone), NOMINAL)], 1.0) == []


def test_a_rank_that_shares_its_core_with_other_processes_widens_intervals() -> None:
    """Half of two cores, where one rank runs: a rank that shares a core takes twice as long.

    One busy probe of several is no busy machine.
    """
    single, beside = spec_of("single"), "other processes used the cores during the timed steps:"
    spec, two_ranks = spec_of("probe_blocks"), spec_of("probe_blocks", tasks_per_node=2)
    runs = [
        *(
            probe_run(PROFILE, two_ranks, SLOWER, warnings=[f"{beside} {share}% of the 2 cores"])
            for share in (90, 33, 33)
        ),
        *(probe_run(PROFILE, spec, SLOWER, warnings=[f"{beside} {share}% of the 2 cores"]) for share in (50, 50, 10)),
    ]
    shapes = fit_shapes(NOMINAL, runs, "s")
    interval = predict(single, table_of(single), msgspec.structs.replace(NOMINAL, measured=shapes)).interval
    assert interval.high / interval.low == pytest.approx(4, rel=0.05)


def test_overlaps_of_other_links_are_not_used() -> None:
    spec = spec_of("ddp", nodes=4)
    shapes = measured([spec]).measured
    assert shapes is not None
    assert shapes.overlaps
    assert shapes.links is not None
    slower = (shapes.links[0], HockneyLink(1e-3, 1e-7))
    assert shapes.over_links(slower).overlaps == []


def test_block_times_are_those_that_pass() -> None:
    spec, single = spec_of("probe_blocks"), spec_of("single")
    run = probe_run(PROFILE, spec, SLOWER, probe=blocks_probe(PROFILE, spec, SLOWER, wall=4.0))
    machine = msgspec.structs.replace(NOMINAL, measured=fit_shapes(NOMINAL, [run], "s"))
    assert compute_s(single, machine) == pytest.approx(4 * SLOWER * compute_s(single, NOMINAL), rel=1e-6)
    assert "4.00 times" in busy_notes([run])[0]
    assert busy_notes([probe_run(PROFILE, spec, SLOWER)]) == []


def test_probed_message_sizes_include_the_smallest_and_largest() -> None:
    spec = spec_of("ddp", nodes=2)
    priced = price_run(spec, table_of(spec), NOMINAL)
    sizes = [4 * 3**power for power in range(14)] + [777]
    priced.unmeasured.messages.clear()
    priced.unmeasured.messages.update({MessageShape("all_reduce", 2, 1, 1, size): 1.0 for size in sizes})
    priced.unmeasured.messages[MessageShape("all_reduce", 3, 2, 1, 64)] = 1.0
    (probe,) = message_probes([priced], 1.0)
    found = parse_messages(probe.point["options"]["messages"])
    assert len(found) == MAX_SIZES_PER_GROUP
    assert (found[0].payload_bytes, found[-1].payload_bytes) == (min(sizes), max(sizes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("allreduce:2:1:1:64", "begins with no operation"),
        ("send:2:1:64", "operation:ranks:ranks_per_node:rivals:payload_bytes is right"),
        ("send:3:1:1:64", "3 ranks, 1 on every node, cannot be"),
        ("all_reduce:3:2:1:64", "3 ranks, 2 on every node, cannot be"),
    ],
)
def test_wrong_messages_are_named(text: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        parse_messages(text)
    shapes = [MessageShape("send", 2, 1, 1, 64), MessageShape("all_gather", 4, 2, 2, 128)]
    assert parse_messages(format_messages(shapes)) == shapes
