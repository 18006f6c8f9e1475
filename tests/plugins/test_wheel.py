"""A wheel of a third party with a scheduler, a strategy, a model and a data set, made from the pages that describe them.

It is built and installed beside hpcbench, in which no line names it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("add-a-strategy.md", "add-a-scheduler.md", "add-a-model.md")
FILE = re.compile(
    r"A new file `(?:hpcbench/strategies|my_package)/([\w/]+\.py)`[^\n]*:\n\n```python\n(.*?)```", re.DOTALL
)
ENTRY_POINT = re.compile(r"^(\[project\.entry-points\.\S+\])\n(.*)$", re.MULTILINE)
PROJECT = """[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "my-package"
version = "1.0"
[tool.setuptools]
packages = ["my_package", "my_package.late"]
"""
PROFILE = 'name = "fluxbox"\nlauncher = "torchrun"\n[scheduler]\nkind = "flux"\n[node]\ndevices = 2\ncores = 2\n'
SWEEP = """name = "plugged"
[fixed]
model = "perceptron"
dataset = "tiles"
tasks_per_node = 2
batch_size = 4
steps = 2
warmup_steps = 1
time_limit_min = 5
verify = true
[grid]
strategy = ["late_ddp"]
"""
FLUX = """#!/bin/bash
# Runs each job at once; a job that has ended is inactive.
state=$FAKE_FLUX
case $1 in
  batch) id=$(($(ls "$state" | wc -l) + 1))
         (setsid bash "$2" "$3" > "$state/$id" 2>&1; mv "$state/$id" "$state/$id.ended") < /dev/null > /dev/null 2>&1 &
         touch "$state/$id"; echo "$id";;
  jobs)  for job in "$state"/*; do
           case $job in *.ended) echo "$(basename "$job" .ended) INACTIVE";; *) echo "$(basename "$job") RUN";; esac
         done;;
esac
"""


class Site:
    """A user's project, with the wheel installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        source, self._installed = folder / "source", folder / "installed"
        package = source / "my_package"
        (package / "late").mkdir(parents=True)
        project = PROJECT
        for page in PAGES:
            text = (ROOT / "docs" / page).read_text(encoding="utf-8")
            for name, code in FILE.findall(text):
                (package / name).write_text(code, encoding="utf-8")
            points = ["\n".join(point) + "\n" for point in ENTRY_POINT.findall(text)]
            assert points, page
            project += "".join(points)
        for part in (package, package / "late"):
            (part / "__init__.py").touch()
        (source / "pyproject.toml").write_text(project)
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True)
        (wheel,) = folder.glob("*.whl")
        subprocess.run([*pip, "install", "--no-deps", "--target", self._installed, wheel], check=True)
        for name, text in (("clusters/fluxbox.toml", PROFILE), ("sweeps/plugged.toml", SWEEP), ("bin/flux", FLUX)):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        (folder / "bin" / "flux").chmod(0o755)
        (folder / "flux").mkdir()

    def hpcbench(self, *words: str) -> str:
        paths = (str(self._installed), str(ROOT))
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(paths), "HOME": str(self.folder), "OMP_NUM_THREADS": "1",
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "FAKE_FLUX": str(self.folder / "flux"),
        }  # fmt: skip
        command = [sys.executable, "-m", "hpcbench", *words]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def test_runs_of_a_third_party_are_submitted_trained_and_verified(site: Site) -> None:
    site.hpcbench("submit", "plugged", "--cluster", "fluxbox", "--wait")
    (run,) = json.loads(site.hpcbench("table", "plugged", "--json"))["rows"]
    assert run["status"] == "ok", run
    result = json.loads(next((site.folder / "results").glob("fluxbox/runs/**/result.json")).read_text())
    assert (result["verification"]["passed"], result["spec"]["strategy"]) == (True, "late_ddp")


def test_job_scripts_have_the_directives_of_a_third_party(site: Site) -> None:
    rendered = site.hpcbench("render", "plugged", "--cluster", "fluxbox", "--set", "steps=3")
    assert "\n# flux: --nodes=1\n# flux: --exclusive\n" in rendered


def test_runs_of_a_third_party_are_predicted_and_listed(site: Site) -> None:
    (prediction,) = json.loads(site.hpcbench("predict", "plugged", "--cluster", "fluxbox", "--json"))["predictions"]
    assert prediction["predicted"]["step_time_s"] > 0
    assert "perceptron" in site.hpcbench("models", "--dataset", "tiles", "--model", "perceptron")


@pytest.mark.parametrize("name", ["late_ddp", "perceptron", "tiles"])
def test_a_job_without_the_package_is_unsupported_and_names_it(site: Site, name: str) -> None:
    """Jobs do not have the variable by which the login node finds the package."""
    shipped = {"late_ddp": "ddp", "perceptron": "resnet18", "tiles": "digits"}
    sweep = SWEEP.replace('"plugged"', f'"without_{name}"')
    for other in shipped.keys() - {name}:
        sweep = sweep.replace(f'"{other}"', f'"{shipped[other]}"')
    (site.folder / "sweeps" / f"without_{name}.toml").write_text(sweep)
    (site.folder / "clusters" / "bare.toml").write_text(
        PROFILE.replace('"fluxbox"', '"bare"').replace("[scheduler]", f'env.PYTHONPATH = "{ROOT}"\n[scheduler]')
    )
    site.hpcbench("submit", f"without_{name}", "--cluster", "bare", "--wait")
    (run,) = json.loads(site.hpcbench("status", f"without_{name}", "--json"))["sweeps"][0]["runs"]
    assert (run["state"], f"'{name}'" in run["reason"]) == ("unsupported", True), run
