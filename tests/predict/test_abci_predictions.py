"""The committed predictions for ABCI are what the script makes, and the fit behind them explains its runs."""

from __future__ import annotations

import pytest

from benchmarks.oracle import abci
from benchmarks.oracle.whole_runs import FittedMachine


@pytest.fixture(scope="module")
def machine() -> FittedMachine:
    return abci.fitted_machine()


def test_the_committed_file_is_reproduced(machine: FittedMachine) -> None:
    assert abci.is_same(abci.predictions_csv(machine), abci.PREDICTIONS.read_text(encoding="utf-8"))


def test_the_fit_explains_its_runs(machine: FittedMachine) -> None:
    data = [one for one in machine.residuals if one.run.startswith("horovod")]
    assert len(data) == 8
    assert max(abs(one.predicted_s / one.measured_s - 1) for one in data) < 0.03
    learned = {one.name: one.learned for one in machine.parameters}
    # What both links share and what is each one's own cannot be told apart as well as their product.
    assert learned["bandwidth"] > 0.4
    assert learned["inter_node.bandwidth"] > 0.4
    assert learned["inter_node.latency"] < 0.1
