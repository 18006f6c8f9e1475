"""The page "add a cluster", followed to the letter on the box by somebody who has nothing but the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.following import follow
from tests.slurm.box import Box

pytestmark = pytest.mark.slurm


@pytest.mark.soak
def test_the_commands_of_the_page_add_a_cluster_succeed(box: Box, tmp_path: Path) -> None:
    done = follow(tmp_path, "add-a-cluster.md", lambda step: True, SLURM_CONF=str(box.slurm_conf))
    assert done.returncode == 0, done.stderr
    assert "clusters/my-cluster.toml: a cluster profile, valid, and the scheduler agrees" in done.stderr
    paths = list((tmp_path / "my-project" / "results" / "my-cluster" / "runs").glob("*/*/result.json"))
    assert [json.loads(path.read_bytes())["status"] for path in paths] == ["ok"] * 6
