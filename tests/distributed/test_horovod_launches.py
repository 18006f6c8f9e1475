"""Whole runs with Horovod: without horovodrun, with a rank that dies, and where Horovod is not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.conftest import require_horovod
from tests.distributed.launching import HOOKED, ROOT, Launch, environment
from tests.distributed.test_launches import message_of, result_of, stop_at_step_4
from tests.worker.helpers import make_spec, write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.strategy("horovod")]

ENDLESS_PAIR = make_spec(strategy="horovod", tasks_per_node=2, dp_degree=2, steps=1_000_000)

SWEEP = """name = "two"
[fixed]
model = "resnet18"
dataset = "digits"
strategy = "horovod"
batch_size = 8
warmup_steps = 1
steps = 3
[grid]
tasks_per_node = [1, 2]
"""


@pytest.fixture(autouse=True, scope="module")
def _horovod() -> None:
    require_horovod()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started = Launch(tmp_path)
    yield started
    started.kill()


@pytest.fixture
def forked_launch(tmp_path: Path) -> Iterator[Launch]:
    started = Launch(tmp_path, forks=True)
    yield started
    started.kill()


def test_a_horovod_sweep_runs_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "two.toml").write_text(SWEEP)
    env = environment(HPCBENCH_RESULTS=str(tmp_path / "results"))
    command = [sys.executable, "-m", "hpcbench", "run", "two"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    found = [json.loads(path.read_bytes()) for path in (tmp_path / "results").glob("local/runs/*/*/result.json")]
    assert sorted(len(result["ranks"]) for result in found) == [1, 2]
    for result in found:
        assert result["status"] == "ok"
        known = result["provenance"]["horovod"]
        assert known["version"] == metadata.version("horovod")
        assert known["controller"] == "gloo"
        assert "gloo" in known["built_with"]


def test_a_signal_ends_a_horovod_run_with_its_measurements(tmp_path: Path, launch: Launch) -> None:
    tasks = write_tasks(tmp_path, ENDLESS_PAIR)
    stop_at_step_4(launch, lambda **more: launch.torchrun(2, tasks, **more), signal.SIGTERM, 2)
    result = result_of(tmp_path, ENDLESS_PAIR)
    assert result.status == "cancelled", launch.logs()
    assert [rank["status"] for rank in result.ranks] == ["cancelled", "cancelled"]
    assert result.metrics.step_time_s is not None


@pytest.mark.parametrize("what", ["kill", "raise"])
def test_a_dead_rank_is_reported_instead_of_horovods_error(tmp_path: Path, forked_launch: Launch, what: str) -> None:
    tasks = write_tasks(tmp_path, ENDLESS_PAIR)
    codes = forked_launch.by_hand(2, tasks, HOOKED, ACCIDENT=f"1:4:{what}").wait()
    assert codes[0] == 1
    result = result_of(tmp_path, ENDLESS_PAIR)
    assert result.status == "failed"
    expected = {"kill": "rank 1 ended without leaving a file", "raise": "an accident before step 4"}
    assert expected[what] in message_of(result), forked_launch.logs()


@pytest.mark.parametrize("package", ["absent", "without its extension"])
def test_without_horovod_the_run_is_unsupported(tmp_path: Path, launch: Launch, package: str) -> None:
    """Found before the real one: nothing, or a package that imports and prints a warning, as Horovod's own does."""
    (tmp_path / "first" / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "first" / "horovod" / "__init__.py").touch()
    text = "raise ModuleNotFoundError(__name__)" if package == "absent" else "print('Warning! MPI libs are missing')"
    (tmp_path / "first" / "horovod" / "torch" / "__init__.py").write_text(text)
    spec = make_spec(strategy="horovod")
    path = f"{tmp_path / 'first'}{os.pathsep}{ROOT}"
    launch.lone(write_tasks(tmp_path, spec), PYTHONPATH=path).wait()
    result = result_of(tmp_path, spec)
    assert result.status == "unsupported", launch.logs()
    assert "has no Horovod that works with torch" in message_of(result)
    assert result.error is not None
    assert f"{sys.executable} -m hpcbench.tools.build_horovod" in (result.error.hint or "")
