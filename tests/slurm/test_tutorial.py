"""The tutorial, followed to the letter on the box; only the box itself is up already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.following import follow
from tests.slurm.box import Box

pytestmark = pytest.mark.slurm


@pytest.mark.soak
def test_the_commands_of_the_tutorial_succeed(box: Box, tmp_path: Path) -> None:
    done = follow(tmp_path, "tutorial.md", lambda step: not step.startswith("make "))
    assert done.returncode == 0, done.stderr
    assert "3 runs, 3 submitted, 0 done before" in done.stderr
    assert "3 runs, 0 submitted, 3 done before" in done.stderr
    assert "long on slurmbox: asked 2 runs to stop" in done.stderr
    paths = (tmp_path / "tutorial" / "results" / "slurmbox" / "runs").glob("*/*/result.json")
    results = [json.loads(path.read_bytes()) for path in paths]
    assert [one["status"] for one in results if one["sweep"] == "first"] == ["ok"] * 3
    assert {one["status"] for one in results if one["sweep"] == "long"} <= {"cancelled"}
