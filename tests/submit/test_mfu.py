"""A profile's peak leads to MFU in the result and the table, through a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcbench.strategies.layer_table import read_shipped_table

pytestmark = pytest.mark.slow

PROFILE = """name = "counted"
launcher = "torchrun"
[scheduler]
kind = "local"
[node]
device_type = "core"
[devices.core]
peak_flops_per_s = { fp32 = "50 GFLOP/s" }
"""
SWEEP = """name = "counted"
[fixed]
dataset = "digits"
strategy = "ddp"
tasks_per_node = 2
batch_size = 4
warmup_steps = 1
steps = 3
profile_steps = 0
[grid]
model = ["resnet18", "vgg11"]
model_options.batch_norm = [false]
"""


def test_a_real_run_reports_mfu_of_its_profile(tmp_path: Path) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "counted.toml").write_text(PROFILE)
    (tmp_path / "counted.toml").write_text(SWEEP)
    command = [sys.executable, "-m", "hpcbench", "run", "counted.toml", "--cluster", "counted"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "MFU" in done.stdout
    results = [json.loads(path.read_bytes()) for path in tmp_path.glob("results/counted/runs/*/*/result.json")]
    by_model = {result["spec"]["model"]: result["metrics"] for result in results}
    resnet = read_shipped_table("resnet18", "digits")
    assert resnet is not None
    assert read_shipped_table("vgg11", "digits", None, {"batch_norm": False}) is None, "measured in the run"
    per_sample = {"resnet18": resnet.flops_per_sample(), "vgg11": 78_034_944}
    for model, metrics in by_model.items():
        assert metrics["flops_per_s"] == pytest.approx(per_sample[model] * metrics["samples_per_s"])
        assert metrics["mfu"] == pytest.approx(metrics["flops_per_s"] / (2 * 50e9))
    assert set(by_model) == set(per_sample)
