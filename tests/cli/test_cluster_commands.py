"""Profiles on the command line: PBS scripts to hand over, accounts that are missing, clusters that are here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SWEEP = 'name = "s"\n[fixed]\nmodel = "resnet18"\ndataset = "digits"\nstrategy = "ddp"\nbatch_size = 8\n[grid]\nsteps = [2, 3]\n'


@pytest.fixture
def hpcbench(tmp_path: Path) -> Any:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "s.toml").write_text(SWEEP)

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        root = str(Path(__file__).resolve().parents[2])
        env = {**os.environ, "PYTHONPATH": root, **variables}
        command = [sys.executable, "-m", "hpcbench", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    return call


def test_a_rendered_pbs_script_is_complete_with_its_qsub_command(hpcbench: Any, tmp_path: Path) -> None:
    done = hpcbench("render", "s.toml", "--cluster", "abci-3", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "needs an account, and none is set" in done.stderr
    assert "next: qsub out/0.sh" in done.stderr
    script = (tmp_path / "out" / "0.sh").read_text()
    assert f"\ntask_file={tmp_path}/out/0.jsonl\n" in script
    assert "\n#PBS -J 0-1\n" in script
    assert (tmp_path / "out" / "0.jsonl").exists()
    assert hpcbench("table", "s").returncode == 0
    refused = hpcbench("submit", "s.toml", "--cluster", "abci-3")
    assert refused.returncode == 2
    assert "run by PBS, which hpcbench writes for but does not submit to\n  hpcbench render" in refused.stderr


def test_submit_refuses_a_cluster_that_is_only_predicted_for(hpcbench: Any, tmp_path: Path) -> None:
    done = hpcbench("submit", "s.toml", "--cluster", "lisa")
    assert done.returncode == 2
    assert "cluster lisa is only predicted for: no job reaches it" in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_missing_account_is_named_before_anything_is_written(hpcbench: Any, tmp_path: Path) -> None:
    done = hpcbench("submit", "s.toml", "--cluster", "lumi-g")
    assert done.returncode == 2
    assert "cluster lumi-g needs an account, and none is set" in done.stderr
    assert 'below [accounts]: lumi-g = "..."' in done.stderr
    assert not (tmp_path / "results").exists()


def test_the_cluster_of_this_machine_is_listed_first(hpcbench: Any, tmp_path: Path) -> None:
    listed = json.loads(hpcbench("cluster", "list", "--json", NERSC_HOST="perlmutter").stdout)["clusters"]
    assert [entry["name"] for entry in listed if entry["here"]] == ["perlmutter"]
    assert listed[0]["name"] == "perlmutter"
    assert {"snellius", "abci-v100", "generic-slurm"} <= {entry["name"] for entry in listed}
    only = json.loads(hpcbench("cluster", "list", "--here", "--json", NERSC_HOST="perlmutter").stdout)["clusters"]
    assert [entry["name"] for entry in only] == ["perlmutter"]


def test_cluster_list_is_empty_where_no_profile_matches_the_machine(hpcbench: Any, tmp_path: Path) -> None:
    (tmp_path / "clusters" / "mine.toml").write_text('name = "mine"\n[match]\nvariables = { SITE = "x" }\n')
    nowhere = hpcbench("cluster", "list", "--here", "--json")
    assert (nowhere.returncode, json.loads(nowhere.stdout)) == (0, {"clusters": []})
    assert "no profile knows this machine" in nowhere.stderr
    assert '"name": "mine"' in hpcbench("cluster", "list", "--here", "--json", SITE="x").stdout


def test_no_scheduler_to_write_a_profile_from(hpcbench: Any, tmp_path: Path) -> None:
    done = hpcbench("cluster", "init", "mine", PATH=str(tmp_path))
    assert done.returncode == 3
    assert "run this on a login node" in done.stderr
    assert list((tmp_path / "clusters").iterdir()) == []
    wrong = hpcbench("cluster", "init", "../mine")
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
