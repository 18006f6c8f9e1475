"""Scores by hand: two accuracies, a failure, a foretold one, ranks with ties, what following a prediction costs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.oracle.scoring import (
    PredictorResult,
    ScoredCase,
    ScoredConfiguration,
    accuracy,
    mean_tau,
    score_predictor,
)
from hpcbench.config.run_spec import RunSpec

NAME = "we"


def case(
    strategy: str = "ddp", launches_s: tuple[float, ...] = (1.0,), said: PredictorResult | None = None, *, status: str = "ok",
    model: str = "resnet18", batch_size: int = 8, **figures: float,
) -> ScoredCase:  # fmt: skip
    spec = RunSpec(model=model, dataset="cifar10", strategy=strategy, batch_size=batch_size, nodes=2, dp_degree=2)
    measured = ScoredConfiguration(
        cluster="c", config_id=strategy, spec=spec, status=status, launches_s=list(launches_s), figures=figures
    )
    return ScoredCase(measured, {} if said is None else {NAME: said})


def says(step_time_s: float | None, fits: bool | None = None, **more: Any) -> PredictorResult:
    return PredictorResult(step_time_s=step_time_s, fits=fits, **more)


@pytest.mark.parametrize(
    ("predicted", "measured", "right"), [(1.0, 1.0, 1.0), (0.9, 1.0, 0.9), (1.2, 1.0, 0.8), (3.0, 1.0, -1.0), (0.0, 1.0, 0.0)]
)  # fmt: skip
def test_accuracy_is_not_clipped(predicted: float, measured: float, right: float) -> None:
    assert accuracy(predicted, measured) == pytest.approx(right)


def test_accuracy_and_failures_are_counted_per_strategy() -> None:
    cases = [
        case("ddp", (1.0, 1.2, 1.1), says(1.21, low_s=1.0, high_s=1.3)),
        case("ddp", (2.0,), says(1.0, low_s=0.9, high_s=1.1), batch_size=16),
        case("fsdp", (4.0,), says(4.0)),
    ]
    found = score_predictor(cases, NAME)
    ddp = found.strategies["ddp"]
    assert (ddp.count, ddp.failed) == (2, 0)
    assert ddp.mean == pytest.approx(0.7)
    assert ddp.signed == pytest.approx((0.1 - 0.5) / 2)
    # The launches 1.0, 1.2, 1.1 alone have a spread: the standard deviation of their logarithms.
    assert ddp.noise == pytest.approx(0.0912, abs=1e-4)
    assert ddp.covered == 0.5
    assert found.total is not None
    assert (found.total.count, found.total.mean) == pytest.approx((3, 0.8))
    assert found.strategies["fsdp"].noise is None


def test_failures_count_unless_they_were_foretold() -> None:
    cases = [
        case("ddp", (1.0,), says(1.0, fits=True)),
        case("zero1", (), says(1.0, fits=True), status="oom"),
        case("fsdp", (), says(1.0, fits=False), status="oom"),
        case("filter", (), says(1.0, fits=True), status="failed"),
        case("gpipe", (1.0,), PredictorResult(reason="no formulas")),
        case("1f1b", (), says(1.0), status="skipped"),
        case("channel", (1.0,), says(1.0, fits=False)),
    ]
    found = score_predictor(cases, NAME)
    assert found.total is not None
    assert (found.total.count, found.total.failed) == (5, 3)
    assert found.total.mean == pytest.approx(2 / 5)
    assert "fsdp" not in found.strategies
    assert "1f1b" not in found.strategies
    assert found.strategies["gpipe"].mean == 0.0
    assert found.false_fits == 1


@pytest.mark.parametrize(
    ("one", "other", "tau"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3], [1, 3, 2], 1 / 3),
        # Of three pairs one is tied on one side: 2 / sqrt(2 * 3).
        ([1, 1, 2], [1, 2, 3], 2 / 6**0.5),
        ([1, 1], [1, 2], None),
    ],
)
def test_kendalls_tau_counts_ties(one: list[float], other: list[float], tau: float | None) -> None:
    cases = [
        case(f"s{number}", (there,), says(said)) for number, (said, there) in enumerate(zip(one, other, strict=True))
    ]
    assert mean_tau(cases, NAME) == (None if tau is None else pytest.approx(tau))


def test_ranking_is_by_time_per_sample_within_a_model_and_its_devices() -> None:
    cases = [
        # Per sample 1/16, 2/16 and, with twice the batch, 1.5/32: the last is the best, the first was chosen.
        case("ddp", (1.0,), says(1.0)),
        case("fsdp", (2.0,), says(3.0)),
        case("zero1", (1.5,), says(4.0), batch_size=16),
        case("ddp", (1.0,), says(1.0), model="vgg11"),
    ]
    found = score_predictor(cases, NAME).ranking
    assert found.groups == 1
    assert mean_tau(cases, NAME) == pytest.approx(1 / 3)
    assert found.regret == found.worst_regret == pytest.approx((1 / 16) / (1.5 / 32) - 1)
    assert found.failed == 0
