"""Fits on runs that the model itself made: what was put in must come out."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.errors import ConfigError
from hpcbench.oracle.calibration.least_squares import cholesky_factor, find_mode, solve_positive_definite
from hpcbench.oracle.calibration.posterior import Observation, fit_posterior, run_observations
from hpcbench.oracle.cost_model import harmonic_number, unsharded_row_kernels
from hpcbench.oracle.machine import Machine, Posterior, StrategyOverhead, nominal_machine
from hpcbench.oracle.prediction import predict
from hpcbench.oracle.uncertainty import apply_parameters, predicted_step_s
from hpcbench.parallel.layer_table import LayerTable, read_shipped_table
from hpcbench.parallel.roofline import RooflineModel
from hpcbench.results.schema import RunMetrics, RunResult, StepTimeStatistics

PROFILE, _ = load_cluster("abci-v100")
NOMINAL = nominal_machine(PROFILE, tasks_per_node=4)
NAMES = ["compute", "intra_node.bandwidth", "inter_node.bandwidth"]


def table_of(model: str) -> LayerTable:
    found = read_shipped_table(model, "mnist")
    assert found is not None
    return found


MODELS = ("vgg11", "vgg16")
TABLES = {model: table_of(model) for model in MODELS}


def spec_of(model: str, ranks: int, **more: Any) -> RunSpec:
    once: dict[str, Any] = {"fusion_threshold_mb": 1024.0, "cycle_time_ms": 1e6}
    return RunSpec(
        model=model, dataset="mnist", strategy="horovod", batch_size=256, nodes=-(-ranks // 4),
        tasks_per_node=min(ranks, 4), dp_degree=ranks, options=once, **more,
    )  # fmt: skip


def made(
    truth: Machine, noise: Random | None = None, ranks: Sequence[int] = (1, 2, 4, 8), models: Sequence[str] = MODELS
) -> list[Observation]:
    """Runs as ``truth`` makes them, with ``noise`` each 3 % off."""
    specs = [spec_of(model, count) for model in models for count in ranks]
    off = [exp(noise.gauss(0.0, 0.03)) if noise else 1.0 for _ in specs]
    return [
        Observation(spec, TABLES[spec.model], predicted_step_s(truth, spec, TABLES[spec.model]) * factor)
        for spec, factor in zip(specs, off, strict=True)
    ]


def found_of(machine: Machine) -> dict[str, float]:
    return {one.name: one.log_factor for one in posterior_of(machine).parameters}


def posterior_of(machine: Machine) -> Posterior:
    assert machine.posterior is not None
    return machine.posterior


def test_true_parameters_are_recovered() -> None:
    truth = apply_parameters(NOMINAL, NAMES, [0.4, -0.9, -1.2])
    fitted = fit_posterior(NOMINAL, made(truth))
    assert fitted.depth == "fitted"
    assert fitted.comm.intra_node.beta_s_per_byte == pytest.approx(truth.comm.intra_node.beta_s_per_byte, rel=0.1)
    assert fitted.comm.inter_node.beta_s_per_byte == pytest.approx(truth.comm.inter_node.beta_s_per_byte, rel=0.05)
    assert fitted.compute.factors["vgg11"] == pytest.approx(exp(0.4), rel=0.02)
    for one in posterior_of(fitted).residuals:
        assert one.predicted_s == pytest.approx(one.measured_s, rel=0.02)


def test_a_fitted_machine_can_be_written_and_read() -> None:
    fitted = fit_posterior(NOMINAL, made(NOMINAL, ranks=[1, 2]))
    assert msgspec.json.decode(msgspec.json.encode(fitted), type=Machine) == fitted
    # Who does not ask the posterior is as sure of what runs have shown, and no surer of what they have not.
    assert fitted.compute.spread < 0.1 < NOMINAL.compute.spread
    assert fitted.comm.spread == NOMINAL.comm.spread


def test_parameters_without_evidence_stay_nominal() -> None:
    (alone,) = made(NOMINAL, ranks=[1])[:1]
    fitted = fit_posterior(NOMINAL, [alone._replace(step_time_s=alone.step_time_s * 1.5)])
    assert fitted.comm == NOMINAL.comm
    learned = {one.name: one.learned for one in posterior_of(fitted).parameters}
    assert learned.pop("compute") > 0.5
    assert learned.pop("compute.vgg11") > 0.0
    assert max(learned.values()) < 1e-9
    # Most of it is the device's, which other models share, some the model's own.
    shared, own = found_of(fitted)["compute"], found_of(fitted)["compute.vgg11"]
    assert shared + own == pytest.approx(log(1.5), rel=0.05)
    assert shared > 3 * own > 0


def test_one_outlier_moves_the_fit_little() -> None:
    runs = made(NOMINAL)
    runs[5] = runs[5]._replace(step_time_s=2 * runs[5].step_time_s)
    fitted = fit_posterior(NOMINAL, runs)
    assert posterior_of(fitted).residuals[5].weight < 0.1
    assert max(abs(value) for value in found_of(fitted).values()) < 0.25
    others = [one for place, one in enumerate(posterior_of(fitted).residuals) if place != 5]
    assert max(abs(log(one.predicted_s / one.measured_s)) for one in others) < 0.04


def test_a_spread_between_launches_counts_a_run_less() -> None:
    runs = made(NOMINAL, ranks=[1])[:1] * 2
    runs[1] = runs[1]._replace(step_time_s=1.2 * runs[1].step_time_s, spread=0.3)
    assert abs(sum(found_of(fit_posterior(NOMINAL, runs)).values())) < 0.02


def test_intervals_cover_runs_of_64_times_as_many_ranks() -> None:
    dice, held, draws = Random(1), 0, 25
    spec, table = spec_of("vgg11", 512), TABLES["vgg11"]
    for _ in range(draws):
        truth = apply_parameters(NOMINAL, NAMES, [dice.gauss(0, 0.3), dice.gauss(0, 0.6), dice.gauss(0, 0.6)])
        interval = predict(spec, table, fit_posterior(NOMINAL, made(truth, dice, models=["vgg11"]))).interval
        launch = predicted_step_s(truth, spec, table) * exp(dice.gauss(0.0, 0.03))
        held += interval.low <= launch <= interval.high
        assert interval.high < 3 * interval.low
    # The model's form is right here, which the interval does not rely on.
    assert held >= 0.9 * draws - 1


def test_a_wider_extrapolation_is_less_sure() -> None:
    fitted = fit_posterior(NOMINAL, made(NOMINAL))
    widths = []
    for ranks in (8, 64, 1024):
        interval = predict(spec_of("vgg11", ranks), TABLES["vgg11"], fitted).interval
        widths.append(interval.high / interval.low)
    assert widths == sorted(widths)
    assert widths[0] > 1.02


def test_delays_are_what_means_lie_above_medians() -> None:
    runs = [one._replace(mean_s=one.step_time_s + 0.004 * harmonic_number(one.spec.nodes)) for one in made(NOMINAL)]
    fitted = fit_posterior(NOMINAL, runs)
    assert fitted.delay_s == pytest.approx(0.004)
    spec, table = spec_of("vgg11", 64), TABLES["vgg11"]
    step, calm = (predict(spec, table, machine) for machine in (fitted, replace(fitted, delay_s=0.0)))
    # A median contains no mean of delays; the interval does.
    assert step.step_time_s == calm.step_time_s
    assert step.interval.high - calm.interval.high == pytest.approx(0.004 * harmonic_number(16))
    assert step.interval.high / step.step_time_s > step.step_time_s / step.interval.low
    assert fit_posterior(NOMINAL, made(NOMINAL)).delay_s == 0.0


def test_a_strategys_own_numbers_move_where_they_are_named() -> None:
    own = replace(NOMINAL, strategies={"horovod": StrategyOverhead(step_s=0.05)})
    truth = replace(NOMINAL, strategies={"horovod": StrategyOverhead(step_s=0.2)})
    fitted = fit_posterior(own, made(truth), {"strategy.horovod.step": 2.0, "strategy.horovod.compute": 0.0})
    assert fitted.strategies["horovod"].step_s == pytest.approx(0.2, rel=0.1)
    assert fitted.strategies["horovod"].compute_factor == 1.0
    assert "strategy.horovod.step" not in found_of(fit_posterior(NOMINAL, made(NOMINAL, ranks=[1])))


def test_fitting_no_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="no run to fit"):
        fit_posterior(NOMINAL, [])


def test_cholesky_factor_and_solution_are_exact() -> None:
    matrix = [[4.0, 2.0, 0.0], [2.0, 5.0, 1.0], [0.0, 1.0, 3.0]]
    assert cholesky_factor(matrix)[1] == [1.0, 2.0, 0.0]
    assert solve_positive_definite(matrix, [10.0, 19.0, 9.0]) == pytest.approx([1.0, 3.0, 2.0])


def test_the_posterior_mode_of_a_line_is_analytic() -> None:
    # One residual and one prior, both of width 1: halfway, but for the flatter tails of Student's t.
    found = find_mode(lambda at: [at[0] - 0.1], [1.0])
    assert found.at == pytest.approx([0.0555], abs=2e-4)
    assert found.covariance[0][0] == pytest.approx(1 / 2.25, rel=0.01)


def result(spec: RunSpec, median_s: float, mean_s: float, status: str = "ok") -> RunResult:
    spread = StepTimeStatistics(
        median=median_s, mean=mean_s, std=0.0, p10=0.0, p90=0.0, min=0.0, max=0.0,
        ci95_low=median_s * 0.99, ci95_high=median_s * 1.01,
    )  # fmt: skip
    return RunResult(
        run_id=run_id(spec), config_id=config_id(spec), attempt=1, sweep="s", cluster="c", status=status, spec=spec,
        metrics=RunMetrics(step_time_s=spread),
    )  # fmt: skip


def test_launches_of_a_configuration_become_one_observation() -> None:
    one, two = spec_of("vgg11", 1), spec_of("vgg11", 2)
    results = [
        result(one, 1.0, 1.1), result(replace(one, repeat=1), 1.2, 1.25), result(replace(one, repeat=2), 1.1, 1.3),
        result(two, 2.0, 2.5), result(spec_of("vgg11", 4), 9.0, 9.0, status="failed"),
    ]  # fmt: skip
    found = sorted(run_observations(results, lambda spec: TABLES[spec.model]), key=lambda seen: seen.spec.ranks)
    assert [seen.spec.ranks for seen in found] == [1, 2]
    assert [seen.step_time_s for seen in found] == [1.1, 2.0]
    assert [seen.mean_s for seen in found] == pytest.approx([1.2, 2.5])
    assert found[0].spread == pytest.approx(1.2533 * 0.0913 / 3**0.5, rel=0.01)
    assert found[1].spread == pytest.approx(0.01 / 1.96)


def test_measured_kernels_are_sorted_in_once_for_copies_of_a_machine() -> None:
    compute = NOMINAL.compute
    assert RooflineModel.of(compute) is RooflineModel.of(replace(compute, factors={"": 2.0}))
    slower = replace(compute, launch_s=2 * compute.launch_s)
    assert RooflineModel.of(slower) is not RooflineModel.of(compute)
    kernel = unsharded_row_kernels(spec_of("vgg11", 1), TABLES["vgg11"])[0].forward
    assert RooflineModel.of(slower).seconds(kernel) == pytest.approx(
        RooflineModel.of(compute).seconds(kernel) + compute.launch_s
    )
