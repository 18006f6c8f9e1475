"""The results of a tree that move predictions, and those that do not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.predict.calibration.calibration_store import write_calibration
from hpcbench.predict.calibration.fit_calibration import fit_calibration
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import Prediction
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import result_document
from tests.predict.planted_probes import finished_run
from tests.predict.test_fit_calibration import everything

PROFILE, _ = load_cluster("slurmbox")


def spec_of(**more: Any) -> RunSpec:
    return RunSpec(**{"model": "resnet18", "dataset": "digits", "strategy": "ddp", "batch_size": 8, "nodes": 2,
                      "dp_degree": 2, **more})  # fmt: skip


def predicted(tree: ClusterTree, spec: RunSpec, **more: Any) -> Prediction:
    prediction = Forecast(PROFILE, tree).predict(spec, **more)
    assert isinstance(prediction, Prediction)
    return prediction


def write(tree: ClusterTree, spec: RunSpec, factor: float, status: str = "ok", **more: Any) -> None:
    """A result that takes ``factor`` times what the profile predicts."""
    alone = Forecast(PROFILE).predict(spec)
    time_s = factor * (alone.step_time_s if isinstance(alone, Prediction) else 1.0)
    result = finished_run(spec, time_s, status=status, **{"environment_digest": None, **more})
    path = tree.result_path(result.run_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode(result_document(result)))


def test_launches_of_a_configuration_are_one_neighbour(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path / "slurmbox")
    for repeat in range(3):
        write(tree, spec_of(repeat=repeat), 2.0)
    basis = predicted(tree, spec_of(nodes=4, dp_degree=4)).rests_on
    assert (basis.kind, basis.counts) == ("measured neighbours", {"model and strategy": 1})
    assert [one.config_id for one in basis.neighbours] == [config_id(spec_of())]
    assert 1.5 < basis.factor < 2
    assert predicted(tree, spec_of()).rests_on.counts == {"itself": 1}


def test_own_results_are_held_out_whatever_the_file_calls_them(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path / "slurmbox")
    write(tree, spec_of(), 2.0, config_id="0123456789abcdef")
    assert predicted(tree, spec_of(), held_out=True).rests_on.kind == "profile"
    assert predicted(tree, spec_of()).rests_on.counts == {"itself": 1}


def test_the_default_partition_has_two_names(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path / "slurmbox")
    write(tree, spec_of(partition=PROFILE.default_partition), 2.0)
    assert predicted(tree, spec_of(nodes=4, dp_degree=4)).rests_on.kind == "measured neighbours"


@pytest.mark.parametrize(
    ("spec", "more"),
    [
        (spec_of(), {"status": "failed"}),
        (spec_of(strategy="nobody's"), {}),
        (spec_of(model="resnet19"), {}),
        (spec_of(nodes=3), {}),
        (spec_of(), {"factor": 1e30}),
        (spec_of(), {"factor": 0.0}),
        (spec_of(), {"run_id": "0123456789abcdef"}),
    ],
    ids=["failed", "strategy", "model", "degrees", "too long", "no time", "run id"],
)
def test_probes_and_failed_runs_do_not_move_predictions(tmp_path: Path, spec: RunSpec, more: dict[str, Any]) -> None:
    tree = ClusterTree(tmp_path / "slurmbox")
    write(tree, spec, **{"factor": 2.0, **more})
    assert predicted(tree, spec_of(nodes=4, dp_degree=4)).rests_on.kind == "profile"


def test_a_broken_result_moves_nothing(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path / "slurmbox")
    path = tree.result_path("0123456789abcdef")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert predicted(tree, spec_of()).rests_on.kind == "profile"


def test_a_calibration_of_another_environment_than_the_newest_results_is_named(tmp_path: Path) -> None:
    tree = ClusterTree(tmp_path / "slurmbox")
    write_calibration(fit_calibration(PROFILE, None, everything()), tree)
    for seed, digest, is_named in ((1, "e", False), (2, "newer", True)):
        write(tree, spec_of(seed=seed), 2.0, environment_digest=digest)
        newest = tree.result_path(run_id(spec_of(seed=seed)))
        os.utime(newest, (2e9 + seed, 2e9 + seed))
        forecast = Forecast(PROFILE, tree)
        assert isinstance(forecast.predict(spec_of(nodes=4, dp_degree=4)), Prediction)
        notes = " ".join(note for machine in forecast.machines() for note in machine.notes)
        assert ("of another machine or software (e) than the newest results (newer)" in notes) == is_named
