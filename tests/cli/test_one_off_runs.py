"""Runs without a sweep's file, sweeps changed by ``--set``, and what submit and retry report about the runs they leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import GOOD, hpcbench


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCBENCH_CLUSTER", "local")
    monkeypatch.delenv("HPCBENCH_RESULTS", raising=False)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "tiny.toml").write_text(GOOD)
    return tmp_path


def test_overrides_are_part_of_the_identity(project: Path) -> None:
    plain, other = (
        json.loads(hpcbench("plan", "tiny.toml", "--json", *more, cwd=project).stdout)["runs"]
        for more in ([], ["--set", "steps=3"])
    )
    assert [run["spec"]["steps"] for run in other] == [3, 3, 3]
    assert not {run["run_id"] for run in plain} & {run["run_id"] for run in other}


@pytest.mark.parametrize(
    "command", [["check"], ["render", "--out", "out"], ["predict"], ["submit"], ["run"], ["retry"]]
)
def test_every_command_that_plans_takes_overrides(project: Path, command: list[str]) -> None:
    done = hpcbench(*command, "tiny.toml", "--set", "steps=none", cwd=project)
    assert (done.returncode, "--set steps=none: fixed.steps" in done.stderr) == (2, True), done.stderr


def test_a_run_without_a_sweep_file_can_be_retried(project: Path) -> None:
    arguments = ("--model", "resnet18", "--strategy", "single", "--set", "steps=1", "--set", "warmup_steps=0")
    done = hpcbench("run", *arguments, "--dataset", "digits", "--batch-size", "2", "--name", "mine", cwd=project)
    assert done.returncode == 0, done.stderr
    again = hpcbench("retry", "mine", "--json", cwd=project)
    assert (again.returncode, json.loads(again.stdout)["submitted"]) == (0, []), again.stderr
    assert "0 runs submitted again\n  none of the 1 is in a state that retry takes" in again.stderr
    assert again.stderr.rstrip().endswith(": 1 ok")
    # The same name for other runs hides the first, and states so.
    more = hpcbench("run", *arguments, "--dataset", "digits", "--batch-size", "3", "--name", "mine", cwd=project)
    assert "1 earlier run of 'mine' is not part of this sweep and no longer listed under its name" in more.stderr


def test_missing_options_of_a_run_without_a_file_are_named(project: Path) -> None:
    done = hpcbench("run", "--nodes", "1", cwd=project)
    assert (done.returncode, done.stderr.count("is missing\n  choices: ")) == (2, 2), done.stderr
    both = hpcbench("run", "tiny.toml", "--model", "resnet18", cwd=project)
    assert (both.returncode, "--model is for a run without a sweep" in both.stderr) == (2, True)
    none = hpcbench("run", cwd=project)
    assert (none.returncode, "run SWEEP, or run --model M --strategy S" in none.stderr) == (2, True)
