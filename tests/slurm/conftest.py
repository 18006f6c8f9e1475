"""The SLURM box as a fixture: a real scheduler, started once for all tests that need it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import absent
from tests.slurm.box import Box, BoxError, paths

ROOT = Path(__file__).resolve().parents[2]

# The commands of a box whose SLURM is not the machine's; before the modules of the tests copy the variables.
os.environ["PATH"] = f"{paths.BIN}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    """A healthy box; one that was up before stays up."""
    if sys.platform != "linux" or os.geteuid() != 0:
        absent("slurm", "the box needs root on Linux")
    box = Box()
    was_up = box.is_healthy()
    try:
        if not was_up:
            box.up()
    except BoxError as error:
        absent("slurm", str(error))
    yield box
    if not was_up:
        box.down()


@pytest.fixture
def hpcbench(box: Box, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command on a results tree of its own, in a shell that exports nothing about the scheduler."""

    def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        env["HPCBENCH_RESULTS"] = str(tmp_path / "results")
        command = [sys.executable, "-m", "hpcbench", *arguments]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, **options)

    return call


@pytest.fixture
def slurm(box: Box) -> Callable[..., str]:
    """A command of SLURM, and what it printed."""

    def call(*command: str) -> str:
        env = {**os.environ, "SLURM_CONF": str(box.slurm_conf)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    return call


@pytest.fixture
def results(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Every result in the test's tree."""

    def read() -> list[dict[str, Any]]:
        paths = sorted((tmp_path / "results" / "slurmbox" / "runs").glob("*/*/result.json"))
        return [json.loads(path.read_bytes()) for path in paths]

    return read
