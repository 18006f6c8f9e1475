"""Profiles on the command line: PBS scripts to hand over, accounts that are missing, clusters that are here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpcbench.cli.main import cli
from hpcbench.config import cluster_profile
from hpcbench.config.cluster_profile import ClusterProfile, load_cluster_file
from hpcbench.config.toml_tables import TomlSource

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


@pytest.mark.parametrize("kind", ["slurm", "pbs"])
def test_doctor_states_a_missing_account(hpcbench: Any, tmp_path: Path, kind: str) -> None:
    profile, config = tmp_path / "clusters" / "c.toml", tmp_path / "hpcbench" / "config.toml"
    profile.write_text(
        f'name = "c"\naccount_required = true\ndefault_environment = "e"\nscheduler = {{ kind = "{kind}" }}\n'
        '[environments.e]\nmodules = ["none"]\n'
    )
    variables = {"PATH": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = hpcbench("doctor", "--no-job", "--cluster", "c", **variables)
    assert done.returncode == 3, done.stderr
    assert done.stdout.count("cluster c needs an account, and none is set") == 1
    assert f"set it in {config}, below [accounts]" in " ".join(done.stdout.split())
    config.parent.mkdir()
    config.write_text('[accounts]\nc = "project_1"\n')
    assert "needs an account" not in hpcbench("doctor", "--no-job", "--cluster", "c", **variables).stdout


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
    assert "found neither scontrol nor qsub\n  run this on a login node" in done.stderr
    assert '[scheduler] kind ("pbs" for qsub, "local" without a scheduler),\n  and [node] cores' in done.stderr
    assert list((tmp_path / "clusters").iterdir()) == []
    for name, text in (("scontrol", "for part in a b c; do echo scontrol: $part >&2; done; exit 1"), ("qsub", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    silent = hpcbench("cluster", "init", "mine", PATH=str(tmp_path)).stderr
    assert f"found {tmp_path}/scontrol and {tmp_path}/qsub\n" in silent
    assert ("(scontrol: c)" in silent, "scontrol: a" in silent) == (True, False)
    wrong = hpcbench("cluster", "init", "../mine")
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    ("kind", "has_sbatch", "verdict"),
    [
        ("local", False, "mine is ready; scheduler none: jobs run on this machine"),
        ("local", True, "mine is ready; scheduler none: jobs run on this machine, although it has {folder}/sbatch"),
        ("none", True, "mine is ready; scheduler none: predictions alone"),
        ("pbs", False, "mine is ready; scheduler PBS: render writes jobs for qsub"),
    ],
)
def test_doctor_states_where_jobs_without_slurm_run(
    hpcbench: Any, tmp_path: Path, kind: str, has_sbatch: bool, verdict: str
) -> None:
    # Made by setup lines: the software is not looked at, and the check takes no time.
    profile = (
        f'name = "mine"\nscheduler.kind = "{kind}"\ndefault_environment = "e"\n[environments.e]\nsetup = ["true"]\n'
    )
    (tmp_path / "clusters" / "mine.toml").write_text(profile)
    if has_sbatch:
        (tmp_path / "sbatch").write_text("#!/bin/sh\n")
        (tmp_path / "sbatch").chmod(0o755)
    done = hpcbench("doctor", "--no-job", "--cluster", "mine", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(verdict.format(folder=tmp_path) + "; ")
    assert ("hpcbench cluster init NAME" in done.stdout) == ("although" in verdict)


def test_a_list_of_profiles_has_readable_descriptions_in_40_columns(hpcbench: Any, tmp_path: Path) -> None:
    (tmp_path / "clusters" / "bad.toml").write_text('name = "bad"\nnodes = 3\n')
    done = hpcbench("cluster", "list", COLUMNS="40")
    assert max(map(len, done.stdout.splitlines())) <= 40
    assert {"Frontier:", "broken:"} <= set(done.stdout.split())
    (tmp_path / "clusters" / "child.toml").write_text('name = "child"\nextends = "bad"\n')
    wide = hpcbench("cluster", "list", COLUMNS="200").stdout
    assert "broken: bad.toml:2: " in wide
    assert str(tmp_path) not in wide


def test_recommend_states_that_a_partition_has_fewer_nodes(hpcbench: Any) -> None:
    wish = ("--model", "resnet18", "--dataset", "digits", "--batch-size", "8", "--cluster", "perlmutter")
    assert "warning" not in hpcbench("recommend", *wish).stderr
    done = hpcbench("recommend", *wish, "--nodes", "9999")
    assert "warning: 9999 nodes, but a job in this partition of perlmutter has at most 1792" in done.stderr


def test_recommend_loads_its_profile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(path: Path) -> tuple[ClusterProfile, TomlSource]:
        loaded.append(path.stem)
        return load_cluster_file(path)

    monkeypatch.setattr(cluster_profile, "load_cluster_file", load)
    wish = ("--model", "llama_8b", "--dataset", "tokens", "--cluster", "h100-80gb-ib", "--json")
    done = CliRunner().invoke(cli, ["recommend", *wish])
    assert (done.exit_code, loaded) == (0, ["h100-80gb-ib"])


def test_a_command_line_without_a_command_prints_its_usage_once(hpcbench: Any) -> None:
    done = hpcbench()
    assert (done.returncode, done.stderr.count("Usage:"), "error:" in done.stderr) == (2, 1, False)


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("s.toml", "", "s.toml: the file is empty"),
        ("s.toml", SWEEP.replace("[2, 3]", "[]"), "s.toml:8: grid.steps is empty: at least one value is needed"),
        ("clusters/a.toml", 'name = "a"\nextends = "b"\n', "profiles extend each other in a circle: a -> b -> a"),
        ("s.toml", None, "clusters is a folder"),
    ],
)
def test_wrong_files_are_named_with_the_fault(
    hpcbench: Any, tmp_path: Path, file: str, text: str | None, problem: str
) -> None:
    (tmp_path / "clusters" / "b.toml").write_text('name = "b"\nextends = "a"\n')
    if text is not None:
        (tmp_path / file).write_text(text)
    done = hpcbench("check", file if text is not None else "clusters")
    assert done.returncode == 2
    assert problem in done.stderr


def test_plan_advises_more_micro_batches_where_a_pipeline_has_one(hpcbench: Any, tmp_path: Path) -> None:
    for micro_batches, advised in ((1, True), (4, False)):
        text = SWEEP.replace('"ddp"', '"1f1b"')
        text = text.replace("[grid]", f"tasks_per_node = 2\nmicro_batches = {micro_batches}\n[grid]")
        (tmp_path / "s.toml").write_text(text)
        printed = " ".join(hpcbench("plan", "s.toml", "--cluster", "local").stdout.split())
        assert ("set micro_batches" in printed) == advised
