"""Disturbances of real runs that end well: the result reports them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcbench.config.run_spec import RunSpec, run_id
from hpcbench.results.schema import RunResult
from tests.distributed.launching import ROOT, Launch
from tests.worker.helpers import make_spec, tree_of, write_tasks

pytestmark = pytest.mark.slow

SLOW = [str(ROOT / "tests" / "distributed" / "slow.py")]
BUSY = "import sys\nprint(flush=True)\nwhile True: pass"


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


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Restrict processes that start within to this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def result_of(folder: Path, spec: RunSpec, launch: Launch) -> RunResult:
    found = tree_of(folder).read_result(run_id(spec))
    assert found is not None, launch.logs()
    assert found.status == "ok", launch.logs()
    return found


def warning(result: RunResult, kind: str) -> str:
    found = [text for text in result.warnings if text.startswith(kind)]
    assert len(found) == 1, result.warnings
    return found[0]


def test_a_rank_that_sleeps_is_named(tmp_path: Path, forked_launch: Launch) -> None:
    spec = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2, batch_size=4, steps=4, profile_steps=2)
    forked_launch.by_hand(2, write_tasks(tmp_path, spec), SLOW, SLOW="1:0.5").wait()
    result = result_of(tmp_path, spec, forked_launch)
    text = warning(result, "a slow rank")
    assert text.startswith(f"a slow rank: rank 1 on {result.ranks[1]['host']} takes ")
    assert "rank 0" not in text


def test_a_busy_core_and_too_few_cores_give_warnings(tmp_path: Path, launch: Launch) -> None:
    spec = make_spec(steps=12)
    tasks = write_tasks(tmp_path, spec, cores_per_task=2)
    core = min(os.sched_getaffinity(0))
    with on_core(core):
        busy = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            launch.lone(tasks).wait()
        finally:
            busy.kill()
            busy.communicate()
    result = result_of(tmp_path, spec, launch)
    assert result.ranks[0]["cpu_mask"] == [core]
    text = warning(result, "other processes used the cores during the timed steps")
    share = int(text.partition(": ")[2].partition("%")[0])
    # Half of the core is the other's, by the scheduler's fairness, and less than that for the rank where more compete.
    assert 25 <= share <= 99
    assert "a rank may use 1 of the 2 cores per task that the profile promises" in result.warnings


def test_a_partial_batch_and_a_diverging_loss_give_warnings(tmp_path: Path, forked_launch: Launch) -> None:
    """An epoch of digits is 1500 samples: two batches of 749 and one of 2."""
    spec = make_spec(model="vgg11", batch_size=749, warmup_steps=0, steps=3, learning_rate=1e30)
    forked_launch.lone(write_tasks(tmp_path, spec)).wait()
    result = result_of(tmp_path, spec, forked_launch)
    assert (
        warning(result, "the last batch of an epoch")
        == "the last batch of an epoch holds 2 of 749 samples; counted as 2"
    )
    assert warning(result, "the loss diverged") == "the loss diverged: it is not finite from step 1 on (0 is the first)"
    assert result.metrics.loss is not None
    assert (result.metrics.loss.first is not None, result.metrics.loss.last) == (True, None)
