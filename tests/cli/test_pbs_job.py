"""A script for PBS run as PBS would: the job's place in its array and its list of nodes in the environment, mpirun real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import require_mpirun

ROOT = Path(__file__).resolve().parents[2]
PROFILE = """name = "pbs"
launcher = "mpirun"
launcher_args = ["--allow-run-as-root"]
[scheduler]
kind = "pbs"
[partitions.q]
"""
SWEEP = """name = "s"
[fixed]
model = "resnet18"
dataset = "digits"
strategy = "single"
batch_size = 4
warmup_steps = 1
steps = 2
[grid]
seed = [1, 2]
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_second_job_of_an_array_runs_the_second_line(tmp_path: Path) -> None:
    require_mpirun()
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "pbs.toml").write_text(PROFILE)
    (tmp_path / "s.toml").write_text(SWEEP)
    (tmp_path / "nodes").write_text("localhost\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hpcbench", "render", "s.toml", "--cluster", "pbs", "--out", "out"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    job = {**env, "PBS_ARRAY_INDEX": "1", "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "12[1].server"}
    done = subprocess.run(
        ["bash", "out/0.sh"], cwd=tmp_path, env=job, capture_output=True, text=True, check=False, timeout=500
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("results/pbs/runs/*/*/attempts/1/err.log"))
    assert done.returncode == 0, done.stderr + logs
    results = [json.loads(path.read_bytes()) for path in tmp_path.glob("results/pbs/runs/*/*/result.json")]
    lines = (tmp_path / "out" / "0.jsonl").read_text().splitlines()
    assert [result["status"] for result in results] == ["ok"]
    assert results[0]["run_id"] in lines[-1]
