"""``status --watch`` where nobody watches: a block of text a change, and an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hpcbench.cli import status
from hpcbench.results.store import ClusterTree
from hpcbench.submit.plan import Plan
from hpcbench.submit.submit import submit


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan, fake_slurm: Path) -> Path:
    """Four runs that were submitted and are pending."""
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "test.toml").write_text('name = "test"\n')
    submit(plan, ClusterTree(tmp_path / "results" / "test"))
    answer(fake_slurm, "PENDING|Priority")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(fake_slurm: Path, said: str) -> None:
    (fake_slurm / "squeue").write_text("".join(f"4711_{task}|{said}|N/A|\n" for task in range(2)))


def test_one_block_a_change_until_nothing_is_on_its_way(
    project: Path, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Callable[[], None]] = [
        lambda: None,
        lambda: answer(fake_slurm, "RUNNING|None"),
        lambda: None,
        lambda: answer(fake_slurm, "TIMEOUT|None"),
    ]
    clock = SimpleNamespace(time=time.time, sleep=lambda seconds: looks.pop(0)())
    monkeypatch.setattr("hpcbench.cli.status.time", clock)
    done = CliRunner().invoke(status.status, ["small", "--watch"])
    blocks = [line for line in done.output.splitlines() if line.startswith("small on test")]
    assert [line.partition("4 runs: ")[2] for line in blocks] == ["4 pending", "4 running", "4 timeout"]
    assert (looks, done.exit_code) == ([], 1)


def test_ctrl_c_leaves_without_a_traceback(project: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcbench", "status", "--watch"],
        cwd=project, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "small on test: 4 runs: 4 pending\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.split()) == (130, ["interrupted"])


def test_status_imports_nothing_that_only_submit_needs(project: Path) -> None:
    code = "import sys; sys.argv = ['hpcbench', 'status']\nfrom hpcbench.cli.main import entry_point\ntry: entry_point()\nexcept SystemExit: pass\nprint(sorted({'torch', 'submitit', 'polars', 'jinja2', 'pydantic', 'rich', 'psutil'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
