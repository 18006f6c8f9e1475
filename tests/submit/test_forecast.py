"""What is said of runs that rehearse another cluster, and of devices that are one."""

from __future__ import annotations

import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.forecast.forecast import Forecast
from hpcbench.oracle.prediction import NotPredicted, Prediction, peak_rank_memory
from hpcbench.parallel.layer_table import read_shipped_table

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


def said(found: Prediction | NotPredicted) -> Prediction:
    assert isinstance(found, Prediction)
    return found


def test_a_rehearsal_computes_there_and_communicates_here() -> None:
    forecast = Forecast(BOX)
    here, rehearsed = said(forecast.predict(spec())), said(forecast.predict(spec(rehearse="abci-v100")))
    there = said(Forecast(ABCI).predict(spec(rehearse=None)))
    assert rehearsed.compute_s < here.compute_s / 10
    assert abs(rehearsed.compute_s / there.compute_s - 1) < 0.05
    assert rehearsed.comm_s == pytest.approx(here.comm_s)
    assert rehearsed.fits is None
    assert "rehearsed" in rehearsed.source


def test_a_cluster_that_nobody_knows_is_a_reason() -> None:
    found = Forecast(BOX).predict(spec(rehearse="nowhere"))
    assert isinstance(found, NotPredicted)
    assert "nowhere" in found.reason


def test_devices_of_one_process_share_a_hosts_memory() -> None:
    table = read_shipped_table("vgg11", "cifar10")
    assert table is not None
    one = RunSpec(
        model="vgg11", dataset="cifar10", strategy="fairscale_pipe", batch_size=8, micro_batches=2, devices_per_task=2,
        pp_degree=2,
    )  # fmt: skip
    parameters = sum(4 * layer.parameters for layer in table.layers)
    assert peak_rank_memory(one, table, "cpu").parameters_bytes == parameters
    assert peak_rank_memory(one, table, "cuda").parameters_bytes < parameters


def test_a_hole_in_a_formula_is_raised_unless_somebody_looks_at_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def hole(*_: object, **__: object) -> Prediction:
        raise AssertionError("no such layer")

    monkeypatch.setattr("hpcbench.forecast.forecast.predict", hole)
    with pytest.raises(AssertionError, match="no such layer"):
        Forecast(BOX).predict(spec())
    found = Forecast(BOX, forgiving=True).predict(spec())
    assert isinstance(found, NotPredicted)
    assert "no such layer" in found.reason
