"""Validation by hand: errors, ranks with ties, regret and its significance, and what is compared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import NotPredicted, Prediction
from hpcbench.report.hypothesis_tests import pooled_spread
from hpcbench.report.validation import (
    MeasuredConfiguration,
    ValidationCase,
    cases_view,
    choices_view,
    compare_groups,
    errors_view,
    measured_configurations,
)
from tests.report.planted import frame_of, launch


@pytest.fixture(scope="module")
def any_prediction() -> Prediction:
    spec = RunSpec(model="resnet18", dataset="cifar10", strategy="ddp", batch_size=8, nodes=2, dp_degree=2)
    found = Forecast(load_cluster("slurmbox")[0]).predict(spec)
    assert isinstance(found, Prediction)
    return found


class Cases:
    """Makes cases on two devices."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction

    def __call__(
        self, strategy: str, launches_s: tuple[float, ...], predicted_s: float | None, *, fits: bool | None = None,
        status: str = "ok", model: str = "resnet18", batch_size: int = 8,
    ) -> ValidationCase:  # fmt: skip
        spec = RunSpec(
            model=model, dataset="cifar10", strategy=strategy, batch_size=batch_size, nodes=2, dp_degree=2
        )  # fmt: skip
        measured = MeasuredConfiguration(
            cluster="c", config_id=strategy, spec=spec, status=status, launches_s=list(launches_s)
        )
        if predicted_s is None:
            return ValidationCase(measured, NotPredicted("no formulas"))
        prediction = msgspec.structs.replace(self._prediction, step_time_s=predicted_s, fits=fits)
        return ValidationCase(measured, prediction)


@pytest.fixture
def case(any_prediction: Prediction) -> Cases:
    return Cases(any_prediction)


def test_the_error_is_signed_and_its_mean_is_of_absolute_values(case: Cases) -> None:
    cases = [
        case("ddp", (1.0, 1.2, 1.1), 1.21), case("ddp", (2.0,), 1.0, batch_size=16), case("fsdp", (4.0,), 4.0),
        case("zero1", (), 1.0, status="oom"), case("gpipe", (), 1.0, status="oom", fits=False),
        case("filter", (1.0,), None),
    ]  # fmt: skip
    assert [one.error for one in cases] == [pytest.approx(0.1), -0.5, 0.0, None, None, None]
    view = errors_view(cases)
    assert [row[:2] for row in view.raw] == [["ddp", 2], ["fsdp", 1], ["all", 3]]
    assert [row[2:] for row in view.raw] == [
        pytest.approx([0.3, -0.2]), [0.0, 0.0], pytest.approx([0.2, -0.4 / 3]),
    ]  # fmt: skip
    assert view.notes[1:] == ["1 were predicted to run and did not: 1 oom"]
    assert errors_view([]).raw == []


def test_ranks_are_by_time_per_sample_within_a_group(case: Cases) -> None:
    cases = [
        # Per sample 1/16, 2/16 and, with twice the batch, 1.5/32.
        case("ddp", (1.0,), 1.0), case("fsdp", (2.0,), 1.0), case("zero1", (1.5,), 4.0, batch_size=16),
        case("gpipe", (), 0.1, status="failed"), case("filter", (0.1,), None), case("channel", (0.1,), 0.1, fits=False),
        case("ddp", (1.0,), 1.0, model="vgg11"),
    ]  # fmt: skip
    compare_groups(cases)
    assert [(one.rank, one.predicted_rank) for one in cases] == [
        (2, 1), (3, 1), (1, 3), (None, None), (None, None), (None, None), (1, 1),
    ]  # fmt: skip
    cells = [row[4:8] for row in cases_view(cases).cells]
    assert cells[0] == ["1.00 s", "1.00 s", "+0.0 %", "2 / 1"]
    assert cells[3] == ["failed", "100 ms", "", ""]


def test_regret_is_the_cost_of_the_predicted_best(case: Cases) -> None:
    cases = [
        case("ddp", (1.0,), 0.5), case("zero1", (2.0,), 0.4), case("gpipe", (), 0.1, status="failed"),
        case("ddp", (1.0,), 1.0, model="vgg11"), case("zero1", (2.0,), 0.5, model="vgg11"),
        case("ddp", (1.0,), 1.0, model="vgg13"),
        case("ddp", (3.0,), None, model="vgg16"), case("zero1", (1.0,), 1.0, model="vgg16"),
        case("ddp", (3.0,), 1.0, fits=False, model="vgg19"), case("zero1", (2.0,), 2.0, model="vgg19"),
        case("fsdp", (2.5,), 3.0, model="vgg19"),
        # Of equal predictions the choice does not depend on the order.
        case("gpipe", (1.0,), 2.0, model="vit"), case("filter", (1.5,), 2.0 + 1e-12, model="vit"),
        case("ddp", (), 1.0, status="oom", model="gpt"), case("fsdp", (), 1.0, status="oom", model="gpt"),
    ]  # fmt: skip
    choices = compare_groups(cases)
    found = [
        (
            one.best.spec.strategy,
            one.predicted_best and one.predicted_best.spec.strategy,
            one.regret,
            one.constant_regret,
        )
        for one in choices
    ]
    assert found == [
        ("ddp", "gpipe", None, 0.0), ("ddp", "zero1", 1.0, 0.0), ("zero1", None, None, 2.0), ("zero1", "zero1", 0.0, 0.5),
        ("gpipe", "filter", 0.5, None),
    ]  # fmt: skip
    view = choices_view(choices)
    assert view.cells[:2] == [
        ["resnet18", "cifar10", "2", "ddp", "gpipe", "", "0.0 %"],
        ["vgg11", "cifar10", "2", "ddp", "zero1", "100.0 %", "0.0 %"],
    ]
    assert view.notes[1:] == [
        "the predicted best in 3 groups: mean 50.0 %, worst 100.0 %", "always ddp in 4 groups: mean 62.5 %, worst 200.0 %",
        "in 1 groups the predicted best did not run",
    ]  # fmt: skip


def test_always_ddp_takes_the_largest_batch(case: Cases) -> None:
    cases = [
        case("ddp", (1.0,), 1.0), case("ddp", (4.0,), 2.0, batch_size=16), case("fsdp", (2.0,), 1.0),
    ]  # fmt: skip
    (choice,) = compare_groups(cases)
    assert choice.constant_regret == pytest.approx((4 / 32) / (1 / 16) - 1)


def test_launches_that_overlap_are_equal(case: Cases) -> None:
    # The pooled spread of a launch is 0.03: two medians of two launches are equal up to a ratio of 1.06.
    noise, near, far = (1.0, 1.0433), 1.05, 1.2
    cases = [
        case("fsdp", noise, 1.0), case("ddp", tuple(near * value for value in noise), 1.0),
        case("fsdp", noise, 1.0, model="vgg11"), case("ddp", tuple(far * value for value in noise), 1.0, model="vgg11"),
    ]  # fmt: skip
    spread = pooled_spread((one.measured.cluster, one.measured.launches_s) for one in cases)
    assert spread["c"][0] == pytest.approx(0.03, abs=1e-4)
    assert spread["c"][1] == 4
    assert [one.constant_regret for one in compare_groups(cases)] == [0.0, pytest.approx(0.2)]
    # With one launch each no spread is known: every difference counts.
    (alone,) = compare_groups([case("fsdp", (1.0,), 1.0), case("ddp", (1.001,), 1.0)])
    assert alone.constant_regret == pytest.approx(0.001)


def test_launches_of_one_environment_are_one_configuration() -> None:
    both: list[dict[str, Any]] = [{"strategy": name, "nodes": 2} for name in ("ddp", "fsdp")]
    ddp, fsdp = both
    frame = frame_of([
        launch(1.0, **ddp), launch(2.0, repeat=1, **ddp), launch(9.0, digest="other", repeat=2, **ddp),
        launch(5.0, status="failed", digest=None, repeat=3, **ddp), launch(3.0, status="oom", digest=None, **fsdp),
        launch(4.0, status="timeout", digest=None, repeat=1, **fsdp),
    ])  # fmt: skip
    found = [
        (one.spec.strategy, one.status, one.launches_s, len(one.run_ids)) for one in measured_configurations(frame)
    ]
    assert found == [("ddp", "ok", [1.0, 2.0], 2), ("ddp", "ok", [9.0], 1), ("fsdp", "oom", [], 2)]
