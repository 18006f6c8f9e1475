"""``cluster calibrate``: what it writes, what it takes, what it says where nothing can be measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from math import hypot, log
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from click.testing import CliRunner, Result

from hpcbench.cli.calibrate_commands import _check_quiet
from hpcbench.cli.main import cli
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import ConfigError, HpcbenchError
from hpcbench.predict.calibrate import calibration_sweeps, plan_calibration
from hpcbench.predict.calibration.calibration_store import machine_for
from hpcbench.predict.calibration.calibration_sweep import calibration_sweep_toml
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import SweepPlan, available_cores, make_plan
from tests.predict.planted_probes import probe_run
from tests.predict.test_fit_calibration import everything, run_of, spec_of


@pytest.fixture
def calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Result:
        return CliRunner().invoke(cli, ["cluster", "calibrate", *words])

    return call


def test_the_calibration_sweep_is_written_without_running_it(calibrate: Callable[..., Result], tmp_path: Path) -> None:
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
    ],
)
def test_wrong_input_names_the_valid_choices_and_leaves_no_file(
    calibrate: Callable[..., Result], tmp_path: Path, words: list[str], said: str
) -> None:
    done = calibrate(*words)
    assert isinstance(done.exception, HpcbenchError), done.output
    assert said in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_probes_for_a_sweep_leave_no_file_where_there_is_no_scheduler(
    calibrate: Callable[..., Result], tmp_path: Path
) -> None:
    sweep = 'name = "mine"\n[fixed]\nmodel = "vgg11"\ndataset = "cifar10"\nbatch_size = 8\nstrategy = "single"\n'
    (tmp_path / "mine.toml").write_text(sweep)
    done = calibrate("abci-3", "--for", "mine.toml")
    assert isinstance(done.exception, HpcbenchError), done.output
    assert "run by PBS" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize("failed", [0, 1])
def test_probes_that_have_ended_are_fitted_where_there_is_no_scheduler(
    calibrate: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    monkeypatch.setenv("PATH", "")
    assert calibrate("slurmbox", "--out", "x.toml").exit_code == 0
    profile, _ = load_cluster("slurmbox")
    tree = ClusterTree(tmp_path / "results" / "slurmbox")
    specs = make_plan(load_sweep(tmp_path / "x.toml"), profile, tree).runs.values()
    for number, spec in enumerate(specs):
        result = probe_run(profile, spec).result
        tree.write_result(msgspec.structs.replace(result, status="timeout") if number < failed else result)
    done = calibrate("slurmbox")
    assert done.exit_code == failed, done.output
    assert "predictions for slurmbox are made from it" in done.output
    assert machine_for(profile, tree).depth == "calibrated"


def written(tmp_path: Path) -> ClusterTree:
    tree = ClusterTree(tmp_path / "results" / "slurmbox")
    for run in everything():
        tree.write_result(run.result)
    return tree


def test_a_fit_of_given_runs_is_kept_and_taken(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    tree = written(tmp_path)
    profile, _ = load_cluster("slurmbox")
    done = calibrate("slurmbox", "--from", "results", "--out", "c.json", "--json")
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    path = Path(document["path"])
    assert path.parent == tree.root / "calibrations"
    assert path.read_bytes() == (tmp_path / "c.json").read_bytes()
    assert document["calibration"]["machine"]["depth"] == "calibrated"
    machine = machine_for(profile, tree)
    assert machine.depth == "calibrated"
    assert machine.compute.crowding[2] == pytest.approx(1.25, rel=0.01)


def test_fitted_values_are_printed_as_a_table(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    written(tmp_path)
    done = calibrate("slurmbox", "--from", "results")
    assert done.exit_code == 0, done.output
    for said in (
        "2 ranks on a node",
        "each computes 1.25 times as long",
        "computing under a collective",
        "passes through a model, by the kernels of the others",
        "predictions for slurmbox are made from it",
    ):
        assert said in done.output, said


def test_runs_without_a_probe_are_refused(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    ClusterTree(tmp_path / "results" / "slurmbox").write_result(run_of(spec_of("single")).result)
    done = calibrate("slurmbox", "--from", "results")
    assert isinstance(done.exception, ConfigError), done.output
    assert "none of 1 run of slurmbox is a probe" in str(done.exception)
    assert "measured neighbours" in str(done.exception.hint)


def test_disturbed_runs_are_refused_or_widen_the_intervals(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    tree = written(tmp_path)
    assert calibrate("slurmbox", "--from", "results").exit_code == 0
    quiet = machine_for(load_cluster("slurmbox")[0], tree)
    mark = "other processes used the cores during the timed steps: 50 % of the 2 cores of rank 0 on n"
    for run in everything():
        run.result.warnings.append(mark)
        ClusterTree(tmp_path / "marked" / "slurmbox").write_result(run.result)
    refused = calibrate("slurmbox", "--from", "marked")
    assert isinstance(refused.exception, ConfigError)
    assert "all 8 runs of slurmbox are marked as disturbed: other processes used the cores" in str(refused.exception)
    assert "--busy" in str(refused.exception.hint)
    done = calibrate("slurmbox", "--from", "marked", "--busy")
    assert done.exit_code == 0, done.output
    assert "8 of 8 runs are marked as disturbed" in done.output
    busy = machine_for(load_cluster("slurmbox")[0], tree)
    # Steps may take twice as long.
    assert busy.compute.spread == pytest.approx(hypot(quiet.compute.spread, log(2) / 1.645))
    assert busy.comm.spread == pytest.approx(hypot(quiet.comm.spread, log(2) / 1.645))


def test_a_refused_calibration_is_measured_anew(tmp_path: Path) -> None:
    profile, _ = load_cluster("slurmbox")
    tree = ClusterTree(tmp_path / "results" / "slurmbox")

    def plan(*, takes_disturbed: bool) -> SweepPlan:
        sweeps = calibration_sweeps(tree, profile, None, 1.0)
        return plan_calibration(sweeps, profile, tree, takes_disturbed=takes_disturbed)

    first = plan(takes_disturbed=False)
    assert set(first.missing) == set(first.runs)
    for key, spec in first.runs.items():
        result = run_of(spec_of("single"), 0.1).result
        result.run_id, result.spec, result.warnings = key, spec, ["other processes used the cores: 9 % of the 2 cores"]
        tree.write_result(result)
    anew = plan(takes_disturbed=False)
    assert not set(anew.runs) & set(first.runs)
    assert set(anew.missing) == set(anew.runs)
    assert set(plan(takes_disturbed=True).runs) == set(first.runs)


def test_a_busy_core_stops_a_calibration_before_it_measures() -> None:
    profile, _ = load_cluster("local")
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with pytest.raises(
            ConfigError, match=r"use .* of the \d+ cores of this machine, at most .*: nothing was measured"
        ):
            _check_quiet(profile, takes_disturbed=False)
        _check_quiet(profile, takes_disturbed=True)
    finally:
        spinning.kill()
        spinning.wait()


def test_a_quiet_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds, percpu: [0.4] * 4096)
    _check_quiet(load_cluster("local")[0], takes_disturbed=False)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_calibration_of_this_machine_contains_kernels_and_strategies(
    calibrate: Callable[..., Result], tmp_path: Path
) -> None:
    done = calibrate("local", "--budget", "0.5", "--busy", "--json")
    document = json.loads(done.stdout)
    machine = document["calibration"]["machine"]
    assert machine["compute"]["kernels"]
    assert machine["comm"]["messages"]
    assert set(machine["strategies"]) >= {"ddp", "fsdp"}
    again = calibrate("local", "--from", "calibration-0", "--busy", "--json")
    assert json.loads(again.stdout)["calibration"]["run_ids"] == document["calibration"]["run_ids"]
