"""Projects on the box, and what must hold after every fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.box import Box, paths
from tests.slurm.faults.project import Project
from tests.slurm.faults.truth import find_truth

Verify = Callable[[Project, str], None]
Scenario = Callable[[Path, Box], Any]


@pytest.fixture
def project(box: Box, tmp_path: Path) -> Project:
    """A project on the box, with a tree of its own."""
    return Project(tmp_path / "project", box)


@pytest.fixture(scope="session")
def started(
    request: pytest.FixtureRequest, box: Box, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Scenario, Future[Any]]]:
    """Start the scenarios of all selected tests at once: each waits for the scheduler most of the time.

    Only what breaks nothing but its own runs may be among them.
    """
    params = [getattr(getattr(item, "callspec", None), "params", {}) for item in request.session.items]
    wanted = list(dict.fromkeys(one["scenario"] for one in params if "scenario" in one))
    with ThreadPoolExecutor(max(len(wanted), 1)) as pool:
        yield {one: pool.submit(one, tmp_path_factory.mktemp(one.__name__), box) for one in wanted}


@pytest.fixture
def scenario(request: pytest.FixtureRequest, started: dict[Scenario, Future[Any]]) -> Any:
    """Return the result of the function that is the test's parameter."""
    return started[request.param].result()


@pytest.fixture
def alone(started: dict[Scenario, Future[Any]]) -> None:
    """Wait until all scenarios have ended, for tests that disturb others."""
    wait(started.values())


@pytest.fixture
def verify(box: Box) -> Verify:
    """Look at what a fault left, and fail where a run is lost, doubled or not ok."""

    def look(project: Project, sweep: str) -> None:
        truth = find_truth(project, sweep)
        assert truth.lost == []
        assert truth.doubled == []
        assert truth.ok == truth.runs, project.status(sweep)

    return look


@pytest.fixture
def small_arrays(request: pytest.FixtureRequest, box: Box, alone: None) -> Iterator[None]:
    """The scheduler takes arrays of at most as many jobs as the test's parameter says; it is started anew for that."""
    text = paths.SLURM_CONF.read_text()
    options = box.options
    assert options is not None

    def restart(conf: str) -> None:
        box.stop_daemon("slurmctld")
        paths.SLURM_CONF.write_text(conf)
        box.start_daemon("slurmctld")

    restart(text.replace(f"MaxArraySize={options.max_array_size}", f"MaxArraySize={request.param}"))
    yield
    restart(text)
