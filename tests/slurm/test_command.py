"""A user's own program on several nodes of a real SLURM: its ranks meet, and every end leaves its reason."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.environments import EnvironmentMissing, make_trainer_environment

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Results = Callable[[], list[dict[str, Any]]]

TRAIN = """\
import os, signal, sys, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
what, rank = sys.argv[1], dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    began_s = time.perf_counter()
    optimizer.zero_grad()
    model(torch.ones(8, 16)).pow(2).mean().backward()
    optimizer.step()
    line = f"rank {rank} of {dist.get_world_size()} step {step} elapsed {time.perf_counter() - began_s:.6f}\\n"
    os.write(1, line.encode())
    if step == 2 and rank == dist.get_world_size() - 1 and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 2 and what == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
dist.barrier()
print("training completed")
del model, optimizer
dist.destroy_process_group()
"""
SWEEP = """\
name = "{name}"
[command]
argv = {argv}
launch = "{launch}"
parameters.what = {{ type = "text", default = "well" }}
must_match = ["training completed"]
[[command.metrics]]
name = "step_time"
unit = "s"
better = "lower"
per = "step"
pattern = 'rank 0 .* elapsed ([0-9.]+)'
[fixed]
nodes = 2
tasks_per_node = 2
warmup_steps = 1
parameters.what = "{what}"
time_limit_min = {limit_min}
"""
TORCHRUN = [
    "-m", "torch.distributed.run", "--nnodes={nodes}", "--nproc-per-node={devices_per_node}", "--node-rank={NODE_RANK}",
    "--master-addr={MASTER_ADDR}", "--master-port={MASTER_PORT}",
]  # fmt: skip


def write(tmp_path: Path, name: str, launch: str = "rank", what: str = "well", limit_min: float = 5) -> str:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    argv = [sys.executable, *(TORCHRUN if launch == "node" else []), str(script), "{what}"]
    path = tmp_path / f"{name}.toml"
    path.write_text(
        SWEEP.format(name=name, argv=json.dumps(argv), launch=launch, what=what, limit_min=limit_min), encoding="utf-8"
    )
    return str(path)


@pytest.mark.parametrize("launch", ["rank", "node"])
def test_the_ranks_of_two_nodes_train_together(
    hpcbench: Command, results: Results, tmp_path: Path, launch: str
) -> None:
    done = hpcbench("run", write(tmp_path, "pair", launch), "--cluster", "slurmbox")
    assert done.returncode == 0, done.stderr + done.stdout
    (result,) = results()
    assert (result["status"], len(result["ranks"])) == ("ok", 4 if launch == "rank" else 2)
    assert len({rank["host"] for rank in result["ranks"]}) == 2
    logs = hpcbench("logs", result["run_id"]).stdout
    assert all(f"rank {rank} of 4 step 3" in logs for rank in range(4))
    printed = [float(line.rpartition(" ")[2]) for line in logs.splitlines() if "rank 0 of 4 step" in line]
    assert result["step_times_s"] == printed[1:]


@pytest.mark.parametrize(
    ("what", "limit_min", "status", "message"),
    [("kill", 5, "failed", "ended with signal SIGKILL"), ("hang", 0.5, "timeout", "time limit")],
)
def test_a_program_that_dies_or_hangs_leaves_its_reason(
    hpcbench: Command, results: Results, tmp_path: Path, what: str, limit_min: float, status: str, message: str
) -> None:
    hpcbench("run", write(tmp_path, "bad", what=what, limit_min=limit_min), "--cluster", "slurmbox")
    (result,) = results()
    assert result["status"] == status, result["error"]
    assert message in result["error"]["message"]
    left = subprocess.run(["pgrep", "-f", str(tmp_path / "train.py")], capture_output=True, text=True, check=False)
    assert left.stdout == ""


@pytest.mark.soak  # six runs, each of which imports transformers at 0.4 cores: minutes
@pytest.mark.timeout(1200)
def test_accelerate_trains_on_two_nodes_from_the_sweep_to_the_report(
    hpcbench: Command, results: Results, tmp_path: Path
) -> None:
    """Two parameters of three launches each, with a Llama of transformers; the series are what the program prints."""
    try:
        python = make_trainer_environment("accelerate", ["accelerate==1.15.0", "transformers==5.24.0"])
    except EnvironmentMissing as reason:
        pytest.fail(str(reason))
    changes = [f"parameters.python={python}", "grid.layers=2,4", "nodes=2", "grid.tasks_per_node=1"]
    words = [word for change in changes for word in ("--set", change)]
    done = hpcbench("run", "accelerate", "--cluster", "slurmbox", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    measured = results()
    assert sorted(result["spec"]["parameters"]["layers"] for result in measured) == [2, 2, 2, 4, 4, 4]
    for result in measured:
        assert len({rank["host"] for rank in result["ranks"]}) == 2
        # The first process of each node prints; the log of rank 0 comes first.
        printed = re.findall(r"step \d+: loss [0-9.]+, ([0-9.]+) s", hpcbench("logs", result["run_id"]).stdout)
        assert [round(step_s, 4) for step_s in result["step_times_s"]] == [float(text) for text in printed[3:20]]
    page = tmp_path / "report.html"
    report = hpcbench("report", "accelerate", "--out", str(page))
    assert report.returncode == 0, report.stderr
    assert "parameters.layers" in page.read_text()
    rows = json.loads(hpcbench("table", "accelerate", "--json").stdout)["rows"]
    assert [row["launches"] for row in rows] == [3, 3]
    assert all(row["own_metrics"]["loss"] == pytest.approx(6.9, abs=0.2) for row in rows)
