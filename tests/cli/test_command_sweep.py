"""Sweeps of a user's own program on this machine: from TOML to the table, and programs that fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.test_cli import hpcbench

TRAIN = """\
import json, os, sys, time
import beside
assert "TORCHELASTIC_RUN_ID" not in os.environ
learning_rate, what = float(sys.argv[1]), sys.argv[2]
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_ADDR"], flush=True)
with open(os.environ["HPCBENCH_METRICS"], "w") as file:
    for step in range(6):
        print(f"step {step} elapsed {0.25 if step > 1 else 9.0}")
        file.write(json.dumps({"loss": learning_rate * step}) + "\\n")
open("profile.txt", "w").write("kept")
print(sys.argv[3])
if what == "slow":
    print("slow", flush=True)
    while not os.path.exists(os.path.join(os.environ["HPCBENCH_SWEEP_FOLDER"], "go")):
        time.sleep(0.1)
print("training completed" if what != "early" else "training stopped")
sys.exit(3 if what == "code" else 0)
"""
ODD = "a b\"c'd $(touch pwned) `touch pwned` $HOME \\\\ {{x}}"
SWEEP = f"""\
name = "mine"
[command]
argv = [{json.dumps(sys.executable)}, "TRAIN", "{{lr}}", "{{what}}", {json.dumps(ODD)}]
parameters.lr = {{ type = "float", default = 1.0 }}
parameters.what = {{ type = "text", default = "well" }}
must_match = ["training completed"]
must_not_match = ["Traceback"]
outputs = ["*.txt"]
samples_per_step = "8 * ranks"
[[command.metrics]]
name = "step_time"
unit = "s"
better = "lower"
per = "step"
pattern = 'elapsed ([0-9.]+)'
[[command.metrics]]
name = "loss"
better = "lower"
json = "loss"
[fixed]
warmup_steps = 2
time_limit_min = 5
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCBENCH_CLUSTER", "local")
    monkeypatch.delenv("HPCBENCH_RESULTS", raising=False)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "mine.toml").write_text(SWEEP.replace("TRAIN", str(tmp_path / "train.py")))
    return tmp_path


def results(project: Path) -> list[dict[str, Any]]:
    done = hpcbench("collect", "mine", "--out", "all.json", cwd=project)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads((project / "all.json").read_text())["results"]
    return found


def test_a_program_of_two_ranks_is_measured_like_a_training(project: Path) -> None:
    options = ("--set", "grid.tasks_per_node=1,2", "--set", "parameters.lr=0.5")
    done = hpcbench("run", "mine.toml", *options, cwd=project)
    assert done.returncode == 0, done.stderr
    assert "command" in done.stdout
    small, large = sorted(results(project), key=lambda result: len(result["ranks"]))
    assert (large["spec"]["workload"], large["spec"]["parameters"]) == ("command", {"lr": 0.5, "what": "well"})
    assert large["spec"]["command_digest"] == small["spec"]["command_digest"] != ""
    metrics = large["metrics"]
    assert metrics["step_time"]["median"] == metrics["step_time_s"]["median"] == 0.25
    assert metrics["loss"] == 2.5
    assert (small["metrics"]["samples_per_s"], metrics["samples_per_s"]) == (32, 64)
    assert (large["units"], large["better"]) == (
        {"step_time": "s", "loss": ""},
        {"step_time": "lower", "loss": "lower"},
    )
    assert large["step_times_s"] == [0.25] * 4
    assert large["environment_digest"] == small["environment_digest"] != ""
    folder = project / "results" / "local" / "runs" / large["run_id"][:2] / large["run_id"] / "attempts" / "1"
    assert (folder / "outputs" / "profile.txt").read_text() == "kept"
    logs = hpcbench("logs", large["run_id"], cwd=project).stdout
    assert "rank 0 of 2 at 127.0.0.1" in logs
    assert "rank 1 of 2 at 127.0.0.1" in logs
    assert ODD.replace("{{x}}", "{x}") in logs
    assert not list(project.rglob("pwned"))


def test_a_table_states_how_many_runs_of_its_sweep_have_a_result(project: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcbench", "run", "mine.toml", "--set", "repeats=2", "--set", "what=slow"],
        cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    logs = (project / "results").glob("local/runs/*/*/attempts/1/rank-0.log")
    give_up_s = time.monotonic() + 120
    while time.monotonic() < give_up_s and not any("slow" in path.read_text() for path in logs):
        time.sleep(0.2)
        logs = (project / "results").glob("local/runs/*/*/attempts/1/rank-0.log")
    assert hpcbench("cancel", "mine", "--where", "repeat == 1", cwd=project).returncode == 0
    (project / "go").write_text("")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, "1 of 2 runs ended without a result: run it again" in err) == (1, True), err
    assert "mine on local: 1 of 2 runs" in out
    assert "mine: 1 of 2 runs" in hpcbench("table", "mine", "--by", "parameters.lr", cwd=project).stdout
    again = hpcbench("run", "mine.toml", "--set", "repeats=2", "--set", "what=slow", cwd=project)
    assert (again.returncode, "mine on local: 2 runs" in again.stdout) == (0, True)


FAILED = {
    "an exit code": ("what=code", "failed", "ended with exit code 3; its last line: training completed"),
    "a warm-up": ("warmup_steps=6", "failed", "the metric step_time has 6 values, and warmup_steps 6 leaves none"),
    "a pattern": (
        "what=early",
        "failed",
        "no line matches 'training completed'; the most similar lines:\n  training stopped",
    ),
}


@pytest.mark.parametrize(("change", "status", "message"), FAILED.values(), ids=FAILED)
def test_a_failed_program_leaves_its_reason(project: Path, change: str, status: str, message: str) -> None:
    done = hpcbench("run", "mine.toml", "--set", change, cwd=project)
    (result,) = results(project)
    assert (done.returncode, result["status"]) == (int(status == "failed"), status), done.stderr
    assert message in result.get("error", {}).get("message", "")


def test_a_program_that_cannot_be_started_is_unsupported(project: Path) -> None:
    sweep = (project / "mine.toml").read_text().replace(json.dumps(sys.executable), '"no-such-program"', 1)
    (project / "mine.toml").write_text(sweep)
    hpcbench("run", "mine.toml", cwd=project)
    (result,) = results(project)
    assert result["status"] == "unsupported"
    assert result["error"]["message"].startswith("cannot start 'no-such-program' on ")
    assert result["error"]["message"].endswith(": No such file or directory")


def test_processes_that_outlive_the_program_are_ended(project: Path) -> None:
    # A session of its own, as a daemon has, whose parent is gone.
    script = "import subprocess; subprocess.Popen(['setsid', 'sleep', '4321.5'])\n"
    (project / "train.py").write_text(script + TRAIN)
    assert hpcbench("run", "mine.toml", cwd=project).returncode == 0
    assert not [one for one in psutil.process_iter(["cmdline"]) if "4321.5" in (one.info["cmdline"] or [])]


def test_a_parameter_that_no_word_uses_is_named_by_check(project: Path) -> None:
    text = (project / "mine.toml").read_text().replace('"{what}"', '"well"')
    (project / "mine.toml").write_text(text)
    done = hpcbench("check", "mine.toml", cwd=project)
    assert (done.returncode, done.stderr.count("warning: ")) == (0, 1)
    assert "mine.toml:5: no word and no expression of [command] uses the parameter 'what'" in done.stderr


def test_a_dry_run_refuses_a_command(project: Path) -> None:
    done = hpcbench("dry-run", "mine.toml", cwd=project)
    assert (done.returncode, "mine.toml: a dry run builds trainings of hpcbench" in done.stderr) == (2, True)


def test_a_plain_torch_script_meets_its_ranks(project: Path) -> None:
    (project / "train.py").write_text(
        "import torch.distributed as dist\nimport torch\ndist.init_process_group('gloo')\nnumber = torch.ones(1)\n"
        "dist.all_reduce(number)\nfor _ in range(3): print('elapsed', number.item())\nprint('training completed')\n"
        "dist.barrier()\ndist.destroy_process_group()\n"
    )
    text = (project / "mine.toml").read_text()
    (project / "mine.toml").write_text(
        text.partition('[[command.metrics]]\nname = "loss"')[0] + "[fixed]\ntasks_per_node = 2\n"
    )
    done = hpcbench("run", "mine.toml", "--set", "warmup_steps=0", cwd=project)
    assert done.returncode == 0, done.stderr
    assert results(project)[0]["step_times_s"] == [2.0] * 3


def test_a_key_that_no_line_of_json_has_is_named(project: Path) -> None:
    (project / "mine.toml").write_text((project / "mine.toml").read_text().replace('json = "loss"', 'json = "lost"'))
    hpcbench("run", "mine.toml", cwd=project)
    assert results(project)[0]["error"]["message"].endswith("no line of $HPCBENCH_METRICS has the key 'lost'")


def test_removed_results_are_measured_anew(project: Path) -> None:
    options = ("--set", "repeats=2", "--set", "name=mine")
    assert hpcbench("run", "mine.toml", *options, cwd=project).returncode == 0
    first = {result["run_id"] for result in results(project)}
    (project / "other.toml").write_text((project / "mine.toml").read_text())
    assert hpcbench("run", "other.toml", "--set", "name=other", cwd=project).returncode == 0
    shown = hpcbench("results", "rm", "mine", cwd=project)
    assert "1 run kept: in another sweep, too" in shown.stderr
    assert re.search(r"mine on local: 1 run, [0-9.]+ [KM]iB to remove; nothing was changed, --yes", shown.stderr)
    assert len(results(project)) == 2
    for command in (["results", "rm"], ["status"], ["cancel"]):
        none = hpcbench(*command, "mine", "--where", "repeat == 7", cwd=project)
        assert "none of the 2 runs of mine satisfies --where 'repeat == 7'\n" in none.stderr
    for words in (["results", "rm"], ["cancel"]):
        none = hpcbench(*words, "mine", "--run", "x7", cwd=project)
        assert "none of the 2 runs of mine has an id that begins with --run 'x7'\n" in none.stderr
    (only,) = (result["run_id"] for result in results(project) if result["spec"].get("repeat") == 1)
    done = hpcbench("results", "rm", "mine", "--run", only[:6], "--yes", cwd=project)
    assert (done.returncode, len(results(project))) == (0, 1), done.stderr
    listed = " ".join(hpcbench("status", "mine", "--all", cwd=project).stdout.split())
    assert "1 ok, 1 planned" in listed
    assert "or its result was removed" in listed
    again = hpcbench("run", "mine.toml", *options, cwd=project)
    assert "1 submitted, 1 done before" in again.stderr
    assert {result["run_id"] for result in results(project)} == first
    assert hpcbench("results", "rm", "other", "--yes", cwd=project).returncode == 0
    assert "1 run kept" in hpcbench("results", "rm", "other", cwd=project).stderr
