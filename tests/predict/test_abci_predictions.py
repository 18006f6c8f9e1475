"""The committed predictions for ABCI are what the script makes, and the fit behind them explains its runs."""

from __future__ import annotations

import csv
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.oracle import abci
from benchmarks.oracle.whole_runs import FittedMachine


@pytest.fixture(scope="module")
def machine() -> FittedMachine:
    return abci.fitted_machine()


def test_the_committed_file_is_reproduced(machine: FittedMachine) -> None:
    assert abci.is_same(abci.predictions_csv(machine), abci.PREDICTIONS.read_text(encoding="utf-8"))


def test_every_requested_abci_prediction_is_in_the_table() -> None:
    rows = list(csv.DictReader(abci.PREDICTIONS.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == len(abci.ASKED) * len(abci.GPUS)
    for _, points in groupby(rows, key=lambda row: (row["model"], row["strategy"], row["batch_per_gpu"])):
        times = [tuple(float(row[name]) for name in ("iter_s_low", "iter_s", "iter_s_high")) for row in points]
        assert all(low < middle < high for low, middle, high in times)
        assert times == sorted(times, key=lambda time: time[1])
        # The further, the less sure.
        widths = [high / low for low, _, high in times]
        assert widths == sorted(widths)


def test_the_fit_explains_its_runs(machine: FittedMachine) -> None:
    data = [one for one in machine.residuals if one.run.startswith("horovod")]
    assert len(data) == 8
    assert max(abs(one.predicted_s / one.measured_s - 1) for one in data) < 0.03
    learned = {one.name: one.learned for one in machine.parameters}
    # What both links share and what is each one's own cannot be told apart as well as their product.
    assert learned["bandwidth"] > 0.4
    assert learned["inter_node.bandwidth"] > 0.4
    assert learned["inter_node.latency"] < 0.1


def test_vgg16_has_the_weights_of_chainers_pools() -> None:
    table = abci.TABLES["VGG16"]
    assert table.totals().parameters == 169_814_824
    assert sum(one.shape.count(32_768) for one in table.parameter_tensors) == 1


def test_a_changed_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: FittedMachine) -> None:
    text, changed = abci.PREDICTIONS.read_text(encoding="utf-8"), tmp_path / "abci_predictions.csv"
    changed.write_text(text.replace("VGG16,data,16,32,0.4", "VGG16,data,16,32,0.5"), encoding="utf-8")
    assert changed.read_text(encoding="utf-8") != text
    monkeypatch.setattr(abci, "PREDICTIONS", changed)
    monkeypatch.setattr(abci, "fitted_machine", lambda: machine)
    monkeypatch.setattr(abci, "predictions_csv", lambda machine: text)
    assert abci.main(["--check"]) == 1
    assert abci.main([]) == 0
    assert abci.main(["--check"]) == 0
