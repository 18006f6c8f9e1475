"""Predictions of runs that share one host, or come from results of other people."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import NotPredicted, Prediction, peak_rank_memory, predict
from hpcbench.predict.strategy_cost import count_operators
from hpcbench.results.timing_statistics import OPERATOR_S
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.layer_table import LayerTable
from tests.layer_tables import table_of

BOX, _ = load_cluster("slurmbox")
ABCI, _ = load_cluster("abci-v100")


def spec(**more: object) -> RunSpec:
    values = {
        "model": "resnet50",
        "dataset": "imagenet",
        "strategy": "ddp",
        "batch_size": 32,
        "nodes": 4,
        "dp_degree": 4,
    }
    return RunSpec(**{**values, **more})  # type: ignore[arg-type]


def predicted(prediction: Prediction | NotPredicted) -> Prediction:
    assert isinstance(prediction, Prediction)
    return prediction


def test_devices_of_one_process_share_a_hosts_memory() -> None:
    table = table_of("vgg11", "cifar10")
    one = RunSpec(
        model="vgg11", dataset="cifar10", strategy="fairscale_pipe", batch_size=8, micro_batches=2, devices_per_task=2,
        pp_degree=2,
    )  # fmt: skip
    parameters = sum(4 * layer.parameters for layer in table.layers)
    assert peak_rank_memory(one, table, "cpu").parameters_bytes == parameters
    assert peak_rank_memory(one, table, "cuda").parameters_bytes < parameters


def test_a_bug_in_a_formula_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def hole(*_: object, **__: object) -> Prediction:
        raise AssertionError("no such layer")

    monkeypatch.setattr("hpcbench.predict.forecast.predict", hole)
    for untrusted in (False, True):
        with pytest.raises(AssertionError, match="no such layer"):
            Forecast(BOX, untrusted=untrusted).predict(spec())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"dp_degree": 3}, "nodes 4 = 4 devices, but dp_degree 3"),
        ({"pp_degree": 4, "dp_degree": 1}, "ddp has no pp_degree"),
        ({"options": {"bucket_cap_mb": "many"}}, "option bucket_cap_mb = 'many'"),
        ({"strategy": "gpipe", "dp_degree": 1, "pp_degree": 4, "micro_batches": 5}, "cannot be cut into 5"),
    ],
)
def test_an_untrusted_run_that_no_sweep_contains_is_not_predicted(values: dict[str, object], reason: str) -> None:
    prediction = Forecast(BOX, untrusted=True).predict(spec(**values))
    assert isinstance(prediction, NotPredicted)
    assert reason in prediction.reason


def test_untrusted_runs_of_any_values_raise_nothing() -> None:
    """Whatever a results file of other people holds, `validate` shows the rest of it."""
    forecast, source = Forecast(BOX, python=None, untrusted=True), random.Random(7)
    values: dict[str, list[object]] = {
        "strategy": [*STRATEGIES], "model": ["resnet18", "gpt", "vgg11", "cosmoflow", "vit"],
        "dataset": ["imagenet", "tokens", "cifar10", "cosmoflow", "digits"], "nodes": [1, 2, 4],
        "tasks_per_node": [1, 2], "devices_per_task": [1, 2], "batch_size": [1, 6, 8], "micro_batches": [1, 2, 4],
        **{f"{axis}_degree": [1, 1, 2, 3, 4] for axis in ("dp", "tp", "sp", "pp")},
        "precision": ["fp32", "bf16", "fp64"], "activation_checkpointing": [False, True],
    }  # fmt: skip
    option_values = [True, -1, 0, 1, 3, 2.5, -1.0, 1e300, "x", [1], {"y": None}]
    for _ in range(400):
        chosen: dict[str, Any] = {name: source.choice(choices) for name, choices in values.items()}
        for table, names in (
            ("options", STRATEGIES[chosen["strategy"]].options),
            ("model_options", ["context", "dropout", "x"]),
        ):
            chosen[table] = {name: source.choice(option_values) for name in names if source.random() < 0.3}
        prediction = forecast.predict(RunSpec(**chosen))
        assert isinstance(prediction, (Prediction, NotPredicted))


def test_a_device_waits_for_the_host_that_launches_its_operators() -> None:
    forecast = Forecast(ABCI)
    alone = {
        "model": "mobilenetv2",
        "dataset": "cifar10",
        "strategy": "single",
        "nodes": 1,
        "dp_degree": 1,
        "batch_size": 1,
    }
    eager, compiled, large = spec(**alone), spec(**alone, compile=True), spec(**{**alone, "batch_size": 256})
    table = forecast.table(eager)
    assert isinstance(table, LayerTable)
    machine = forecast.machine(eager)
    # As a calibration measures it, which times kernels that wait in the device's queue.
    quick = msgspec.structs.replace(machine, compute=msgspec.structs.replace(machine.compute, launch_s=1e-6))
    found, without, other = (predict(one, table, quick) for one in (eager, compiled, large))
    host_s = count_operators(eager, table) * OPERATOR_S
    assert (found.bound_by, without.bound_by, other.bound_by) == ("host", "compute", "compute")
    assert found.step_time_s == pytest.approx(host_s)
    assert without.step_time_s < found.step_time_s < other.step_time_s
    # The whole wait is computation, and it is uncertain.
    assert found.compute_s - without.compute_s == pytest.approx(found.step_time_s - without.step_time_s)
    assert found.interval.low < host_s < found.interval.high
