"""The commands as a script sees them: output, exit codes, and what wrong input leaves behind (nothing)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from hpcbench.cli.main import cli
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.site import cluster_doctor
from hpcbench.site.cluster_doctor import DoctorCheck

ROOT = Path(__file__).resolve().parents[2]

GOOD = 'name = "tiny"\n[fixed]\nmodel = "resnet18"\ndataset = "digits"\nbatch_size = 4\nwarmup_steps = 1\nsteps = 2\n[grid]\nstrategy = ["single", "ddp"]\ntasks_per_node = [1, 2]\n'


def hpcbench(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcbench", *arguments], cwd=cwd, env={**os.environ, **(env or {})},
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(GOOD)
    return path


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['hpcbench', '--help']\nfrom hpcbench.cli.main import entry_point\ntry: entry_point()\nexcept SystemExit: pass\nprint(sorted({'torch', 'submitit', 'polars', 'jinja2', 'pydantic', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "command",
    [
        "check",
        "plan",
        "render",
        "submit",
        "run",
        "status",
        "clean",
        "collect",
        "table",
        "bundle",
        "cluster",
        "predict",
        "recommend",
        "validate",
        "models",
        "data",
        "schema",
        "doctor",
        "init",
    ],
)
def test_every_command_has_help(command: str) -> None:
    done = hpcbench(command, "--help")
    assert done.returncode == 0
    assert "Usage:" in done.stdout


def test_plan_json_lists_runs_and_drops_without_writing(sweep: Path, tmp_path: Path) -> None:
    done = hpcbench("plan", str(sweep), "--cluster", "local", "--json", "--results", str(tmp_path / "r"))
    plan = json.loads(done.stdout)
    assert [run["spec"]["strategy"] for run in plan["runs"]] == ["single", "ddp", "ddp"]
    assert plan["dropped"][0]["reason"] == "tasks_per_node 2 = 2 devices, but single runs on 1"
    assert (plan["done"], len(plan["jobs"])) == ([], 2)
    assert not (tmp_path / "r").exists()


def test_render_writes_what_it_prints(sweep: Path, tmp_path: Path) -> None:
    done = hpcbench("render", str(sweep), "--cluster", "generic-slurm", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.jsonl", "0.sh", "1.jsonl", "1.sh"]
    printed = hpcbench("render", str(sweep), "--cluster", "generic-slurm").stdout
    assert (tmp_path / "out" / "0.sh").read_text() in printed


@pytest.mark.parametrize(
    ("text", "arguments", "code", "message"),
    [
        (GOOD.replace("batch_size", "batch_sise"), ["check", "{}"], 2, "did you mean 'batch_size'?"),
        (
            GOOD.replace("= 4", '= "four"'),
            ["check", "{}"],
            2,
            "tiny.toml:5: fixed.batch_size: input should be a valid integer, not 'four'",
        ),
        (GOOD.replace("[1, 2]", "[]"), ["submit", "{}", "--cluster", "local"], 2, "at least one value"),
        (
            GOOD.replace("resnet18", "resnet81"),
            ["run", "{}"],
            2,
            "tiny.toml:3: unknown model: 'resnet81'\n  did you mean 'resnet18'?",
        ),
        (GOOD.replace("digits", "digit"), ["run", "{}"], 2, "tiny.toml:4: unknown dataset: 'digit'"),
        (
            GOOD.replace('["single", "ddp"]', '["single"]').replace("[1, 2]", "[2]"),
            ["run", "{}"],
            2,
            "the only point of sweep 'tiny' is infeasible on local",
        ),
        (GOOD, ["plan", "{}", "--cluster", "locl"], 2, "unknown cluster 'locl'\n  did you mean 'local'?"),
        (GOOD, ["submit", "{}", "--cluster", "generic-slurm"], 3, "sbatch is not on PATH"),
        (GOOD, ["plan", "nowhere.toml", "--cluster", "local"], 2, "no sweep file 'nowhere.toml'"),
        (GOOD, ["status", "nothing"], 2, "sweep 'nothing' has nothing in"),
        (GOOD, ["collect", "--out", "x.doc"], 2, "unknown ending '.doc'\n  choices: .csv, .json, .md, .parquet"),
        (GOOD, ["pln"], 2, "did you mean 'plan'?"),
    ],
)
def test_wrong_input_exits_with_a_message_and_leaves_no_files(
    tmp_path: Path, text: str, arguments: list[str], code: int, message: str
) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(text)
    results = tmp_path / "results"
    empty_path = {"PATH": str(Path(sys.executable).parent), "HPCBENCH_RESULTS": str(results)}
    done = hpcbench(*(argument.replace("{}", str(path)) for argument in arguments), env=empty_path)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not results.exists()


def test_an_undefined_template_variable_is_reported_with_its_line(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "_ending.sh.j2").write_text("# one\n{{ task_fiel }}\n")
    done = hpcbench("run", str(sweep), cwd=tmp_path)
    assert done.returncode == 2
    assert "_ending.sh.j2:2: 'task_fiel' is undefined\n  did you mean 'task_file'?" in done.stderr
    assert not list((tmp_path / "results" / "local" / "submissions").glob("tiny*"))


def test_an_unwritable_results_folder_exits_with_code_3(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = hpcbench("run", str(sweep), "--results", str(tmp_path / "file"))
    assert done.returncode == 3
    assert f"cannot write {tmp_path}/file" in done.stderr


@pytest.mark.parametrize("kind", ["cluster", "sweep", "result"])
def test_schemas_are_valid_and_the_committed_ones_current(kind: str) -> None:
    schema = json.loads(hpcbench("schema", kind).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads((ROOT / "docs" / "schemas" / f"{kind}.json").read_text()) == schema, "make schemas"


def test_init_writes_a_project_that_works_and_overwrites_nothing(tmp_path: Path) -> None:
    project = tmp_path / "project"
    assert hpcbench("init", str(project)).returncode == 0
    (project / "README.md").write_text("mine")
    assert "nothing to write" in hpcbench("init", str(project)).stderr
    assert (project / "README.md").read_text() == "mine"
    done = hpcbench("plan", "quickstart", "--cluster", "local", "--json", cwd=project)
    assert len(json.loads(done.stdout)["runs"]) == 6
    assert hpcbench("check", "sweeps/quickstart.toml", "clusters/generic-slurm.toml", cwd=project).returncode == 0


def test_doctor_json_reports_findings_and_creates_no_folder(tmp_path: Path) -> None:
    done = hpcbench("doctor", "--json", "--results", str(tmp_path / "not" / "yet"))
    findings = {finding["what"]: finding["works"] for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, done.stdout
    assert findings["results"]
    assert findings["torch"]
    assert not (tmp_path / "not").exists()


def test_doctor_names_what_is_missing(tmp_path: Path) -> None:
    done = hpcbench("doctor", "--cluster", "generic-slurm", env={"PATH": str(tmp_path)})
    assert done.returncode == 3
    assert "run on a login node" in done.stdout.replace("\n", " ").replace("  ", " ")


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ({"hip": "6.4.1", "devices": ["MI300X"]},
         {"accelerators": (True, "1 visible from here, torch is built for ROCm (HIP) 6.4.1"), "counters": (True, "read")}),
        ({"cuda": "13.0", "devices": ["H200"] * 2, "no_counters": "no answer from nvml: x"},
         {"accelerators": (True, "2 visible from here, torch is built for CUDA 13.0"),
          "counters": (False, "no answer from nvml: x")}),
        ({"devices": []}, {"accelerators": (False, "0 visible from here, torch is built for processors alone")}),
    ],
)  # fmt: skip
def test_doctor_names_the_platform_of_torch_and_unread_counters(
    torch: dict[str, Any], expected: dict[str, Any]
) -> None:
    profile, _ = load_cluster("mi300x-192gb-ib")
    checks = {check.what: check for check in cluster_doctor._check_packages(profile, {"torch": torch})}
    found = {name: checks[name] for name in ("accelerators", "counters") if name in checks}
    assert {name: (check.works, check.detail) for name, check in found.items()} == expected
    assert not any(check.needed for check in found.values())


def test_doctor_separates_what_is_required_and_cuts_no_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install = f"{tmp_path}/a-folder-with-a-long-name/bin/python -m pip install --no-deps fairscale==0.4.13"
    checks = [
        DoctorCheck("results", works=True, detail=f"{tmp_path}/{'x' * 100}"),
        DoctorCheck("fairscale", works=False, needed=False, mend=install),
    ]
    monkeypatch.setattr("hpcbench.cli.project_commands.check_cluster", lambda *_: checks)
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(cli, ["doctor", "--cluster", "local"])
    lines = done.stdout.splitlines()
    assert (done.exit_code, lines[0], lines[2]) == (0, "required", "optional")
    assert lines[1].split() == ["ok", "results", checks[0].detail]
    assert lines[4].strip() == install
    assert lines[-1] == "local is ready; 1 optional part missing: fairscale"
    checks.append(DoctorCheck("torch", works=False, mend="pip install torch"))
    done = CliRunner().invoke(cli, ["doctor", "--cluster", "local"])
    verdict = "local is not ready, missing: torch; 1 optional part missing: fairscale"
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (3, verdict)


def test_a_list_in_a_narrow_terminal_cuts_no_file(tmp_path: Path) -> None:
    (tmp_path / "clusters").mkdir()
    path = tmp_path / "clusters" / f"{'a-long-name-' * 5}.toml"
    path.write_text(f'name = "{path.stem}"\n')
    done = hpcbench("cluster", "list", cwd=tmp_path, env={"COLUMNS": "80"})
    assert "…" not in done.stdout
    assert done.returncode == 0


def test_the_quickstart_ends_with_a_table_and_a_repeated_run_measures_nothing_again(tmp_path: Path) -> None:
    quickstart = ["run", "quickstart", "--set", "steps=2", "--set", "warmup_steps=1"]
    results = ["--results", str(tmp_path / "r")]
    done = hpcbench(*quickstart, *results)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "6 submitted" in done.stderr
    assert "quickstart on local" in done.stdout
    again = hpcbench(*quickstart, "--json", *results)
    assert "0 submitted, 6 done before" in again.stderr
    table = json.loads(again.stdout)
    assert [row["status"] for row in table["rows"]] == ["ok"] * 6
    assert table["rows"][0]["speedup"] == pytest.approx(1.0)
    status = json.loads(hpcbench("status", "quickstart", "--json", *results).stdout)
    assert status["sweeps"][0]["counts"] == {"ok": 6}
    collected = json.loads(hpcbench("collect", "--json", *results).stdout)["results"]
    jsonschema.validate(collected[0], json.loads((ROOT / "docs" / "schemas" / "result.json").read_text()))
    assert sorted(len(result["ranks"]) for result in collected) == [1, 1, 1, 1, 2, 2]
    for ending in ("csv", "parquet", "json"):
        assert hpcbench("collect", "--out", str(tmp_path / f"all.{ending}"), *results).returncode == 0
    assert (tmp_path / "all.csv").read_text().count("\n") == 7


def test_a_configuration_folder_that_may_not_be_entered_is_passed_over(tmp_path: Path) -> None:
    """A user without root's rights reads the folder: no mode stops root."""
    closed = tmp_path / "closed"
    (closed / "hpcbench" / "clusters").mkdir(parents=True)
    closed.chmod(0)
    drop = [] if os.geteuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"]
    if not os.geteuid():
        os.chown(closed, 65534, 65534)
    env = {**os.environ, "XDG_CONFIG_HOME": str(closed)}
    command = [*drop, sys.executable, "-m", "hpcbench", "cluster", "list"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "slurmbox" in done.stdout) == (0, True), done.stderr
