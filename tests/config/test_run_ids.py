"""The run ids of the shipped sweeps: an id that moves makes every result of a user an orphan."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "run_ids"
CLUSTERS = {
    "box": "slurmbox",
    "collectives": "local",
    "ddlbench": "snellius",
    "ddlbench-small": "slurmbox",
    "gpu-check": "snellius",
    "model-parallel": "local",
    "paradl": "abci-v100",
    "paradl-small": "slurmbox",
    "quickstart": "local",
}


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.toml")), ids=lambda path: path.stem)
def test_run_ids_of_a_shipped_sweep_equal_the_committed_ones(path: Path, tmp_path: Path) -> None:
    run_ids = list(make_plan(load_sweep(path), load_cluster(CLUSTERS[path.stem])[0], ClusterTree(tmp_path)).runs)
    digest = hashlib.sha256(" ".join(run_ids).encode()).hexdigest()
    found = {"first": run_ids[:20], "runs": len(run_ids), "sha256": digest}
    golden = GOLDEN / f"{path.stem}.json"
    if os.environ.get("HPCBENCH_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    assert found == json.loads(golden.read_text(encoding="utf-8"))
