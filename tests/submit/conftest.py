"""A project of its own for every test, and commands of SLURM that do as they are told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.sweep_loader import Sweep
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import SweepPlan, make_plan

FAKES = Path(__file__).resolve().parents[1] / "fakes" / "bin"

SWEEP = """name = "small"
[fixed]
model = "resnet18"
dataset = "digits"
strategy = "ddp"
[grid]
batch_size = [8, 16]
nodes = [1, 2]
"""


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder through which a test steers the fake commands and sees how they were called."""
    state = tmp_path / "fake"
    state.mkdir()
    monkeypatch.setenv("PATH", f"{FAKES}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_STATE", str(state))
    return state


@pytest.fixture
def slurm_profile() -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "test", "scheduler": {"kind": "slurm"}})


@pytest.fixture
def cluster_tree(tmp_path: Path) -> ClusterTree:
    return ClusterTree(tmp_path / "results" / "test")


@pytest.fixture
def plan(write_sweep: Callable[[str], Sweep], slurm_profile: ClusterProfile, cluster_tree: ClusterTree) -> SweepPlan:
    """Four runs of two shapes."""
    return make_plan(write_sweep(SWEEP), slurm_profile, cluster_tree)
