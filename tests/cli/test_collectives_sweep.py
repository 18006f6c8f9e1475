"""Sweeps of collectives on this machine: from TOML to tables and plots, and wrong sweeps."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli

from hpcbench.config.sweep_loader import Sweep
from hpcbench.errors import ConfigErrors
from hpcbench.strategies.check_sweep import check_names
from tests.cli.test_cli import hpcbench
from tests.docs.blocks import blocks

SWEEP = """\
name = "coll"
[fixed]
workload = "collectives"
tasks_per_node = 2
warmup_steps = 1
steps = 5
[grid]
operation = ["all_reduce", "all_gather"]
message_bytes = [1024, 65536]
[[include]]
operation = "pairs"
message_bytes = 4096
env.OMP_NUM_THREADS = "1"
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collectives")
    (folder / "coll.toml").write_text(SWEEP)
    done = hpcbench("run", "coll.toml", "--cluster", "local", cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def results(project: Path) -> list[dict[str, Any]]:
    done = hpcbench("collect", "coll", "--out", "all.json", cwd=project)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads((project / "all.json").read_text())["results"]
    return found


@pytest.mark.slow
def test_results_have_the_columns_of_nccl_tests(project: Path) -> None:
    found = {(one["spec"]["operation"], one["spec"]["message_bytes"]): one for one in results(project)}
    assert len(found) == 5
    for (operation, size_bytes), result in found.items():
        assert (result["spec"]["workload"], result["status"], len(result["step_times_s"])) == ("collectives", "ok", 5)
        metrics, factor = result["metrics"], 0.5 if operation == "all_gather" else 1.0
        time_s = metrics["step_time_s"]
        assert time_s["ci95_low"] <= time_s["median"] <= time_s["ci95_high"]
        assert metrics["algorithm_bandwidth"]["median"] == pytest.approx(size_bytes / time_s["median"])
        assert metrics["bus_bandwidth"]["median"] == pytest.approx(factor * size_bytes / time_s["median"])
        assert (result["units"]["bus_bandwidth"], result["better"]["bus_bandwidth"]) == ("bytes/s", "higher")
    (pair,) = found["pairs", 4096]["probe"]["collectives"]
    assert (pair["operation"], pair["pair"], pair["ranks"]) == ("send", [0, 1], 2)


@pytest.mark.slow
def test_a_calibration_reads_the_runs_of_a_sweep(project: Path) -> None:
    done = hpcbench("cluster", "calibrate", "local", "--from", "coll", "--busy", "--out", "c.json", cwd=project)
    assert done.returncode == 0, done.stderr
    messages = json.loads((project / "c.json").read_text())["machine"]["comm"]["messages"]
    sizes = {(one["shape"][0], one["shape"][-1]) for one in messages}
    # A rank passes half of the bytes that it receives to all_gather. The run with variables of its own is left out.
    assert sizes == {("all_reduce", 1024), ("all_reduce", 65536), ("all_gather", 512), ("all_gather", 32768)}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"all_reduce", ', '"all_sum", ', "coll.toml:8: grid.operation"),
        ("steps = 5", 'model = "vgg11"', ":6: model belongs to trainings of hpcbench"),
        ("steps = 5", "options.mesages = 'x'", ":6: no strategy of this sweep has the option 'mesages'"),
        ('workload = "collectives"\n', "", ":7: operation belongs to collectives"),
        ('workload = "collectives"\n', 'workload = "command"\n', "coll.toml:3"),
        ("[grid]", '[grid]\nworkload = ["training"]', "workload"),
    ],
)
def test_a_sweep_that_cannot_be_names_the_place(
    write_sweep: Callable[..., Sweep], old: str, new: str, message: str
) -> None:
    assert old in SWEEP
    with pytest.raises(ConfigErrors) as caught:
        check_names(write_sweep(SWEEP.replace(old, new)))
    assert message in str(caught.value).replace("sweep.toml", "coll.toml"), str(caught.value)


@pytest.mark.slow
def test_the_page_is_followed_from_top_to_bottom(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "collectives.md"
    for block in blocks(page):
        if block.kind == "toml":
            name = str(tomli.loads(block.text)["name"])
            (tmp_path / f"{name}.toml").write_text(block.text)
    commands = [command for block in blocks(page) if block.kind == "console" for command in block.commands()]
    assert len(commands) == 4
    for command in (*commands, "hpcbench run nodes.toml --cluster local --set repeats=3", "hpcbench report nodes"):
        done = hpcbench(*shlex.split(command)[1:], cwd=tmp_path)
        assert done.returncode == 0, command + done.stderr
