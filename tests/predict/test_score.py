"""Scores on the SLURM box: predictions, launches, and the cases that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.oracle import cases, registered, score
from benchmarks.oracle.cases import BLIND, CALIBRATED, ScoreCase, ScoreCases
from benchmarks.oracle.scoring import ORACLE_NAME, PredictorResult
from benchmarks.testbed import Testbed
from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.config.sweep_loader import load_sweep

SWEEP = """\
name = "small"
repeats = 3
[fixed]
model = "vit"
dataset = "digits"
batch_size = 8
[submit]
order = "shuffled"
[[include]]
strategy = "single"
[[include]]
strategy = "fsdp"
nodes = 2
[[include]]
strategy = "ddp"
nodes = 2
"""


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Testbed:
    (tmp_path / "small.toml").write_text(SWEEP)
    # The score works in the folder of its profile.
    monkeypatch.chdir(tmp_path)
    return registered.BOX.bed(tmp_path / "work")


def small_score(folder: Path) -> registered.Score:
    return registered.BOX._replace(sweep=folder / "small.toml", folder=folder)


def seeds(path: Path) -> dict[str, list[int]]:
    """The launches of a sweep by strategy."""
    by_strategy: dict[str, list[int]] = {}
    for settings in load_sweep(path).includes:
        parameters = {name: value for (name, *_), value in settings.items()}
        by_strategy.setdefault(parameters["strategy"], []).append(parameters["seed"])
    return by_strategy


def case(spec: RunSpec, run_ids: list[str], times_s: list[float]) -> ScoreCase:
    return ScoreCase(
        config_id=config_id(spec), spec=spec, predicted_step_time_s=1.0, measured_step_times_s=times_s, run_ids=run_ids,
        said={ORACLE_NAME: PredictorResult(step_time_s=1.0)},
    )  # fmt: skip


def test_data_parallelism_is_launched_more_often_and_known_launches_never_again(bed: Testbed, tmp_path: Path) -> None:
    own = small_score(tmp_path)
    assert score.predict(bed, own) == 0
    register = registered.read(own.predictions)
    assert len(register.configurations) == 3
    for configuration in register.configurations:
        assert {ORACLE_NAME, BLIND, CALIBRATED, "paradl"} <= configuration.said.keys()
    path = score._sweep_of_launches(bed, own)
    # The only one of its model on one device, and data parallelism: five; the other one three.
    assert seeds(path) == {"single": [0, 1, 2, 3, 4], "fsdp": [0, 1, 2], "ddp": [0, 1, 2, 3, 4]}
    plan = score._plan(bed, path)
    assert len(plan.runs) == 13
    ddp = {spec.seed: key for key, spec in plan.runs.items() if spec.strategy == "ddp"}
    spec = plan.runs[ddp[1]]
    document = ScoreCases(sweep="s", sources=[], cases=[case(spec, [ddp[1], ddp[3]], [1.0, 1.1])])
    cases.write(own.cases, document)
    assert seeds(score._sweep_of_launches(bed, own))["ddp"] == [0, 2, 4]


def test_present_predictions_follow_from_the_committed_calibrations(bed: Testbed, tmp_path: Path) -> None:
    own = small_score(tmp_path)
    assert score.predict(bed, own) == 0
    register = registered.read(own.predictions)
    document = ScoreCases(
        sweep="s", sources=register.sources,
        cases=[
            ScoreCase(
                config_id=one.config_id, spec=one.spec, predicted_step_time_s=one.said[ORACLE_NAME].step_time_s,
                measured_step_times_s=[1.0], run_ids=["x"], said=one.said,
            )
            for one in register.configurations
        ],
    )  # fmt: skip
    registered_cases = document.scored_cases()
    for before, now in zip(registered_cases, cases.with_present_predictions(own, registered_cases), strict=True):
        assert now.said[ORACLE_NAME].step_time_s == before.said[ORACLE_NAME].step_time_s
        assert now.said[BLIND].step_time_s == before.said[BLIND].step_time_s
