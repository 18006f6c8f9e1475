from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from pathlib import Path

import pytest

from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.errors import ConfigError
from hpcbench.oracle.baselines import BASELINES, BaselineEstimate, BaselineRequest, ddlbench_baseline
from hpcbench.oracle.scoring import MeasuredConfiguration, PredictorResult
from hpcbench.report.oracle_validation import (
    BaselineEstimator,
    ClusterForecasts,
    baseline_predictor,
    measured_configurations,
    widened_result,
)
from hpcbench.results.frame import results_frame
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import RunMetrics, RunResult
from tests.worker.helpers import make_spec

DDP = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2)
PIPELINE = make_spec(strategy="1f1b", tasks_per_node=2, pp_degree=2, micro_batches=4)


def result(spec: RunSpec, wire_s: float | None) -> RunResult:
    metrics = RunMetrics(compute_s=2.0, comm_s=1.0, exposed_comm_s=0.5, wire_s=wire_s)
    return RunResult(
        run_id=run_id(spec), config_id=config_id(spec), attempt=1, sweep="s", cluster="c", status="ok", spec=spec,
        metrics=metrics,
    )  # fmt: skip


@pytest.mark.parametrize(("spec", "wire_s", "expected"), [(DDP, 0.75, 0.75), (DDP, None, None), (PIPELINE, 0.75, None)])
def test_communication_is_scored_by_its_time_on_the_wire(
    spec: RunSpec, wire_s: float | None, expected: float | None
) -> None:
    (measured,) = measured_configurations(results_frame([result(spec, wire_s)]))
    assert measured.figures.get("comm_s") == expected
    assert measured.figures["compute_s"] == 2.0
    assert "exposed_comm_s" not in measured.figures


@pytest.fixture
def predict_case(tmp_path: Path) -> Callable[[RunSpec, BaselineEstimator], PredictorResult]:
    """Predicts a measured run by a baseline, on a shipped cluster."""
    forecasts = ClusterForecasts(ResultsTree(tmp_path))

    def predict(spec: RunSpec, baseline: BaselineEstimator) -> PredictorResult:
        measured = MeasuredConfiguration(cluster="abci-v100", config_id=config_id(spec), spec=spec, launches_s=[1.0])
        return baseline_predictor(forecasts, baseline, [measured])(measured)

    return predict


@pytest.mark.parametrize("error", [KeyError("bandwidth"), ZeroDivisionError("division by zero"), AssertionError("bug")])
def test_a_bug_in_a_baseline_keeps_its_traceback(
    predict_case: Callable[[RunSpec, BaselineEstimator], PredictorResult], error: Exception
) -> None:
    def broken(request: BaselineRequest) -> BaselineEstimate:
        raise error

    with pytest.raises(type(error)):
        predict_case(DDP, broken)


def test_a_run_that_a_baseline_refuses_has_a_reason(
    predict_case: Callable[[RunSpec, BaselineEstimator], PredictorResult],
) -> None:
    def refusing(request: BaselineRequest) -> BaselineEstimate:
        raise ConfigError("no row for this strategy", hint="choose another")

    assert predict_case(DDP, refusing).reason == "no row for this strategy"
    assert predict_case(DDP, ddlbench_baseline).step_time_s


def test_a_run_that_no_sweep_can_contain_is_refused_before_the_formulas(
    predict_case: Callable[[RunSpec, BaselineEstimator], PredictorResult],
) -> None:
    wrong_type = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2, options={"bucket_cap_mb": "large"})
    assert "bucket_cap_mb = 'large': not of type" in predict_case(wrong_type, ddlbench_baseline).reason
    unequal = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=3)
    for baseline in BASELINES.values():
        assert predict_case(unequal, baseline).reason


def test_intervals_contain_work_of_others_in_addition() -> None:
    alone = PredictorResult(step_time_s=2.0, low_s=1.0, high_s=2.0 * exp(0.3))
    wide = widened_result(alone, 0.4 / 1.645)
    assert wide.step_time_s == 2.0
    assert wide.high_s == pytest.approx(2.0 * exp(0.5))
    assert wide.low_s == pytest.approx(2.0 * exp(-((log(2.0) ** 2 + 0.4**2) ** 0.5)))
    silent = PredictorResult(reason="none")
    assert widened_result(silent, 0.4) is silent
