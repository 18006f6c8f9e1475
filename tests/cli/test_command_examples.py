"""The shipped sweeps of other programs, and the page about them, on this machine."""

from __future__ import annotations

import json
import re
import shlex
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.cli.test_cli import hpcbench
from tests.docs.blocks import blocks
from tests.environments import EnvironmentMissing, make_trainer_environment

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your-own-command.md"
NCCL_TESTS = """\
#!/bin/sh
echo "# arguments $*"
cat <<'END'
# nThread 1 nGpus 2 minBytes 1048576 maxBytes 1048576 step: 1048576(bytes) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid 119482 on     node1 device  0 [0x07] NVIDIA H100
#  Rank  1 Group  0 Pid 119482 on     node1 device  1 [0x0a] NVIDIA H100
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    45.32   23.14   23.15      0    44.98   23.31   23.31      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 23.2252
#
END
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCBENCH_CLUSTER", "local")
    monkeypatch.delenv("HPCBENCH_RESULTS", raising=False)
    (tmp_path / "hpcbench.toml").write_text("")
    return tmp_path


def run(project: Path, sweep: str, *changes: str) -> list[dict[str, Any]]:
    """Return the results of a sweep, whose runs all end well."""
    words = [word for change in changes for word in ("--set", change)]
    done = hpcbench("run", sweep, *words, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    return collected(project, sweep)


def collected(project: Path, sweep: str) -> list[dict[str, Any]]:
    done = hpcbench("collect", sweep, "--out", "all.json", cwd=project)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads((project / "all.json").read_text())["results"]
    return found


def printed(project: Path, result: dict[str, Any], pattern: str) -> list[float]:
    """Return the numbers that the program printed on rank 0."""
    return [float(number) for number in re.findall(pattern, log_of(project, result))]


def log_of(project: Path, result: dict[str, Any]) -> str:
    run_id: str = result["run_id"]
    folder = project / "results" / "local" / "runs" / run_id[:2] / run_id
    return (folder / "attempts" / "1" / "rank-0.log").read_text()


def test_the_page_is_followed_from_top_to_bottom(project: Path) -> None:
    for block in blocks(PAGE):
        if block.kind == "python":
            (project / "train.py").write_text(block.text)
        elif block.kind == "toml":
            name = tomli.loads(block.text)["name"]
            (project / f"{name}.toml").write_text(block.text.replace('"python3"', json.dumps(sys.executable)))
    commands = [command for block in blocks(PAGE) if block.kind == "console" for command in block.commands()]
    assert len(commands) == 7
    for command in commands:
        done = hpcbench(*shlex.split(command)[1:], cwd=project)
        assert done.returncode == 0, command + done.stderr
        if "own.loss" in command:
            assert re.search(r"^0\.01 +7\.131 ", done.stdout, re.MULTILINE), done.stdout
    assert len(collected(project, "mine")) == 6


def test_the_steps_of_a_torch_script_are_those_that_it_prints(project: Path) -> None:
    changes = ("repeats=1", "batch=8", "parameters.width=64", "grid.tasks_per_node=2")
    (result,) = run(project, "torch-ddp", f"parameters.python={sys.executable}", *changes)
    steps_s = printed(project, result, "elapsed ([0-9.]+)")
    assert (len(steps_s), result["step_times_s"]) == (30, steps_s[5:])
    assert result["metrics"]["loss"] == printed(project, result, "loss ([0-9.]+)")[-1]
    assert list(result["provenance"]["program_files_sha256"]) == ["{python}", "{HPCBENCH_SWEEP_FOLDER}/torch_ddp.py"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_accelerate_trains_a_model_of_transformers(project: Path) -> None:
    try:
        python = make_trainer_environment("accelerate", ["accelerate==1.15.0", "transformers==5.24.0"])
    except EnvironmentMissing as reason:
        pytest.fail(str(reason))
    changes = ("repeats=1", "grid.layers=2,4", "grid.tasks_per_node=2")
    results = run(project, "accelerate", f"parameters.python={python}", *changes)
    assert sorted(result["spec"]["parameters"]["layers"] for result in results) == [2, 4]
    for result in results:
        steps_s = printed(project, result, r"loss [0-9.]+, ([0-9.]+) s")
        assert [round(step_s, 4) for step_s in result["step_times_s"]] == steps_s[3:]
        assert result["metrics"]["loss"]["median"] == pytest.approx(6.9, abs=0.2)
        assert result["metrics"]["tokens_per_s"] == pytest.approx(512 / result["metrics"]["step_time"]["mean"], rel=0.2)


def test_the_columns_of_nccl_tests_are_read(project: Path) -> None:
    program = project / "all_reduce_perf"
    program.write_text(NCCL_TESTS)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    changes = ("repeats=1", f"program={program}", "size_bytes=1048576", "fixed.devices_per_task=2")
    (result,) = run(project, "nccl-tests", *changes)
    own = {name: result["metrics"][name] for name in ("time", "algorithm_bandwidth", "bus_bandwidth")}
    assert own == {"time": 45.32, "algorithm_bandwidth": 23.14, "bus_bandwidth": 23.15}
    assert "# arguments -b 1048576 -e 1048576 -g 2 -n 20" in log_of(project, result)
    program.write_text(NCCL_TESTS.replace("values : 0 OK", "values : 3 FAILED"))
    wrong = hpcbench("run", "nccl-tests", "--set", "name=wrong", "--set", f"program={program}", "--set",
                     "size_bytes=1048576", "--set", "repeats=2", cwd=project)  # fmt: skip
    assert wrong.returncode == 1
    assert "# Out of bounds values : 3 FAILED" in wrong.stdout
