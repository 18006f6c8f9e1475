"""``hpcbench data``: what a person and a script see of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import hpcbench


def test_made_data_sets_are_listed_until_they_are_incomplete(tmp_path: Path) -> None:
    make = ("data", "make", "mnist", "tokens", "--size", "8", "--samples", "20", "--workers", "1")
    done = hpcbench(*make, "--folder", str(tmp_path / "d"), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"mnist: 20 samples in {tmp_path / 'd'}" in done.stderr
    sets = json.loads(done.stdout)["datasets"]
    assert [(one["dataset"], one["kind"], one["size"], one["samples"], one["complete"]) for one in sets] == [
        ("mnist", "made", 8, 20, True),
        ("tokens", "made", 8, 20, True),
    ]
    (tmp_path / "d" / "tokens-8" / "manifest.json").unlink()
    (tmp_path / "d" / "MNIST" / "raw").mkdir(parents=True)
    listed = hpcbench("data", "list", env={"HPCBENCH_DATA": str(tmp_path / "d")}, cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "hpcbench data make tokens --size 8" in " ".join(listed.stdout.split())
    assert [line.split()[:2] for line in listed.stdout.splitlines() if " real " in line] == [["mnist", "real"]]


def test_an_empty_folder_names_the_command_that_fills_it(tmp_path: Path) -> None:
    listed = hpcbench("data", "list", "--folder", str(tmp_path), "--json")
    assert json.loads(listed.stdout) == {"folder": str(tmp_path), "datasets": []}
    assert "hpcbench data make DATASET" in hpcbench("data", "list", "--folder", str(tmp_path)).stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["cifar"], "did you mean 'cifar10'?"),
        (["digits"], "dataset 'digits' is real and needs no files"),
        (["mnist", "--samples", "0"], "--samples"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_made(tmp_path: Path, words: list[str], text: str) -> None:
    done = hpcbench("data", "make", *words, "--folder", str(tmp_path / "d"))
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert not (tmp_path / "d").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("a file")
    done = hpcbench("data", "make", "tokens", "--size", "8", "--samples", "4", "--folder", str(tmp_path / "d"))
    assert done.returncode == 3
    assert f"cannot read {tmp_path / 'd' / 'tokens-8'}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_environment_of_jobs_gets_the_command_to_run_there(tmp_path: Path) -> None:
    (tmp_path / "clusters").mkdir()
    profile = 'name = "far"\ndata_folder = "$NOWHERE_AT_ALL/data"\ndefault_environment = "m"\n[environments.m]\nmodules = ["torch"]\n'
    (tmp_path / "clusters" / "far.toml").write_text(profile)
    done = hpcbench("data", "make", "tokens", "--cluster", "far", "--samples", "4", cwd=tmp_path)
    assert done.returncode == 3
    assert "python -m hpcbench.worker data make tokens --folder '$NOWHERE_AT_ALL/data' --samples 4" in done.stderr
