"""Completion in shells: names of sweeps, clusters, runs, columns and parameters, as a shell asks for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import hpcbench


def completed(words: str, cwd: Path, results: Path) -> list[str]:
    count = len(words.split(" ")) - 1
    environment = {
        "COMP_WORDS": words, "COMP_CWORD": str(count), "_HPCBENCH_COMPLETE": "bash_complete",
        "HPCBENCH_RESULTS": str(results),
    }  # fmt: skip
    code = "import sys; sys.argv[0] = 'hpcbench'; from hpcbench.cli.main import entry_point; entry_point()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line.startswith("plain,")]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "mine.toml").write_text('name = "mine"\n')
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "scaling.toml").write_text('name = "scaling"\n')
    (tmp_path / "r" / "mine" / "runs" / "ab" / "ab00000000000000").mkdir(parents=True)
    (tmp_path / "r" / "mine" / "sweeps").mkdir()
    (tmp_path / "r" / "mine" / "sweeps" / "scaled-before.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hpcbench stat", ["status"]),
        ("hpcbench cluster sh", ["show"]),
        ("hpcbench plan scal", ["scaled-before", "scaling"]),
        ("hpcbench plan scaling --cluster min", ["mine"]),
        ("hpcbench table --cluster min", ["mine"]),
        ("hpcbench logs ab", ["ab00000000000000"]),
        ("hpcbench table --by strategy,batch", ["strategy,batch_size"]),
        ("hpcbench run scaling --set batch", ["batch_size="]),
        ("hpcbench run scaling --set grid.batch", ["grid.batch_size="]),
        ("hpcbench completion f", ["fish"]),
    ],
)
def test_what_a_shell_is_offered(project: Path, words: str, expected: list[str]) -> None:
    assert completed(words, project, project / "r") == expected


def test_names_of_commands_import_none(project: Path) -> None:
    code = "import sys; sys.argv = ['hpcbench']\nfrom hpcbench.cli.main import entry_point\ntry: entry_point()\nexcept SystemExit: pass\nsys.exit(len({'polars', 'pydantic', 'rich'} & set(sys.modules)))"
    environment = {"COMP_WORDS": "hpcbench st", "COMP_CWORD": "1", "_HPCBENCH_COMPLETE": "bash_complete"}
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, check=False).returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_of_the_shell(shell: str) -> None:
    done = hpcbench("completion", shell)
    assert (done.returncode, "_HPCBENCH_COMPLETE" in done.stdout) == (0, True)
    if shutil.which(shell):
        check = subprocess.run([shell, "-n"], input=done.stdout, text=True, capture_output=True, check=False)
        assert (check.returncode, check.stderr) == (0, "")
