"""Fits find what simulated runs were made with."""

from __future__ import annotations

import random
from datetime import datetime, timezone
from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.oracle.calibration.calibration_runs import CalibrationRun, r_squared, rms_log_error
from hpcbench.oracle.calibration.fit_collectives import (
    CollectivePoint,
    fit_bands,
    fit_link,
    format_bytes_short,
    non_negative_least_squares,
)
from hpcbench.oracle.calibration.fit_kernels import fit_kind_factors, fit_roofline, kernel_samples, probed_share
from hpcbench.oracle.calibration.fit_machine import fit_calibration
from hpcbench.oracle.calibration.fit_overheads import fit_contention, fit_crowding, fit_lone_ranks, fit_overlap
from hpcbench.oracle.collective_formulas import GroupLinks, HockneyLink, collective_s
from hpcbench.oracle.cost_model import (
    CostModel,
    RowShare,
    expected_normal_maximum,
    row_kernels,
    update_kernels,
)
from hpcbench.oracle.machine import Machine, nominal_machine
from hpcbench.oracle.prediction import predict
from hpcbench.oracle.strategies.base import resolve_cost
from hpcbench.oracle.tensor_sizes import parameter_bytes
from hpcbench.parallel.layer_table import LayerTable, read_shipped_table
from hpcbench.parallel.roofline import KernelSample, RooflineModel
from hpcbench.results.probe_records import CollectiveProbe, KernelProbe, OverlapProbe, ProbeResults, UpdateProbe
from hpcbench.results.schema import RunMetrics, RunResult, StepTimeStatistics

PROFILE, _ = load_cluster("slurmbox")
NOMINAL = nominal_machine(PROFILE)
TRUE = HockneyLink(3e-4, 1.2 / 125e6)
SIZES = [1024 * 4**power for power in range(8)]


def table_of(model: str) -> LayerTable:
    found = read_shipped_table(model, "cifar10")
    assert found is not None
    return found


def spread_of(seconds: float, scatter: float = 0.0) -> StepTimeStatistics:
    wide = 1.28 * scatter * seconds
    return StepTimeStatistics(
        median=seconds, mean=seconds, std=scatter * seconds, p10=seconds - wide, p90=seconds + wide,
        min=seconds, max=seconds, ci95_low=seconds, ci95_high=seconds,
    )  # fmt: skip


def run_of(
    strategy: str, step_s: float, model: str = "vit", probe: ProbeResults | None = None, **more: Any
) -> CalibrationRun:
    spec = RunSpec(model=model, dataset="cifar10", strategy=strategy, **({"batch_size": 8} | more))
    peak = more.pop("peak_memory_bytes", None)
    metrics = RunMetrics(step_time_s=spread_of(step_s), peak_memory_bytes=peak)
    result = RunResult(
        run_id=run_id(spec), config_id=config_id(spec), attempt=1, sweep="s", cluster="slurmbox", status="ok",
        spec=spec, metrics=metrics, probe=probe, environment_digest="e",
    )  # fmt: skip
    return CalibrationRun(result, table_of(model))


def true_s(kernel: Any) -> float:
    """Convolutions reach half of what the roofline says, all else three quarters."""
    return RooflineModel(NOMINAL.compute).roofline_s(kernel) * (2.0 if kernel.kind == "Conv2d" else 1.33)


def layers_probe(model: str, noise: random.Random, relative: float = 0.03) -> tuple[ProbeResults, float]:
    """Return the result of a probe, and the sum of all kernels of a step."""
    spec, table = RunSpec(model=model, dataset="cifar10", strategy="single", batch_size=8), table_of(model)

    def about(seconds: float) -> float:
        return seconds * noise.lognormvariate(0, relative)

    kernels, total = [], 0.0
    for layer in table.layers:
        for split, parts in (("whole", 1), ("outputs", 2), ("positions", 4)):
            share = probed_share(KernelProbe(row="", kind="", split=split, parts=parts, samples=8, forward_s=0.0, spread=0.0, repeats=1))  # fmt: skip
            one = row_kernels(spec, layer, 8, share)
            seconds = [true_s(one.forward), true_s(one.backward)]
            total += sum(seconds) if parts == 1 else 0.0
            kernels.append(
                KernelProbe(row=layer.name, kind=layer.kind, split=split, parts=parts, samples=8,
                            forward_s=about(seconds[0]), backward_s=about(seconds[1]), spread=relative, repeats=9)
            )  # fmt: skip
    updates = []
    for size in parameter_bytes(spec, table):
        (kernel,) = update_kernels(spec, [size])
        total += true_s(kernel)
        updates.append(UpdateProbe(optimizer="sgd", parameter_bytes=size, seconds=about(true_s(kernel)),
                                   spread=relative, repeats=5))  # fmt: skip
    return ProbeResults(base_memory_bytes=200 * 2**20, kernels=kernels, updates=updates), total


def collectives_probe(ranks: int, noise: random.Random, relative: float = 0.03, **more: Any) -> ProbeResults:
    span = GroupLinks(ranks, ranks, HockneyLink(1e-6, 1e-10), TRUE, trees=False)
    found = [
        CollectiveProbe(
            operation=operation, ranks=ranks, nodes=ranks, payload_bytes=size, spread=relative, repeats=30,
            seconds=collective_s(operation, span, size) * noise.lognormvariate(0, relative) + 5e-5,
        )
        for operation in ("all_reduce", "all_gather", "broadcast")
        for size in SIZES
    ]  # fmt: skip
    overlap = OverlapProbe(ranks=ranks, nodes=ranks, payload_bytes=2**20, compute_s=0.01, comm_s=0.02,
                           compute_under_comm_s=0.0125, both_s=0.03, issue_s=5e-5, repeats=7)  # fmt: skip
    return ProbeResults(collectives=found, overlaps=[overlap], **more)


def everything(noise: random.Random, ddp: bool = True) -> list[CalibrationRun]:
    """Runs on a machine whose steps take 1.5 times the sum of their kernels."""
    runs = []
    for model in ("vit", "vgg11", "resnet18"):
        probe, total = layers_probe(model, noise)
        runs.append(run_of("probe_layers", 1.5 * total, model, probe))
    alone_s = runs[0].step_s
    for nodes in (2, 4):
        step_s = alone_s * (1 + 0.04 * expected_normal_maximum(nodes))
        probe = collectives_probe(nodes, noise)
        runs.append(run_of("probe_collectives", step_s, probe=probe, nodes=nodes, dp_degree=nodes))
    beside = alone_s * (1 + 0.04 * expected_normal_maximum(2)) * 1.25
    runs.append(run_of("probe_collectives", beside, probe=ProbeResults(), tasks_per_node=2, dp_degree=2))
    return runs


def test_probes_name_kernels_as_predictions_do() -> None:
    spec, table = RunSpec(model="vgg11", dataset="cifar10", strategy="probe_layers", batch_size=8), table_of("vgg11")
    row = next(layer for layer in table.layers if layer.kind == "Conv2d" and layer.attributes["in_channels"] > 3)
    given: dict[str, Any] = {
        "row": row.name,
        "kind": "Conv2d",
        "samples": 8,
        "forward_s": 1e-3,
        "spread": 0.0,
        "repeats": 3,
    }
    probe = ProbeResults(kernels=[
        KernelProbe(**given, split="inputs", parts=4, backward_s=2e-3),
        KernelProbe(**(given | {"row": "nowhere"}), backward_s=2e-3),
    ])  # fmt: skip
    found = kernel_samples(spec, table, probe)
    expected = row_kernels(spec, row, 8, RowShare(flops=0.25, inputs=0.25, weights=0.25))
    assert [(one.kernel.direction, one.seconds) for one in found] == [("forward", 1e-3), ("backward", 2e-3)]
    assert [one.kernel.flops for one in found] == [expected.forward.flops, expected.backward.flops]
    assert found[0].kernel.weight_bytes == row.parameters  # a quarter of four bytes each


def test_a_roofline_is_found_in_what_was_measured() -> None:
    true = msgspec.structs.replace(NOMINAL.compute, flops_efficiency=2.4, bandwidth_efficiency=0.2, launch_s=5e-5)
    spec, noise = RunSpec(model="resnet18", dataset="cifar10", strategy="single", batch_size=8), random.Random(4)
    samples = []
    for layer in table_of("resnet18").layers:
        for one in row_kernels(spec, layer, 8):
            if one.moved_bytes:
                seconds = RooflineModel(true).roofline_s(one) * noise.lognormvariate(0, 0.05)
                samples.append(KernelSample(kernel=one, seconds=seconds))
    found = fit_roofline(NOMINAL.compute, samples)
    assert found.samples == samples
    assert found.flops_efficiency == pytest.approx(2.4, rel=0.1)
    assert found.bandwidth_efficiency == pytest.approx(0.2, rel=0.1)
    assert found.launch_s == pytest.approx(5e-5, rel=0.1)


@pytest.fixture(scope="module")
def calibrated() -> tuple[Any, list[CalibrationRun]]:
    runs = everything(random.Random(7))
    when = datetime(2026, 11, 21, 20, 0, tzinfo=timezone.utc)
    return fit_calibration(PROFILE, None, runs, when), runs


def test_kernel_factors_are_recovered_and_checked_on_other_models(calibrated: Any) -> None:
    calibration, runs = calibrated
    factors = calibration.machine.compute.factors
    assert factors == {name: pytest.approx(1.5, rel=0.1) for name in ("vit", "vgg11", "resnet18", "")}
    by_others = next(one for one in calibration.residuals if "other models" in one.what)
    assert by_others.points == 3
    assert 0 < by_others.error < 0.35
    for run in runs[:3]:
        spec = msgspec.structs.replace(run.spec, strategy="single")
        found = predict(spec, run.table, calibration.machine)
        assert found.compute_s == pytest.approx(run.step_s, rel=0.05)
        assert found.interval.low < run.step_s < found.interval.high


def test_factors_of_layer_kinds_are_recovered() -> None:
    """A model with other shares of the kinds takes the time of the kinds' factors."""
    true = {"Conv2d": 4.0, "Linear": 5.5, "BatchNorm2d": 4.5}
    shares = (
        {"Conv2d": 0.9, "BatchNorm2d": 0.1},
        {"Conv2d": 0.5, "BatchNorm2d": 0.5},
        {"Conv2d": 0.05, "Linear": 0.95},
    )
    found = fit_kind_factors([(one, sum(true[kind] * part for kind, part in one.items())) for one in shares])
    assert found["Linear"] / found["Conv2d"] == pytest.approx(5.5 / 4.0, rel=0.02)
    assert found["BatchNorm2d"] / found["Conv2d"] == pytest.approx(4.5 / 4.0, rel=0.05)


def test_kind_factors_are_one_with_a_single_model() -> None:
    assert fit_kind_factors([({"Conv2d": 0.2, "Linear": 0.1}, 1.4)]) == pytest.approx({"Conv2d": 1.0, "Linear": 1.0})


def test_the_fit_recovers_crowding_and_overlap_of_simulated_runs(calibrated: Any) -> None:
    calibration, _ = calibrated
    machine = calibration.machine
    assert machine.straggling == pytest.approx(0.04, rel=1e-6)
    assert machine.compute.crowding == {1: 1.0, 2: pytest.approx(1.25)}
    assert machine.comm.overlap_slowdown == pytest.approx(1.25)
    assert machine.comm.comm_slowdown == pytest.approx(5)
    assert machine.comm.call_s == pytest.approx(5e-5)


def test_links_are_recovered_and_unmeasured_operations_are_noted(calibrated: Any) -> None:
    calibration, runs = calibrated
    clock = CostModel(calibration.machine, RunSpec(model="vit", dataset="cifar10", strategy="ddp", batch_size=8, nodes=4, dp_degree=4))  # fmt: skip
    span = GroupLinks(4, 4, HockneyLink(0, 0), TRUE, trees=False)
    from hpcbench.oracle.placement import GroupPlacement

    for operation in ("all_reduce", "all_gather", "broadcast"):
        for size in SIZES:
            priced = clock.collective(operation, size, GroupPlacement(4, 4, 1, 1)).seconds
            assert priced == pytest.approx(collective_s(operation, span, size) + 5e-5, rel=0.1)
    assert calibration.made_at == "2026-11-21T20:00:00Z"
    assert calibration.partition == "normal"
    assert calibration.run_ids == sorted(one.result.run_id for one in runs)
    assert calibration.environment_digests == ["e"]
    assert "not measured: reduce_scatter, all_to_all, reduce, send; taken to be as all_reduce" in calibration.notes
    assert any("contention was not measured" in note for note in calibration.notes)
    assert calibration.machine.depth == "calibrated"
    decoded = msgspec.json.decode(msgspec.json.encode(calibration), type=type(calibration))
    assert decoded == calibration


def test_runs_of_a_strategy_give_its_overhead_and_the_memory_of_a_process(calibrated: Any) -> None:
    calibration, runs = calibrated
    machine: Machine = msgspec.structs.replace(calibration.machine, strategies={})
    trained = []
    for number, nodes in enumerate((2, 4)):
        more: dict[str, Any] = {"nodes": nodes, "dp_degree": nodes, "batch_size": 8 * (number + 1)}
        spec = RunSpec(model="vit", dataset="cifar10", strategy="ddp", **more)
        cost, table = resolve_cost("ddp"), table_of("vit")
        step = cost.step(spec, table, CostModel(machine, spec))
        run = run_of("ddp", step.step_time_s + 0.02 * step.compute_s + 0.004, **more)
        run.result.metrics.peak_memory_bytes = cost.memory(spec, table, 0).total_bytes + 222 * 2**20
        trained.append(run)
    found = fit_calibration(PROFILE, None, [*runs, *trained])
    own = found.machine.strategies["ddp"]
    predicted = [predict(one.spec, one.table, found.machine) for one in trained]
    assert [one.step_time_s for one in predicted] == [pytest.approx(one.step_s, rel=0.02) for one in trained]
    assert own.step_s > 0
    assert found.machine.base_bytes == pytest.approx(222 * 2**20)
    before, after = (one for one in found.residuals if one.part == "strategies")
    assert after.error < before.error


def test_no_library_takes_negative_time(calibrated: Any) -> None:
    calibration, runs = calibrated
    machine: Machine = msgspec.structs.replace(calibration.machine, strategies={})
    for factor, step_s in ((-0.3, 0.0), (-0.2, 0.004), (0.1, -0.01)):
        trained = []
        for number, nodes in enumerate((2, 4)):
            more: dict[str, Any] = {"nodes": nodes, "dp_degree": nodes, "batch_size": 8 * (4 * number + 1)}
            spec = RunSpec(model="vit", dataset="cifar10", strategy="ddp", **more)
            step = resolve_cost("ddp").step(spec, table_of("vit"), CostModel(machine, spec))
            trained.append(run_of("ddp", step.step_time_s + factor * step.compute_s + step_s, **more))
        fitted = fit_calibration(PROFILE, None, [*runs, *trained]).machine.strategies["ddp"]
        assert fitted.compute_factor >= 1.0
        assert fitted.step_s >= 0.0


def test_unmeasured_parts_keep_the_profiles_numbers() -> None:
    found = fit_calibration(PROFILE, None, [])
    assert msgspec.structs.replace(found.machine, depth="nominal", source=NOMINAL.source) == msgspec.structs.replace(
        NOMINAL, notes=[]
    )
    assert found.notes[0] == "no kernel was measured: a step's computation is the profile's"


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_line_is_found_in_noise(operation: str, ranks: int) -> None:
    noise = random.Random(3)
    span = GroupLinks(ranks, ranks, HockneyLink(0, 0), TRUE, trees=False)
    points = [
        CollectivePoint(size, collective_s(operation, span, size) * noise.lognormvariate(0, 0.03), 0.03)
        for size in SIZES
    ]
    found = fit_link(operation, span, points, HockneyLink(1e-5, 1e-9))
    assert found.latency_s == pytest.approx(TRUE.latency_s, rel=0.06)
    assert found.beta_s_per_byte == pytest.approx(TRUE.beta_s_per_byte, rel=0.06)
    assert len(fit_bands(operation, span, points, TRUE)) == 1


def test_a_link_is_recovered_through_ring_and_tree_times() -> None:
    span = GroupLinks(16, 16, HockneyLink(0, 0), TRUE, trees=True)
    points = [CollectivePoint(size, collective_s("all_reduce", span, size), 0.01) for size in SIZES]
    found = fit_link("all_reduce", span, points, HockneyLink(1e-5, 1e-9))
    assert tuple(found) == pytest.approx(tuple(TRUE))


def test_sizes_that_one_line_does_not_fit_get_bands() -> None:
    span = GroupLinks(2, 2, HockneyLink(0, 0), TRUE, trees=False)
    fast = span._replace(inter_node=HockneyLink(1e-4, 1e-10))
    sizes = [1024 * 2**power for power in range(14)]
    points = [
        CollectivePoint(size, collective_s("all_reduce", fast if size < 131072 else span, size), 0.01) for size in sizes
    ]
    lines = fit_bands("all_reduce", span, points, TRUE)
    assert [line.from_bytes for line in lines] == [0.0, 131072]
    assert tuple(lines[1].wire) == pytest.approx(tuple(TRUE))
    assert lines[0].wire.latency_s == pytest.approx(1e-4)


def test_neither_latency_nor_bandwidth_is_negative() -> None:
    assert non_negative_least_squares([(1.0, 1.0, 1.0, 1.0), (1.0, 2.0, 3.0, 1.0)]) == pytest.approx((0.0, 1.4))
    assert non_negative_least_squares([(1.0, 1.0, 3.0, 1.0), (1.0, 2.0, 1.0, 1.0)]) == pytest.approx((2.0, 0.0))
    assert non_negative_least_squares([(1.0, 1.0, 3.0, 1.0), (1.0, 2.0, 5.0, 1.0)]) == pytest.approx((1.0, 2.0))
    assert non_negative_least_squares([(1.0, 0.0, 3.0, 1.0)]) == (3.0, 0.0)


def test_contention_is_relative_to_one_group_of_large_messages() -> None:
    def probe(groups: int, seconds: float, size: int = 2**20) -> CollectiveProbe:
        return CollectiveProbe(operation="all_reduce", ranks=2, nodes=2, payload_bytes=size, groups=groups,
                               seconds=seconds, spread=0.0, repeats=9)  # fmt: skip

    found = fit_contention([probe(2, 1.9), probe(4, 3.6), probe(1, 1.0), probe(2, 7.0, 2**10), probe(1, 1.0, 2**10)])
    assert found == {2: 1.9, 4: 3.6}
    assert fit_contention([probe(2, 1.9)]) == {}


def test_contention_factors_are_at_least_one() -> None:
    overlap = OverlapProbe(ranks=2, nodes=2, payload_bytes=1, compute_s=1.0, comm_s=1.0, compute_under_comm_s=0.9,
                           both_s=1.0, issue_s=0.0, repeats=3)  # fmt: skip
    assert fit_overlap([overlap]) == 1.0
    runs = [run_of("single", 1.0), run_of("probe_collectives", 0.9, tasks_per_node=2, dp_degree=2)]
    assert fit_lone_ranks(runs).straggling == 0.0
    assert fit_crowding(runs, fit_lone_ranks(runs)) == {2: 1.0}


def test_a_lone_launch_that_was_held_up_is_one_of_several() -> None:
    runs = [run_of("probe_layers", 2.0), run_of("probe_layers", 4.0, "vgg11")]
    runs += [run_of("probe_collectives", 1.0, nodes=2, dp_degree=2, seed=seed) for seed in range(5)]
    found = fit_lone_ranks(runs)
    assert found.straggling == 0.0
    assert found.steps_s["vit", "cifar10", 8, "fp32"] == pytest.approx(1.0, rel=0.1)
    assert found.steps_s["vgg11", "cifar10", 8, "fp32"] == 4.0


def test_residuals_are_root_mean_square_log_errors() -> None:
    assert rms_log_error([(1.0, 1.0), (1.1, 1.1)]) == 0.0
    assert rms_log_error([(1.1, 1.0)]) == pytest.approx(0.0953, rel=1e-3)
    assert r_squared([(1.0, 1.0), (2.0, 2.0)]) == 1.0
    assert r_squared([(1.0, 1.0)]) is None
    assert format_bytes_short(1024) == "1 KiB"
    assert format_bytes_short(3 * 2**20) == "3 MiB"
