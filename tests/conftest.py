"""Fixtures that all tests share, and the rule that a missing part must not hide behind a skip."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path

import hypothesis
import pytest

from hpcbench.config.sweep_loader import Sweep, load_sweep
from hpcbench.strategies.catalog import STRATEGIES

# A shell lets what it starts in the background ignore SIGINT, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a red test is red for everybody. No deadline: a loaded machine is no bug.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=100)
hypothesis.settings.register_profile("fast", hypothesis.settings.get_profile("repeatable"), max_examples=20)
hypothesis.settings.load_profile("repeatable")

LONG_S = 20.0
"""A test without the marker ``slow`` that takes longer is named in a warning; on a busy machine any may."""

REQUIRED = frozenset(filter(None, os.environ.get("HPCBENCH_REQUIRE", "").split(",")))
"""Parts whose absence is a failure, not a skip."""


SLURM_TESTS = Path(__file__).resolve().parent / "slurm"


def absent(part: str, reason: str) -> None:
    """Skip (a test, or a module while it is imported) because ``part`` is not on this machine.

    Fails where HPCBENCH_REQUIRE names it.
    """
    if part in REQUIRED:
        pytest.fail(f"{part} is required by HPCBENCH_REQUIRE, but {reason}", pytrace=False)
    pytest.skip(f"{part}: {reason}", allow_module_level=True)


def require_horovod() -> None:
    """``absent`` where Horovod does not work with this torch."""
    from hpcbench.errors import WorkerError
    from hpcbench.strategies.horovod.train import load_horovod

    try:
        load_horovod()
    except WorkerError as error:
        absent("horovod", str(error))


def pytest_configure() -> None:
    """Give this process a temporary folder: a user's local queues take turns on a machine by a lock in that folder, and
    tests of another process would wait for this one's. The folders of ``tmp_path`` stay where pytest keeps them."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="t-")
    Path(folder).chmod(0o1777)  # some tests run commands as another user
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # After multiprocessing has removed its own folder in this one, which it does with priority -100.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)


def pytest_collection_finish() -> None:
    """Let no collection of garbage search modules and tests, which stay."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strategy", metavar="KEY", help="only tests of this strategy of the registry")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of other strategies if ``--strategy`` is given; refuse a test that ``make test-slurm`` would not find."""
    for item in items:
        if item.get_closest_marker("slurm") and SLURM_TESTS not in item.path.parents:
            raise pytest.UsageError(f"{item.nodeid} has the marker slurm: move it into tests/slurm, which alone is run")
    key = config.getoption("--strategy")
    if key is None:
        return
    if key not in STRATEGIES:
        raise pytest.UsageError(f"--strategy {key}: the registry has {', '.join(STRATEGIES)}")
    kept = [item for item in items if proves(item, key)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def proves(item: pytest.Item, key: str) -> bool:
    """Whether a parameter of the test, or a marker, names the strategy."""
    marked = any(key in marker.args for marker in item.iter_markers("strategy"))
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return marked or any(_names(value, key) for value in parameters)


def _names(value: object, key: str) -> bool:
    """Whether ``value`` is the key, a run with that strategy or a container of such."""
    if isinstance(value, str):
        return value == key
    if isinstance(value, dict):
        return value.get("strategy") == key
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return any(_names(one, key) for one in value)
    return getattr(getattr(value, "spec", value), "strategy", None) == key


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that took long and are not marked ``slow``."""
    reports = [one for outcome in ("passed", "failed") for one in terminalreporter.stats.get(outcome, [])]
    slow = {"slow", "slurm", "soak", "faults"}
    long = [one for one in reports if one.duration > LONG_S and not slow & set(one.keywords)]
    if long:
        terminalreporter.section("tests that may need the marker slow", yellow=True)
        for one in sorted(long, key=lambda report: -report.duration):
            terminalreporter.line(f"{one.duration:6.1f} s  {one.when:8}  {one.nodeid}")


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
