"""Jobs whose modules cannot be loaded, as bash runs their scripts: Lmod, Tcl modules that return 0, no modules at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.paths import shared_folder
from hpcbench.render.job_script import make_job_shape, render_script
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.site.node_probe import parse_probe, render_probe

LMOD = """module() {
  [ "$1" = load ] || { LOADEDMODULES=; return 0; }
  case $2 in absent/*) echo "Lmod has detected the following error" >&2; return 1 ;; esac
  export LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}$2
}
"""
TCL = LMOD.replace("return 1", "return 0")
DEFAULTS = LMOD.replace("$2\n}", "$2/1.0\n}")
"""``module load gcc`` loads its default version."""
NONE = "unset -f module"


def profile_of(modules: list[str], python: Path) -> ClusterProfile:
    return ClusterProfile.model_validate({
        "name": "c", "device": "cpu", "launcher": "torchrun", "scheduler": {"kind": "local"},
        "environments": {"v": {"modules": modules, "python": str(python)}}, "default_environment": "v",
    })  # fmt: skip


def run_script(text: str, folder: Path, startup: str) -> subprocess.CompletedProcess[str]:
    (folder / "startup").write_text(startup)
    environment = {"PATH": os.environ["PATH"], "BASH_ENV": str(folder / "startup")}
    return subprocess.run(["bash", "-s", "0"], input=text, env=environment, text=True, capture_output=True, check=False)


def run_job(folder: Path, modules: list[str], startup: str, has_python: bool = True) -> str:
    """Run the job's script; return the arguments of the worker's ``begin``, which finds nothing to do."""
    python = folder / "python"
    if has_python:
        python.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" > {folder}/arguments\nexit 10\n")
        python.chmod(0o755)
    shape = make_job_shape(profile_of(modules, python), 1, 2)
    engine = TemplateEngine([shared_folder("templates")])
    script = render_script(engine, shape, "s", folder, 0, pack=1, runs=2)
    done = run_script(script, folder, startup)
    assert done.returncode == 0, done.stderr
    return (folder / "arguments").read_text() if has_python else done.stderr


@pytest.mark.parametrize(
    ("startup", "reason"),
    [
        (LMOD, "module load ended with exit code 1"),
        (TCL, "module load returned 0 and loaded nothing"),
        (NONE, 'this shell has no command "module"'),
    ],
)
def test_begin_is_given_the_module_that_is_absent(startup: str, reason: str, tmp_path: Path) -> None:
    arguments = run_job(tmp_path, ["absent/2.6", "absent/3"], startup).splitlines()
    assert arguments[:3] == ["-m", "hpcbench.worker", "begin"]
    sentence = arguments[arguments.index("--missing-module") + 1]
    assert sentence.startswith("module absent/2.6 cannot be loaded on ")
    assert sentence.endswith(f": {reason}")


@pytest.mark.parametrize("startup", [LMOD, TCL, DEFAULTS])
def test_modules_that_load_are_no_complaint(startup: str, tmp_path: Path) -> None:
    arguments = run_job(tmp_path, ["gcc", "torch/2.6", "gcc"], startup).splitlines()
    assert arguments[arguments.index("--missing-module") + 1] == ""


def test_without_an_interpreter_the_shell_leaves_the_record(tmp_path: Path) -> None:
    """The interpreter is the absent module's own."""
    assert "module absent/2.6 cannot be loaded" in run_job(tmp_path, ["absent/2.6"], LMOD, has_python=False)
    record = (tmp_path / "0.0.unsupported").read_text()
    assert record.startswith("module absent/2.6 cannot be loaded on ")
    assert not (tmp_path / "0.1.unsupported").exists(), "the other job's run"


@pytest.mark.parametrize(("modules", "expected"), [(["gcc"], "loaded: gcc"), (["gcc", "absent/1"], "module absent/1")])
def test_the_probe_reports_the_modules(modules: list[str], expected: str, tmp_path: Path) -> None:
    profile = ClusterProfile.model_validate({
        "name": "c", "node": {"scratch_folder": str(tmp_path / "absent")}, "default_environment": "v",
        "environments": {"v": {"modules": modules, "python": "/nonexistent"}},
    })  # fmt: skip
    probe = parse_probe(run_script(render_probe(profile, tmp_path), tmp_path, LMOD).stdout)
    (line,) = probe.sections["modules"]
    assert line.startswith(expected)
    assert probe.sections[f"folder {tmp_path}/absent"] == [f"does not exist: {tmp_path}/absent"]
    assert not (tmp_path / "absent").exists()
