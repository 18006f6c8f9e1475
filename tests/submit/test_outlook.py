"""The forecast of a plan: sums over predicted runs, machines that run several at once, and runs without a prediction."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.forecast import forecast as module
from hpcbench.forecast.forecast import STARTUP_S, Forecast, PlanForecast, forecast_plan
from hpcbench.results.results_tree import ResultsTree
from hpcbench.submit.plan import make_plan

PROFILE, _ = load_cluster("slurmbox")
SWEEP = """name = "tiny"
[fixed]
model = "resnet18"
dataset = "digits"
batch_size = 8
warmup_steps = 1
steps = 2
profile_steps = 3
[grid]
learning_rate = [0.1, 0.2]
strategy = ["ddp"]
nodes = [1, 2]
"""


def spec(nodes: int) -> RunSpec:
    return RunSpec(model="resnet18", dataset="digits", strategy="ddp", batch_size=8, nodes=nodes, dp_degree=nodes)


def plan_forecast(**times: float) -> PlanForecast:
    return PlanForecast(Forecast(PROFILE), run_time_s=times, unpriced=Counter({"no formulas": 2}))


def test_node_hours_of_a_plan_sum_its_predicted_runs() -> None:
    runs = {"a": spec(1), "b": spec(4), "c": spec(8)}
    assert plan_forecast(a=3600.0, b=900.0).node_hours(runs) == 1.0 + 1.0
    assert plan_forecast().node_hours(runs) is None
    assert plan_forecast().warnings(runs) == ["nothing is predicted for 2 runs: no formulas"]


@pytest.mark.parametrize(
    ("times", "cores", "remaining_s"),
    [
        ({"a": 10.0, "b": 20.0}, 1, 30.0),
        # Two ranks fill both cores; one rank leaves half of them.
        ({"a": 10.0, "b": 20.0}, 2, 25.0),
        ({"a": 10.0, "b": 20.0}, 8, 20.0),
        ({"a": 10.0}, 2, None),
    ],
)
def test_remaining_time_on_several_cores_is_of_all_runs(
    times: dict[str, float], cores: int, remaining_s: float | None
) -> None:
    assert plan_forecast(**times).remaining_s({"a": spec(1), "b": spec(2)}, cores) == remaining_s


def forecast_sweep(folder: Path, text: str = SWEEP) -> Any:
    path = folder / "tiny.toml"
    path.write_text(text)
    tree = ResultsTree(folder / "results").cluster("slurmbox")
    return forecast_plan(make_plan(load_sweep(path), PROFILE, tree), tree)


def test_the_time_of_a_launch_is_its_start_and_all_its_steps(tmp_path: Path) -> None:
    forecast = forecast_sweep(tmp_path)
    assert len(forecast.predictions) == 4
    for key, prediction in forecast.predictions.items():
        assert forecast.run_time_s[key] == pytest.approx(STARTUP_S["cpu"] + (1 + 2 + 3) * prediction.step_time_s)
    # The learning rate changes nothing that is priced.
    assert len({prediction.step_time_s for prediction in forecast.predictions.values()}) == 2
    limited = forecast_sweep(tmp_path, SWEEP.replace("steps = 2\n", "steps = 2\ntime_limit_min = 0.1\n", 1))
    assert set(limited.run_time_s.values()) == {6.0}


def test_a_plan_of_very_many_runs_is_predicted_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PRICED_CONFIGURATIONS", 1)
    forecast = forecast_sweep(tmp_path)
    assert (len(forecast.predictions), forecast.unpriced) == (2, Counter({"more than 1 different ones": 2}))
