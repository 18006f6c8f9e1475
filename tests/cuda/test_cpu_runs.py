"""A run whose profile has the device cpu, on a machine with GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpcbench.config.run_spec import run_id
from tests.distributed.launching import environment
from tests.worker.helpers import make_spec, tree_of, write_tasks


@pytest.mark.parametrize("strategy", ["single", "fairscale_fsdp", "fsdp"])
def test_it_trains_on_the_cpu_and_records_no_gpu(tmp_path: Path, strategy: str) -> None:
    assert torch.cuda.is_available(), "the stub shows GPUs"
    spec = make_spec(strategy=strategy, dataset="digits", steps=2, warmup_steps=1)
    done = subprocess.run(
        [sys.executable, "-m", "hpcbench.worker", "--tasks", str(write_tasks(tmp_path, spec)), "--index", "0"],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    result = tree_of(tmp_path).read_result(run_id(spec))
    assert done.returncode == 0, done.stderr
    assert result is not None
    assert result.status == "ok"
    assert result.provenance["device"] == "cpu"
    assert "gpus" not in result.provenance
    assert [warning for warning in result.warnings if "GPU" in warning] == []
