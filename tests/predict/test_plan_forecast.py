"""The forecast of a plan: sums over predicted runs, machines that run several at once, and runs without a prediction."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.predict import forecast as module
from hpcbench.predict.forecast import STARTUP_S, Forecast, PlanForecast, forecast_plan
from hpcbench.predict.strategy_cost import count_operators
from hpcbench.results.results_tree import ResultsTree
from hpcbench.strategies.layer_table import LayerTable
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


GPUS, _ = load_cluster("snellius")
SMALL = """name = "small"
[fixed]
model = "resnet50"
dataset = "cifar10"
strategy = "ddp"
tasks_per_node = 4
[grid]
batch_size = [1, 4096]
precision = ["bf16"]
compile = [false, true]
"""


def test_a_plan_on_gpus_names_steps_that_wait_for_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    tree = ResultsTree(tmp_path / "results").cluster("snellius")
    plan = make_plan(load_sweep(path), GPUS, tree)
    # A host that only the large batch takes longer than.
    monkeypatch.setattr("hpcbench.predict.prediction.OPERATOR_S", 1e-4)
    plan_forecast = forecast_plan(plan, tree)
    bound = [plan.runs[key] for key in plan_forecast.launch_bound(plan.runs)]
    assert [(run.batch_size, run.compile) for run in bound] == [(1, False)]
    (warning,) = [line for line in plan_forecast.warnings(plan.runs) if "wait for the host" in line]
    assert warning.startswith(
        "1 of 4 will probably wait for the host: ddp on 4 ranks, resnet50, batch 1 launches about"
    )


def test_operators_are_those_of_the_micro_batches_of_a_stage() -> None:
    alone = RunSpec(model="resnet50", dataset="cifar10", strategy="ddp", batch_size=8)
    table = Forecast(GPUS).table(alone)
    assert isinstance(table, LayerTable)
    one = count_operators(alone, table)
    # 53 convolutions with two operators, as many BatchNorms with three, a linear layer with four.
    assert one >= 53 * (2 + 3) + 4
    staged = msgspec.structs.replace(alone, strategy="gpipe", micro_batches=8, pp_degree=4, tasks_per_node=4)
    # Eight micro-batches of a quarter of the layers, and sums of their gradients.
    assert 2 * one < count_operators(staged, table) < 4 * one
    replicas = msgspec.structs.replace(alone, dp_degree=2)
    assert count_operators(replicas, table) == one + 2 * len(table.parameter_tensors)
    views = msgspec.structs.replace(replicas, options={"gradient_as_bucket_view": True})
    assert count_operators(views, table) == one
    hybrid = msgspec.structs.replace(replicas, strategy="filter", tp_degree=2, tasks_per_node=4)
    assert one < count_operators(hybrid, table) < 2 * one
    assert count_operators(msgspec.structs.replace(alone, precision="bf16"), table) > one
    assert count_operators(msgspec.structs.replace(alone, activation_checkpointing=True), table) > one


def test_a_plan_on_cpus_waits_for_no_host(tmp_path: Path) -> None:
    forecast = forecast_sweep(tmp_path)
    assert forecast.predictions
    assert all(prediction.bound_by != "host" for prediction in forecast.predictions.values())
