"""``cluster calibrate --for``: what it costs, what it keeps, what predictions make of it, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli
from click.testing import CliRunner, Result

from hpcbench.cli.main import cli
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import HpcbenchError
from hpcbench.predict.calibrate import make_probe_plan, prepare_sweep_calibration
from hpcbench.predict.calibration.calibration_store import DISTURBANCES, read_calibrations, write_calibration
from hpcbench.predict.forecast import Forecast
from hpcbench.results.results_tree import ClusterTree
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.submit.plan import make_plan
from hpcbench.worker.measure import interference
from tests.predict.planted_probes import probe_run
from tests.predict.test_fit_calibration import everything

PROFILE, _ = load_cluster("slurmbox")
SWEEP = """name = "mine"
[fixed]
model = "vgg11"
dataset = "cifar10"
batch_size = 8
steps = 5
[[include]]
strategy = "ddp"
nodes = 2
[[include]]
strategy = "gpipe"
nodes = 2
micro_batches = 4
[[include]]
strategy = "single"
"""
CALIBRATE = ("cluster", "calibrate", "slurmbox", "--for", "mine.toml", "--budget", "1")
Call = Callable[..., Result]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.toml").write_text(SWEEP)
    return lambda *words: CliRunner(env={"COLUMNS": "200"}).invoke(cli, [*words])


def tree_of(tmp_path: Path) -> ClusterTree:
    return ClusterTree(tmp_path / "results" / "slurmbox")


def plant(call: Call, tmp_path: Path, words: tuple[str, ...] = CALIBRATE, **more: Any) -> int:
    """Write a result of every probe that the command would run; return their number."""
    done = call(*words, "--out", "probes.toml")
    assert done.exit_code == 0, (done.output, done.exception)
    tree = tree_of(tmp_path)
    plan = make_plan(load_sweep(tmp_path / "probes.toml"), PROFILE, tree)
    assert plan.dropped == []
    for spec in plan.runs.values():
        tree.write_result(probe_run(PROFILE, spec, **more).result)
    return len(plan.runs)


def predicted(call: Call, sweep: str = "mine.toml") -> dict[str, Any]:
    done = call("predict", sweep, "--cluster", "slurmbox", "--json")
    assert done.exit_code == 0, done.output
    return {one["spec"]["strategy"]: one["predicted"] for one in json.loads(done.stdout)["predictions"]}


def kinds(call: Call, sweep: str = "mine.toml") -> dict[str, str]:
    return {strategy: one["rests_on"]["kind"] for strategy, one in predicted(call, sweep).items()}


def calibrations(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "results" / "slurmbox" / "calibrations").glob("*.json"))


def test_the_cost_is_stated_and_the_probes_can_be_had_without_running_them(call: Call, tmp_path: Path) -> None:
    done = call(*CALIBRATE, "--out", "probes.toml")
    assert done.exit_code == 0, done.output
    assert "calibration for mine: 4 probe runs" in done.stderr
    assert "blocks of vgg11 on cifar10, 2 samples, 1 rank a node: for 1 configuration" in done.stderr
    assert not (tmp_path / "results").exists()
    plan = make_plan(load_sweep(tmp_path / "probes.toml"), PROFILE, tree_of(tmp_path))
    found = sorted((spec.strategy, spec.batch_size, spec.nodes) for spec in plan.runs.values())
    assert found == [("collectives", 0, 2), ("probe_blocks", 2, 1), ("probe_blocks", 8, 1), ("probe_blocks", 8, 2)]
    assert "blocks of vgg11 on cifar10, 8 samples, beside all_reduce, 2 nodes x 1: for 1 configuration" in done.stderr


def test_a_model_that_does_not_fit_on_a_device_is_left_out(call: Call, tmp_path: Path) -> None:
    text = 'name = "mine"\n[fixed]\nmodel = "gpt_13b"\ndataset = "tokens"\nbatch_size = 8\nnodes = 2\n'
    (tmp_path / "mine.toml").write_text(text + 'tasks_per_node = 8\n[[include]]\nstrategy = "fsdp"\n')
    done = call("cluster", "calibrate", "selene", "--for", "mine.toml", "--out", "probes.toml")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "not measured: blocks of gpt_13b on tokens, 8 samples, 8 ranks a node: the whole model needs " in done.stderr
    assert "1 probe run, about" in done.stderr


def test_predictions_rest_on_what_was_measured(call: Call, tmp_path: Path) -> None:
    before = predicted(call)
    count = plant(call, tmp_path)
    done = call(*CALIBRATE, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    document = json.loads(done.stdout)
    assert len(document["probes"]) == count
    assert "3 of 3 configurations rest on measured shapes alone" in done.stderr
    assert "slurmbox has no calibration: what is not measured here stays the profile's" in done.stderr
    after = predicted(call)
    assert set(kinds(call).values()) == {"calibrated for this sweep"}
    # Layers take three times as long, and by them updates.
    assert 2.0 < after["single"]["compute_s"] / before["single"]["compute_s"] < 3.1
    table = call("predict", "mine.toml", "--cluster", "slurmbox")
    assert table.stdout.count("calibrated for this sweep") == 3
    assert "measured for mine" in table.stdout


def test_nothing_is_written_without_a_probe(call: Call, tmp_path: Path) -> None:
    plant(call, tmp_path)
    assert call(*CALIBRATE).exit_code == 0
    (tmp_path / "probes.toml").unlink()
    done = call(*CALIBRATE, "--out", "probes.toml")
    assert done.exit_code == 0, done.output
    assert "probes.toml was not written: there is no probe to run" in done.stderr
    assert not (tmp_path / "probes.toml").exists()
    assert call(*CALIBRATE, "--out", "newest.json").exit_code == 0
    assert (tmp_path / "newest.json").read_bytes() == calibrations(tmp_path)[-1].read_bytes()


def test_a_probe_that_takes_long_has_a_longer_time_limit(call: Call, tmp_path: Path) -> None:
    assert call(*CALIBRATE[:-1], "700", "--out", "probes.toml").exit_code == 0
    limits_min = [tomli.loads((tmp_path / "probes.toml").read_text())["fixed"]["time_limit_min"]]
    # A minute and 1.5 times 700 s of measurements.
    assert limits_min == [19]


def test_equal_shapes_are_measured_once(call: Call, tmp_path: Path) -> None:
    plant(call, tmp_path)
    assert call(*CALIBRATE).exit_code == 0
    kept = calibrations(tmp_path)
    again = call(*CALIBRATE)
    assert again.exit_code == 0
    assert "every shape of mine that a probe can measure has been measured" in again.stderr
    other = SWEEP.replace('"mine"', '"other"').replace("gpipe", "1f1b")
    (tmp_path / "other.toml").write_text(other)
    same = call("cluster", "calibrate", "slurmbox", "--for", "other.toml")
    assert "calibration for other: 0 probe runs" in same.stderr
    assert set(kinds(call, "other.toml").values()) == {"calibrated for this sweep"}
    assert calibrations(tmp_path) == kept
    # A larger batch is another shape, and the ones before stay.
    (tmp_path / "larger.toml").write_text(
        SWEEP.replace('"mine"', '"larger"').replace("batch_size = 8", "batch_size = 16")
    )
    larger = ("cluster", "calibrate", "slurmbox", "--for", "larger.toml")
    plant(call, tmp_path, larger)
    assert call(*larger).exit_code == 0
    assert set(kinds(call, "larger.toml").values()) == {"calibrated for this sweep"}
    assert set(kinds(call).values()) == {"calibrated for this sweep"}
    newest, earlier = (one.calibration for one in read_calibrations(tree_of(tmp_path), "slurmbox")[0])
    assert newest.made_at > earlier.made_at


def test_calibrations_of_the_cluster_and_of_a_sweep_extend_each_other(call: Call, tmp_path: Path) -> None:
    plant(call, tmp_path)
    assert call(*CALIBRATE).exit_code == 0
    folder = ClusterTree(tmp_path / "elsewhere" / "slurmbox")
    for run in everything():
        folder.write_result(run.result)
    done = call("cluster", "calibrate", "slurmbox", "--from", "elsewhere", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    assert json.loads(done.stdout)["calibration"]["sweeps"] == ["mine"]
    assert set(kinds(call).values()) == {"calibrated for this sweep"}
    newer = ClusterTree(tmp_path / "newer" / "slurmbox")
    for run in everything():
        newer.write_result(msgspec.structs.replace(run.result, environment_digest="newer"))
    later = call("cluster", "calibrate", "slurmbox", "--from", "newer")
    assert "is of another machine or software: nothing of it was kept" in " ".join(later.stdout.split())
    # Its blocks are among the cluster's own; messages of two nodes are not.
    assert kinds(call) == {"single": "calibrated for this sweep", "ddp": "calibrated", "gpipe": "calibrated"}


def test_another_environment_is_measured_again(call: Call, tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    plant(call, tmp_path)
    assert call(*CALIBRATE).exit_code == 0
    (newest,), _ = read_calibrations(tree, "slurmbox")
    changed = msgspec.structs.replace(newest.calibration, environment_key="older", made_at="2999-01-01T00:00:00Z")
    write_calibration(changed, tree)
    again = call(*CALIBRATE, "--out", "probes.toml")
    assert "4 probe runs" in again.stderr
    assert "is of another environment: all of the sweep is measured again" in again.stderr


def test_disturbed_probes_are_refused_unless_busy(call: Call, tmp_path: Path) -> None:
    plant(call, tmp_path, warnings=["other processes used the cores during the timed steps: 0.9 of 2 cores"])
    tree = tree_of(tmp_path)
    plan = make_plan(load_sweep(tmp_path / "mine.toml"), PROFILE, tree)
    prepared = prepare_sweep_calibration(plan, tree, None, 1.0)
    probes = make_probe_plan(prepared, tree, takes_disturbed=True)
    # The next try has runs of its own.
    anew = make_probe_plan(prepared, tree, takes_disturbed=False)
    assert not set(anew.runs) & set(probes.runs)
    assert len(anew.missing) == 4
    taken = call(*CALIBRATE, "--busy")
    assert taken.exit_code == 0, (taken.output, taken.exception)
    (kept,), _ = read_calibrations(tree, "slurmbox")
    assert "4 of 4 runs are marked as disturbed" in kept.calibration.notes


def test_warnings_of_other_work_are_those_that_mark_a_run() -> None:
    text = Path(interference.__file__).read_text(encoding="utf-8")
    assert all(f'"{beginning}' in text for beginning in DISTURBANCES)


@pytest.mark.timeout(120)
def test_probes_of_a_users_own_model_add_to_what_was_measured(call: Call, tmp_path: Path) -> None:
    plant(call, tmp_path)
    assert call(*CALIBRATE).exit_code == 0
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\n\ndef net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    (tmp_path / "own.toml").write_text(
        'name = "own"\nmodel_folder = "."\n[fixed]\nmodel = "own:net"\ndataset = "digits"\nbatch_size = 8\n'
        'strategy = "single"\n'
    )
    words = ("cluster", "calibrate", "slurmbox", "--for", "own.toml", "--budget", "1")
    done = call(*words, "--out", "probes.toml")
    assert done.exit_code == 0, (done.output, done.exception)
    (spec,) = make_plan(load_sweep(tmp_path / "probes.toml"), PROFILE, tree_of(tmp_path)).runs.values()
    table = Forecast(PROFILE, model_folder=tmp_path).table(spec)
    assert isinstance(table, LayerTable)
    # The digest of its environment includes the file of the model.
    tree_of(tmp_path).write_result(probe_run(PROFILE, spec, table=table, environment_digest="with own.py").result)
    taken = call(*words)
    assert taken.exit_code == 0, (taken.output, taken.exception)
    assert "left out" not in taken.stderr
    assert "1 of 1 configurations rest on measured shapes alone" in taken.stderr
    assert set(kinds(call).values()) == {"calibrated for this sweep"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--for", "mine.toml", "--from", "results"), "--for measures, --from measures nothing"),
        (("--for", "nowhere.toml"), "no sweep file"),
        (("--for", "mine.toml", "--partition", "high"), "no run of sweep 'mine' is on partition 'high'"),
    ],
)
def test_wrong_input_is_named(call: Call, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = call("cluster", "calibrate", "slurmbox", *words)
    assert isinstance(done.exception, HpcbenchError), done.output
    assert said in str(done.exception)
    assert not (tmp_path / "results").exists()


def test_a_sweep_without_a_feasible_point_is_named(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SWEEP.replace("[[include]]", "[[include]]\ntasks_per_node = 1000"))
    done = call(*CALIBRATE, "--out", "probes.toml")
    assert isinstance(done.exception, HpcbenchError), done.output
    assert "every one of the 3 points of sweep 'mine' is infeasible on slurmbox" in str(done.exception)
    (tmp_path / "mine.toml").write_text(SWEEP.replace("steps = 5", "steps = 5\ncompile = true"))
    done = call(*CALIBRATE, "--out", "probes.toml")
    assert isinstance(done.exception, HpcbenchError)
    assert "nothing of sweep 'mine' can be probed on slurmbox: compiled" in str(done.exception)


def test_a_profile_without_links_prints_the_assumed_links(call: Call, tmp_path: Path) -> None:
    (tmp_path / "bare.toml").write_text('name = "bare"\n[scheduler]\nkind = "slurm"\n[node]\ncores = 4\n')
    done = call("cluster", "calibrate", "bare.toml", "--for", "mine.toml", "--out", "probes.toml")
    assert done.exit_code == 0, (done.output, done.exception)
    note = "defines no links between nodes: 100 us and 1.25 GB/s are assumed"
    assert note in done.stderr
    assert "inside nodes" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_sweep_is_measured_here(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\n[fixed]\nmodel = "resnet18"\ndataset = "digits"\nbatch_size = 4\ntasks_per_node = 2\n'
        '[[include]]\nstrategy = "ddp"\n[[include]]\nstrategy = "gpipe"\nmicro_batches = 2\n'
    )
    done = call("cluster", "calibrate", "local", "--for", "mine.toml", "--budget", "0.5", "--busy")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "2 of 2 configurations rest on measured shapes alone" in done.stderr
    found = call("predict", "mine.toml", "--cluster", "local", "--json")
    for one in json.loads(found.stdout)["predictions"]:
        assert one["predicted"]["rests_on"]["kind"] == "calibrated for this sweep"
        assert one["predicted"]["step_time_s"] > 0
    again = call("cluster", "calibrate", "local", "--for", "mine.toml", "--budget", "0.5")
    assert "0 probe runs" in again.stderr
