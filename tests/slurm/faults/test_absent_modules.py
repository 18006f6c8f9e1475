"""Modules that cannot be loaded: nothing is measured with the shell's own software."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.box import Box
from tests.slurm.faults.project import CLUSTER, Project

pytestmark = [pytest.mark.slurm, pytest.mark.faults, pytest.mark.timeout(900)]

ENVIRONMENTS = """
[environments.venv]
modules = ["PyTorch/2.6"]

[environments.own]
modules = ["Python/3.11"]
python = "/nonexistent/python3"
"""


def absent_modules(folder: Path, box: Box) -> Project:
    project = Project(folder / "project", box)
    profile = project.folder / "clusters" / f"{CLUSTER}.toml"
    profile.write_text(profile.read_text() + ENVIRONMENTS)
    project.add_sweep("modules", '[grid]\nenvironment = ["venv", "own"]\n')
    project.finish("modules")
    return project


@pytest.mark.parametrize("scenario", [absent_modules], indirect=True)
def test_a_module_that_is_absent_is_named_and_nothing_is_measured(scenario: Project) -> None:
    """One whose interpreter works, which writes the result, and one whose interpreter is the module's own."""
    runs = {run["spec"]["environment"]: run for run in scenario.status("modules")}
    assert {name: run["state"] for name, run in runs.items()} == dict.fromkeys(runs, "unsupported")
    for name, module in (("venv", "PyTorch/2.6"), ("own", "Python/3.11")):
        assert runs[name]["reason"].startswith(f"module {module} cannot be loaded on ")
    (result,) = [each for each in scenario.results("modules") if each["spec"]["environment"] == "venv"]
    assert (result["status"], result["error"]["type"]) == ("unsupported", "MissingModule")
