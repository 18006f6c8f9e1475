"""``python -m benchmarks.gpu_day.rank_pool``: several runs in the same processes, and new processes after one that failed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec, encode_task_file, run_id
from hpcbench.results.attempts import Attempt, attempt_numbers
from hpcbench.results.schema import RunResult
from tests.distributed.launching import environment
from tests.worker.helpers import make_header, make_spec, make_task, tree_of, write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

WAIT_S = 240.0
PAIR: dict[str, Any] = {"strategy": "ddp", "tasks_per_node": 2, "dp_degree": 2}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_day.rank_pool", "--tasks", *map(str, words)]


def run_pool(folder: Path, specs: Sequence[RunSpec], *words: object, **header: Any) -> subprocess.CompletedProcess[str]:
    tasks = write_tasks(folder, *specs, **header)
    return subprocess.run(
        command(tasks, *words), env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def result_of(folder: Path, spec: RunSpec) -> RunResult:
    result = tree_of(folder).read_result(run_id(spec))
    assert result is not None
    return result


def rank_pids(folder: Path, *specs: RunSpec) -> list[list[int]]:
    results = [result_of(folder, spec) for spec in specs]
    return [[rank["pid"] for rank in result.ranks] for result in results]


def test_runs_share_ranks_until_one_fails(tmp_path: Path) -> None:
    one, pair, broken = make_spec(verify=True), make_spec(**PAIR), make_spec(model="tests.absent:model")
    after, last = make_spec(seed=1), make_spec(**PAIR, seed=1)
    done = run_pool(tmp_path, [one, pair, broken, after, last])
    assert done.returncode == 1, done.stderr
    statuses = [line.split()[:2] for line in done.stdout.splitlines()]
    assert statuses == [["1/5", "ok"], ["2/5", "ok"], ["3/5", "failed"], ["4/5", "ok"], ["5/5", "ok"]]
    first, both, failed, renewed, again = rank_pids(tmp_path, one, pair, broken, after, last)
    assert first == failed == both[:1]
    assert renewed == again[:1]
    assert not {*both} & {*again}
    result = result_of(tmp_path, one)
    assert result.verification is not None
    assert result.verification.passed
    assert result.provenance["launcher"] == "pool"
    # The process is older than the run, and its memory is that of all runs so far.
    assert (result.metrics.time_to_first_step_s, result.metrics.peak_memory_bytes) == (None, None)
    assert result.metrics.step_time_s is not None
    assert attempt_numbers(tree_of(tmp_path).run_folder(run_id(one))) == [1]
    log = Attempt(tree_of(tmp_path).run_folder(run_id(broken)), 1).folder / "err.log"
    assert "tests.absent" in log.read_text()


def test_runs_that_share_a_device_have_no_times(tmp_path: Path) -> None:
    alone, pair = make_spec(), make_spec(**PAIR, verify=True)
    assert run_pool(tmp_path, [alone, pair], ranks_per_device=2).returncode == 0
    timed, shared = result_of(tmp_path, alone), result_of(tmp_path, pair)
    assert (timed.untimed, bool(timed.step_times_s)) == (None, True)
    assert shared.untimed == "up to 2 ranks share a device"
    assert (shared.step_times_s, shared.metrics.step_time_s, shared.metrics.samples_per_s) == ([], None, None)
    assert shared.verification is not None
    assert shared.verification.passed
    assert shared.metrics.loss is not None


def test_a_run_that_hangs_ends_at_its_limit_and_the_next_one_runs(tmp_path: Path) -> None:
    hangs = make_spec(model="tests.worker.test_rank_pool:hanging", seed=1)
    specs = [make_spec(), hangs, make_spec(seed=2)]
    tasks = tmp_path / "tasks.jsonl"
    limits_s = [WAIT_S, 5.0, WAIT_S]
    lines = [make_task(spec, limit_s) for spec, limit_s in zip(specs, limits_s, strict=True)]
    tasks.write_bytes(encode_task_file(make_header(tmp_path, model_folder=str(Path.cwd())), lines))
    done = subprocess.run(
        command(tasks), env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["ok", "timeout", "ok"], done.stderr
    assert result_of(tmp_path, hangs).status == "timeout"


def hanging(_in_shape: Sequence[int], _outputs: int) -> Any:
    """A user's model whose construction never ends."""
    import threading

    threading.Event().wait()
