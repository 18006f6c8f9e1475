"""The page "add a strategy", followed word for word in a copy of the tree: what it adds trains what one device would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add-a-strategy.md"
STEP = re.compile(r"`([\w/]+\.py)`(?:, at the end(?: of `(\w+)`)?)?:\n\n```python\n(.*?)```", re.DOTALL)


def follow(folder: Path) -> list[str]:
    """Write every file that the page shows, and put into others what it adds to them; the names of all."""
    done = []
    for name, table, code in STEP.findall(PAGE.read_text(encoding="utf-8")):
        path = folder / name
        if not path.exists():
            path.write_text(code, encoding="utf-8")
        elif table:
            before, begin, rest = path.read_text(encoding="utf-8").partition(f"\n{table} = {{\n")
            entries, end, after = rest.partition("\n}\n")
            path.write_text(f"{before}{begin}{entries}\n{code.rstrip()}{end}{after}", encoding="utf-8")
        else:
            path.write_text(path.read_text(encoding="utf-8") + code, encoding="utf-8")
        done.append(name)
    return done


def run_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/distributed/test_late_ddp.py"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def followed(tmp_path: Path) -> Path:
    """A copy of the tree with what the page adds."""
    for name in ("hpcbench", "tests", "templates", "clusters", "sweeps"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert follow(tmp_path) == [
        "hpcbench/worker/strategies/late_ddp.py",
        "hpcbench/parallel/strategies/data.py",
        "hpcbench/oracle/strategies/data.py",
        "tests/distributed/test_late_ddp.py",
    ]
    return tmp_path


def test_the_page_adds_a_strategy_that_trains_what_one_device_would(followed: Path) -> None:
    done = run_tests(followed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "...." in done.stdout


@pytest.mark.soak
def test_the_test_of_the_page_sees_a_mistake(followed: Path) -> None:
    runtime = followed / "hpcbench" / "worker" / "strategies" / "late_ddp.py"
    text = runtime.read_text()
    runtime.write_text(text.replace("dist.all_reduce(parameter.grad, group=self.group)", "pass"))
    spoiled = run_tests(followed)
    assert spoiled.returncode == 1
    assert spoiled.stdout.count("FAILED") == 4
