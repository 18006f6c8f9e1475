"""A volume whose activations one node of the test cluster cannot hold trains when four share it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(900)]

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Results = Callable[[], list[dict[str, Any]]]

VOLUME = """name = "volume"
[fixed]
dataset = "cosmoflow"
model = "cosmoflow"
input_size = 192
batch_size = 1
momentum = 0.0
warmup_steps = 0
steps = 1
profile_steps = 0
[[zip]]
strategy = ["single", "spatial"]
nodes = [1, 4]
"""


def test_a_volume_that_does_not_fit_one_rank_trains_on_four(
    hpcbench: Command, results: Results, tmp_path: Path
) -> None:
    """A node has 3 GiB; of 192^3 voxels one rank would keep 3.0 GiB for the backward pass, four 0.4 GiB each."""
    path = tmp_path / "volume.toml"
    path.write_text(VOLUME)
    done = hpcbench("run", str(path), "--cluster", "slurmbox")
    found = {one["spec"]["strategy"]: one for one in results()}
    assert found["single"]["status"] == "oom", (found["single"], done.stderr)
    assert found["spatial"]["status"] == "ok", (found["spatial"].get("error"), done.stderr)
    assert max(rank["peak_memory_bytes"] for rank in found["spatial"]["ranks"]) < 2 * 2**30
