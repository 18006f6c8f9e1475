"""Fixtures that all tests share, and the rule that a missing part must not hide behind a skip."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from hpcbench.config.sweep_loader import Sweep, load_sweep

# A shell lets what it starts in the background ignore SIGINT, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a red test is red for everybody. No deadline: a loaded machine is no bug.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=100)
hypothesis.settings.load_profile("repeatable")

REQUIRED = frozenset(filter(None, os.environ.get("HPCBENCH_REQUIRE", "").split(",")))
"""Parts whose absence is a failure, not a skip."""


def absent(part: str, reason: str) -> None:
    """Skip because ``part`` is not on this machine; fail where HPCBENCH_REQUIRE names it."""
    if part in REQUIRED:
        pytest.fail(f"{part} is required by HPCBENCH_REQUIRE, but {reason}", pytrace=False)
    pytest.skip(f"{part}: {reason}")


def require_horovod() -> None:
    """``absent`` where Horovod does not work with this torch."""
    from hpcbench.errors import WorkerError
    from hpcbench.worker.distributed.horovod_init import load_horovod

    try:
        load_horovod()
    except WorkerError as error:
        absent("horovod", str(error))


@pytest.fixture(autouse=True)
def _own_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test reads the user's profiles and calibrations, or the shell's results tree."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg-data"))
    monkeypatch.delenv("HPCBENCH_RESULTS", raising=False)


@pytest.fixture
def write_sweep(tmp_path: Path) -> Callable[[str], Sweep]:
    """Write TOML and load it as a sweep."""

    def write(text: str) -> Sweep:
        path = tmp_path / "sweep.toml"
        path.write_text(text, encoding="utf-8")
        return load_sweep(path)

    return write
