"""``make test-torch``: what it installs, and how it judges what ran."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.environments import EnvironmentMissing
from tests.torch_versions import __main__ as table
from tests.torch_versions.environment import (
    TorchEnvironment,
    declared_bounds,
    make_torch_environment,
    requirements,
    torchvision_of,
)

LOWEST = f"{declared_bounds()['torch']}.0"
HERE = TorchEnvironment(Path(sys.executable), "2.13.0", is_lowest=False)
KNOWN = table.KNOWN_LIMITS["2.6", "verify fsdp"]


def test_the_lowest_torch_comes_with_the_lowest_version_of_everything() -> None:
    bounds = declared_bounds()
    assert {"click", "polars", "torch", "h5py", "fairscale", "altair"} <= bounds.keys()
    lowest = [f"{name}=={version}" for name, version in bounds.items() if name not in ("torch", "torchvision")]
    assert set(lowest) < set(requirements(LOWEST))
    assert f"torchvision=={bounds['torchvision']}.0" in requirements(LOWEST)


def test_a_later_torch_comes_with_its_torchvision_and_the_newest_of_the_rest() -> None:
    wanted = requirements("2.11.0")
    assert {"torch==2.11.0", "torchvision==0.26.0", "fairscale==0.4.13"} < set(wanted)
    assert f"polars>={declared_bounds()['polars']}" in wanted
    assert torchvision_of("2.14.1") == "0.29.1"


@pytest.mark.parametrize(
    ("version", "python", "message"),
    [
        ("newest", sys.executable, "such as 2.11.0, not 'newest'"),
        ("2.11.0", "/no/python", "PYTHON=/no/python does not"),
    ],
)
def test_what_cannot_be_made_is_named(version: str, python: str, message: str) -> None:
    with pytest.raises(EnvironmentMissing, match=message):
        make_torch_environment(version, python)


@pytest.mark.parametrize(
    ("torch", "told", "answer", "problem"),
    [
        ("2.6.0", f"WorkerError: fully_shard {KNOWN}", f"known limit of torch 2.6.0: {KNOWN}", ""),
        ("2.6.0", "ok", "works", "remove it from KNOWN_LIMITS"),
        ("2.6.0", "AssertionError", "FAILED", "another error than that of KNOWN_LIMITS"),
        ("2.8.0", f"WorkerError: fully_shard {KNOWN}", "FAILED", KNOWN),
        ("2.8.0", "ok", "ok", ""),
    ],
)
def test_a_known_limit_is_no_problem_and_one_that_is_gone_is(torch: str, told: str, answer: str, problem: str) -> None:
    row = table.judged(torch, "verify fsdp", told)
    assert row.answer == answer
    assert problem in row.problem
    assert bool(problem) == bool(row.problem)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("print('done')", ""),
        ("import sys; print('no such sweep', file=sys.stderr); sys.exit(2)", "exit code 2: no such sweep"),
        ("import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()", "ZeroDivisionError"),
        ("import warnings; warnings.warn('old', UserWarning)", "UserWarning: old"),
    ],
)
def test_a_command_must_end_well_without_traceback_or_warning(tmp_path: Path, script: str, problem: str) -> None:
    row = table.command_row(HERE, tmp_path, "part", ["-c", script])
    assert problem in row.problem
    assert row.answer == ("FAILED" if problem else "ok")
