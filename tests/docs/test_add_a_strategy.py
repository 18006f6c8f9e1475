"""The page "add a strategy", followed word for word in a copy of the tree: the registry's tests cover the new strategy."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add-a-strategy.md"
STEP = re.compile(r"`([\w/]+\.py)`(?:, at the end(?: of `(\w+)`)?)?:\n\n```(?:python|text)\n(.*?)```", re.DOTALL)
TESTS = re.compile(r"^    \.venv/bin/pytest (.*)$", re.MULTILINE)
FILES = [
    "hpcbench/strategies/late/train.py",
    "hpcbench/strategies/late/entry.py",
    "hpcbench/strategies/catalog.py",
    "hpcbench/strategies/late/cost.py",
]


def follow(folder: Path) -> list[str]:
    """Write every file that the page shows, and extend the existing ones; return their names."""
    names = []
    for name, table, code in STEP.findall(PAGE.read_text(encoding="utf-8")):
        path = folder / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(code, encoding="utf-8")
        elif table:
            before, begin, rest = path.read_text(encoding="utf-8").partition(f"\n{table} = (\n")
            entries, end, after = rest.partition("\n)\n")
            path.write_text(f"{before}{begin}{entries}\n{code.rstrip()}{end}{after}", encoding="utf-8")
        else:
            path.write_text(f"{path.read_text(encoding='utf-8')}\n\n{code}", encoding="utf-8")
        names.append(name)
    return names


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def run_tests(folder: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in ``folder``; ``arguments`` as in a shell."""
    return run(folder, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *shlex.split(arguments))


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with the family of the page."""
    folder = tmp_path_factory.mktemp("followed")
    ignored = shutil.ignore_patterns("__pycache__", ".git", ".venv", "build", "results", ".hypothesis", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    shutil.copytree(ROOT / "hpcbench" / "results", folder / "hpcbench" / "results")
    shutil.copytree(ROOT / "tests" / "results", folder / "tests" / "results")
    (folder / "results").mkdir()
    shutil.copy(ROOT / "results" / "README.md", folder / "results")
    assert follow(folder) == FILES
    # `make reference`: the overview of strategies and the schema of sweeps are generated.
    generated = run(folder, "docs/make_reference.py")
    assert generated.returncode == 0, generated.stderr
    return folder


def test_a_strategy_of_three_files_passes_the_tests_of_the_registry(followed: Path) -> None:
    commands = TESTS.findall(PAGE.read_text(encoding="utf-8"))
    assert len(commands) == 2
    for command in commands:
        completed = run_tests(followed, command)
        assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "......" in completed.stdout, "two models, each trained, recorded and measured"


@pytest.mark.parametrize(
    ("file", "correct", "wrong", "failing"),
    [
        pytest.param(
            FILES[0],
            "dist.all_reduce(parameter.grad, group=self.group)",
            "pass",
            {
                "test_a_strategy_trains_what_its_reference_does",
                "test_a_strategy_passes_what_its_cost_predicts",
                "test_bf16_parameters_train_what_one_device_does",
                "test_bf16_parameters_pass_what_the_cost_predicts",
            },
            id="missing all_reduce",
        ),
        pytest.param(
            FILES[0],
            "dist.all_reduce(parameter.grad, group=self.group)",
            "parameter.copy = parameter.grad.clone(); dist.all_reduce(parameter.grad, group=self.group)",
            {
                "test_a_strategy_holds_the_memory_that_its_cost_predicts",
                "test_bf16_parameters_hold_the_memory_that_the_cost_predicts",
            },
            id="copies of gradients",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_planted_mistake_fails_a_test_of_the_registry(
    followed: Path, file: str, correct: str, wrong: str, failing: set[str]
) -> None:
    path = followed / file
    text = path.read_text(encoding="utf-8")
    assert text.count(correct) == 1
    path.write_text(text.replace(correct, wrong), encoding="utf-8")
    try:
        completed = run_tests(followed, "tests/distributed/test_registry.py -k late_ddp")
    finally:
        path.write_text(text, encoding="utf-8")
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert set(re.findall(r"FAILED \S+::(\w+)\[late_ddp", completed.stdout)) == failing
