"""``cluster calibrate``: what it writes, what it takes, what it says where nothing can be measured."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpcbench.cli.main import cli
from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError
from hpcbench.forecast.oracle_requests import count_calibrations
from hpcbench.oracle.calibration.calibration_runs import calibration_sweep_toml
from hpcbench.oracle.calibration.calibration_store import FitResidual, machine_for
from hpcbench.oracle.cost_model import CostModel
from hpcbench.oracle.machine import Machine, nominal_machine
from hpcbench.oracle.prediction import predict
from hpcbench.oracle.strategies.base import resolve_cost
from hpcbench.report.prediction_view import worst_residuals
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import available_cores
from tests.oracle.test_calibration_fits import everything, run_of, table_of


@pytest.fixture
def calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Result:
        return CliRunner().invoke(cli, ["cluster", "calibrate", *words])

    return call


def test_the_sweep_can_be_had_without_running_it(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    done = calibrate("local", "--out", "x.toml", "--budget", "3")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.toml").read_text() == calibration_sweep_toml(
        load_cluster("local")[0], None, available_cores(), 0, 3.0
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.toml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere"),
        (["slurmbox", "--partition", "hihg"], "did you mean 'high'"),
        (["local", "--out", "x.yaml"], "unknown ending"),
        (["abci-3"], "run by PBS"),
        (["lisa"], "only predicted for"),
        (["local", "--from", "nothing"], "no results of cluster 'local'"),
        (["local", "--from", "."], "nothing to fit"),
        (["local", "--where", "nodes == 1"], "chooses among the runs of --from"),
    ],
)
def test_wrong_input_names_the_valid_choices_and_leaves_no_file(
    calibrate: Callable[..., Result], tmp_path: Path, words: list[str], said: str
) -> None:
    done = calibrate(*words)
    assert isinstance(done.exception, HpcbenchError), done.output
    assert said in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def written(tmp_path: Path) -> ClusterTree:
    tree = ClusterTree(tmp_path / "results" / "slurmbox")
    for run in everything(random.Random(5)):
        tree.write_result(run.result)
    return tree


def test_a_fit_of_given_runs_is_kept_and_taken(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    tree = written(tmp_path)
    profile, _ = load_cluster("slurmbox")
    assert count_calibrations(tree, profile, None) == 0
    done = calibrate("slurmbox", "--from", "results", "--out", "c.json", "--json")
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    path = Path(document["path"])
    assert path.parent == tree.root / "calibrations"
    assert path.read_bytes() == (tmp_path / "c.json").read_bytes()
    assert document["calibration"]["machine"]["depth"] == "calibrated"
    machine = machine_for(profile, tree)
    assert machine.depth == "calibrated"
    assert machine.compute.factors["vit"] == pytest.approx(1.5, rel=0.1)
    # The next one has runs of its own.
    assert count_calibrations(tree, profile, None) == 1


def test_fitted_values_are_printed_as_a_table(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    written(tmp_path)
    done = calibrate("slurmbox", "--from", "results")
    assert done.exit_code == 0, done.output
    for said in (
        "2 ranks on a node",
        "each computes 1.25 times as long",
        "computing under a collective",
        "all_reduce, ",
        "nominal: contention was not measured",
        "predictions for slurmbox are made from it",
    ):
        assert said in done.output, said


def whole_runs(tmp_path: Path) -> tuple[ClusterProfile, Machine, ClusterTree]:
    """Runs on 1, 2 and 4 nodes whose computation takes 1.5 times as long as by the profile's figures."""
    profile, _ = load_cluster("slurmbox")
    nominal = nominal_machine(profile)
    tree = ClusterTree(tmp_path / "results" / "slurmbox")
    for nodes in (1, 2, 4):
        strategy = "ddp" if nodes > 1 else "single"
        run = run_of(strategy, 1.0, "resnet18", nodes=nodes, dp_degree=nodes)
        step = resolve_cost(strategy).step(run.spec, run.table, CostModel(nominal, run.spec))
        run = run_of(strategy, step.step_time_s + 0.5 * step.compute_s, "resnet18", nodes=nodes, dp_degree=nodes)
        tree.write_result(run.result)
    return profile, nominal, tree


def test_whole_runs_without_a_probe_fit_the_profile(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    profile, nominal, tree = whole_runs(tmp_path)
    done = calibrate("slurmbox", "--from", "results")
    assert done.exit_code == 0, done.output
    assert "of it from the runs" in done.output
    assert "nominal: the runs say nothing of intra_node" in done.output
    machine = machine_for(profile, tree)
    assert machine.depth == "fitted"
    assert machine.source.startswith("fit of whole runs of ")
    assert machine.comm.inter_node.beta_s_per_byte == pytest.approx(nominal.comm.inter_node.beta_s_per_byte, rel=0.2)
    alone = RunSpec(model="resnet18", dataset="cifar10", strategy="single", batch_size=8)
    before, after = (predict(alone, table_of("resnet18"), one).step_time_s for one in (nominal, machine))
    assert after == pytest.approx(1.5 * before, rel=0.05)


def test_where_chooses_the_runs_that_are_fitted(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    whole_runs(tmp_path)
    done = calibrate("slurmbox", "--from", "results", "--where", "devices < 4", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["calibration"]
    assert len(found["run_ids"]) == 2
    assert found["machine"]["source"].startswith("2 runs on at most 2 ranks")
    assert len(found["residuals"]) == 2
    none = calibrate("slurmbox", "--from", "results", "--where", "devices == 3")
    assert str(none.exception) == "--where: none of 3 runs of slurmbox has devices == 3"


def test_residuals_of_one_label_become_one_line_with_the_worst() -> None:
    runs = [
        FitResidual(part="runs", what=what, points=1, error=error)
        for what, error in (("a", 0.1), ("a", 0.3), ("b", 0.2))
    ]
    bands = [FitResidual(part="collectives", what=f"send, {band}", points=5, error=0.1) for band in ("small", "large")]
    lines = [(one.what, one.points, one.error) for one in worst_residuals([*runs, *bands])]
    assert lines == [("a", 2, 0.3), ("b", 1, 0.2), ("send, small", 5, 0.1)]


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_whole_calibration_of_this_machine(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    done = calibrate("local", "--budget", "0.5", "--json")
    document = json.loads(done.stdout)
    machine = document["calibration"]["machine"]
    assert machine["compute"]["samples"]
    assert machine["compute"]["factors"]["vit"] > 0
    assert set(machine["strategies"]) >= {"ddp", "fsdp"}
    again = calibrate("local", "--from", "calibration-0", "--json")
    assert json.loads(again.stdout)["calibration"]["run_ids"] == document["calibration"]["run_ids"]
