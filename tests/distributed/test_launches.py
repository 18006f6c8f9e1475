"""Whole launches, from the command line to result.json."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec, run_id
from hpcbench.results.attempts import Attempt
from hpcbench.results.schema import RankTraffic, RunResult
from hpcbench.strategies.data.cost import DdpCost
from tests.distributed.launching import HOOKED, Launch, wait_until, worker
from tests.layer_tables import table_of_run
from tests.worker.helpers import make_spec, tree_of, write_tasks

pytestmark = pytest.mark.slow

LONE = make_spec()
PAIR = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2)
PROFILED = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2, profile_steps=1)
ENDLESS = make_spec(steps=1_000_000)
ENDLESS_PAIR = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2, steps=1_000_000)
FROZEN_WAIT_S = 60.0


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started = Launch(tmp_path, forks=True)
    yield started
    started.kill()


@pytest.fixture
def whole_launch(tmp_path: Path) -> Iterator[Launch]:
    """Start interpreters, as a job script does."""
    started = Launch(tmp_path)
    yield started
    started.kill()


def result_of(folder: Path, spec: RunSpec) -> RunResult:
    found = tree_of(folder).read_result(run_id(spec))
    assert found is not None, "no result"
    return found


def attempt_of(folder: Path, spec: RunSpec, number: int = 1) -> Attempt:
    return Attempt(tree_of(folder).run_folder(run_id(spec)), number)


def message_of(result: RunResult) -> str:
    assert result.error is not None
    return result.error.message


def test_a_single_process_writes_a_complete_result(tmp_path: Path, whole_launch: Launch) -> None:
    tasks = write_tasks(tmp_path, LONE)
    assert whole_launch.lone(tasks).wait() == [0], whole_launch.logs()
    result = result_of(tmp_path, LONE)
    assert result.status == "ok"
    assert len(result.step_times_s) == LONE.steps
    assert result.metrics.samples_per_s is not None
    assert result.metrics.samples_per_s == pytest.approx(LONE.steps * 8 / math.fsum(result.step_times_s))
    assert result.metrics.epoch_time_s == pytest.approx(1500 / result.metrics.samples_per_s)
    assert result.metrics.accuracy is not None
    assert result.metrics.loss is not None
    assert result.metrics.loss.first is not None
    assert result.ranks[0]["threads"] == 1
    assert result.provenance["torch"]
    assert result.environment_digest
    again = worker("--tasks", str(tasks), "--index", "0")
    assert (again.returncode, again.stdout) == (0, "")
    assert "nothing to do" in again.stderr
    assert worker("begin", "--tasks", str(tasks), "--index", "0").returncode == 10


def test_begin_ranks_end_as_a_job_script_does_it(tmp_path: Path, launch: Launch) -> None:
    tasks = write_tasks(tmp_path, PROFILED)
    began = worker("begin", "--tasks", str(tasks), "--index", "0")
    folder = Path(began.stdout.rstrip("\n"))
    assert folder == attempt_of(tmp_path, PROFILED).folder
    assert launch.torchrun(2, tasks, attempt=1).wait() == [0], launch.logs()
    before = tree_of(tmp_path).result_path(run_id(PROFILED)).read_bytes()
    ended = worker("end", "--tasks", str(tasks), "--index", "0", "--attempt", "1", "--exit-code", "0", "--received", "")
    assert ended.returncode == 0
    assert tree_of(tmp_path).result_path(run_id(PROFILED)).read_bytes() == before
    result = result_of(tmp_path, PROFILED)
    assert result.status == "ok"
    files = attempt_of(tmp_path, PROFILED).read_ranks()
    assert sorted(files) == [0, 1]
    assert result.step_times_s == [max(pair) for pair in zip(*(files[r].step_times_s for r in (0, 1)), strict=True)]
    interval_s = max(math.fsum(one.step_times_s) for one in files.values())
    assert result.metrics.timed_s == pytest.approx(interval_s)
    assert result.metrics.samples_per_s == pytest.approx(PROFILED.steps * 16 / interval_s)
    assert result.metrics.loss is not None
    assert result.metrics.loss.last == pytest.approx(sum(one.losses[-1] or 0.0 for one in files.values()))
    assert result.metrics.peak_memory_bytes == max(one.peak_memory_bytes or 0 for one in files.values())
    assert [rank["replica"] for rank in result.ranks] == [0, 1]
    assert "step_times_s" not in result.ranks[0]
    assert result.traffic is not None
    assert result.traffic == RankTraffic(rank=0, calls=files[0].traffic)
    table = table_of_run(PROFILED)
    assert result.traffic.calls == DdpCost().traffic(PROFILED, table, 0)


def test_the_runs_own_variables_are_there_when_torch_starts(tmp_path: Path, whole_launch: Launch) -> None:
    spec = make_spec(steps=1, env={"OMP_NUM_THREADS": "2", "MALLOC_ARENA_MAX": "3"})
    tasks = write_tasks(tmp_path, spec)
    assert whole_launch.lone(tasks).wait() == [0], whole_launch.logs()
    result = result_of(tmp_path, spec)
    assert result.ranks[0]["threads"] == 2
    assert result.provenance["env"]["MALLOC_ARENA_MAX"] == "3"


def test_forked_ranks_have_the_runs_own_variables(tmp_path: Path, whole_launch: Launch) -> None:
    spec = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2, steps=1, env={"MALLOC_ARENA_MAX": "3"})
    tasks = write_tasks(tmp_path, spec)
    assert whole_launch.fork(2, tasks).wait() == [0], whole_launch.logs()
    result = result_of(tmp_path, spec)
    assert (result.status, result.provenance["launcher"]) == ("ok", "fork")
    assert result.provenance["env"]["MALLOC_ARENA_MAX"] == "3"


def test_two_launches_of_one_job_do_not_meet(tmp_path: Path, launch: Launch) -> None:
    other = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2, seed=1)
    tasks = write_tasks(tmp_path, PAIR, other)
    for index in (0, 1):
        launch.torchrun(2, tasks, index=index, SLURM_JOB_ID="7", SLURM_ARRAY_JOB_ID="7")
    assert launch.wait() == [0, 0], launch.logs()
    assert result_of(tmp_path, PAIR).status == result_of(tmp_path, other).status == "ok"
    meetings = [json.loads(attempt_of(tmp_path, spec).rendezvous_path.read_bytes()) for spec in (PAIR, other)]
    assert meetings[0]["nonce"] != meetings[1]["nonce"]
    assert meetings[0]["port"] != meetings[1]["port"]


# Told to stop


def stop_at_step_4(launch: Launch, start: Any, number: signal.Signals, ranks: int) -> list[int]:
    """Start, wait until every rank has come to step 4 of its endless run, signal every process, wait."""
    reached = launch.folder / "reached"
    start(program=HOOKED, ACCIDENT="*:4:reach", REACHED=str(reached))
    wait_until(lambda: all(Path(f"{reached}.{rank}").exists() for rank in range(ranks)), "step 4")
    for process in launch.processes:
        process.send_signal(number)
    return launch.wait()


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, "cancelled"), (signal.SIGUSR2, "timeout")],
)
def test_a_signal_ends_a_single_process_with_its_measurements(
    tmp_path: Path, launch: Launch, number: signal.Signals, status: str
) -> None:
    tasks = write_tasks(tmp_path, ENDLESS)
    codes = stop_at_step_4(launch, lambda **more: launch.lone(tasks, **more), number, 1)
    result = result_of(tmp_path, ENDLESS)
    assert codes == [1]
    assert result.status == status
    assert number.name in message_of(result)
    assert len(result.step_times_s) >= 2
    assert result.metrics.step_time_s is not None
    counted = result.step_times_s[result.metrics.warmup_found_steps or 0 :]
    assert result.metrics.samples_per_s == pytest.approx(8 * len(counted) / math.fsum(counted), rel=0.01)


def test_a_signal_after_the_last_timed_step_takes_nothing_away(tmp_path: Path, launch: Launch) -> None:
    """Steps 0 and 1 warm up, 2 and 3 are timed, 4 is profiled, and so would ten thousand more be."""
    spec = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2, steps=2, profile_steps=10_000)
    tasks = write_tasks(tmp_path, spec)
    codes = stop_at_step_4(launch, lambda **more: launch.by_hand(2, tasks, **more), signal.SIGTERM, 2)
    result = result_of(tmp_path, spec)
    assert (codes, result.status) == ([0, 0], "ok"), launch.logs()
    assert len(result.step_times_s) == 2
    assert result.metrics.accuracy is not None
    assert [warning for warning in result.warnings if "10000 profiled steps were made" in warning]


LAUNCHERS = pytest.mark.parametrize("how", ["torchrun", "fork"])


@LAUNCHERS
def test_a_signal_cancels_both_ranks_with_their_measurements(tmp_path: Path, launch: Launch, how: str) -> None:
    tasks = write_tasks(tmp_path, ENDLESS_PAIR)
    stop_at_step_4(launch, partial(getattr(launch, how), 2, tasks), signal.SIGTERM, 2)
    result = result_of(tmp_path, ENDLESS_PAIR)
    assert result.status == "cancelled", launch.logs()
    assert result.metrics.samples_per_s is not None
    assert [rank["status"] for rank in result.ranks] == ["cancelled", "cancelled"]


def test_a_signal_while_the_main_thread_sits_in_a_collective(tmp_path: Path, launch: Launch) -> None:
    """Rank 1 is frozen, so rank 0 waits in an all_reduce that no python handler can interrupt."""
    tasks = write_tasks(tmp_path, ENDLESS_PAIR, wait_s=600.0)
    launch.by_hand(2, tasks, HOOKED, ACCIDENT="1:5:freeze")
    frozen = launch.processes[1].pid
    wait_until(lambda: Path(f"/proc/{frozen}/stat").read_text().rpartition(")")[2].split()[0] == "T", "the freeze")
    launch.processes[0].send_signal(signal.SIGTERM)
    assert launch.processes[0].wait(FROZEN_WAIT_S) == 1
    result = result_of(tmp_path, ENDLESS_PAIR)
    assert result.status == "cancelled"
    assert result.ranks[0]["steps_done"] == 3
    assert result.ranks[1] == {"rank": 1, "left_file": False}


def test_the_time_limit_ends_a_run_by_itself(tmp_path: Path, launch: Launch) -> None:
    """A limit may strike before the first step; the longest leaves a slow machine's ranks time to start, too."""
    for limit_s in (15.0, 30.0, 60.0):
        folder = tmp_path / f"{limit_s:g}"
        folder.mkdir()
        tasks = write_tasks(folder, ENDLESS_PAIR, time_limit_s=limit_s)
        assert set(launch.torchrun(2, tasks, program=HOOKED, ACCIDENT="*:4:idle").wait()) == {1}
        result = result_of(folder, ENDLESS_PAIR)
        assert result.status == "timeout", launch.logs()
        if result.metrics.step_time_s is not None:
            break
    assert result.metrics.step_time_s is not None


# Ranks that die


@pytest.mark.parametrize(("how", "code"), [("torchrun", 1), ("fork", 137)])
def test_rank_1_is_killed(tmp_path: Path, launch: Launch, how: str, code: int) -> None:
    tasks = write_tasks(tmp_path, ENDLESS_PAIR)
    assert getattr(launch, how)(2, tasks, program=HOOKED, ACCIDENT="1:4:kill").wait() == [code]
    result = result_of(tmp_path, ENDLESS_PAIR)
    assert result.status == "failed", launch.logs()
    assert message_of(result).startswith("rank 1 ended without leaving a file")
    assert result.ranks[0]["steps_done"] == 2
    assert len(result.step_times_s) == 2


@LAUNCHERS
def test_end_records_how_rank_0_was_killed(tmp_path: Path, launch: Launch, how: str) -> None:
    tasks = write_tasks(tmp_path, ENDLESS_PAIR)
    worker("begin", "--tasks", str(tasks), "--index", "0")
    code = getattr(launch, how)(2, tasks, program=HOOKED, attempt=1, ACCIDENT="0:4:kill").wait()[0]
    assert code != 0
    assert tree_of(tmp_path).read_result(run_id(ENDLESS_PAIR)) is None
    ended = worker("end", "--tasks", str(tasks), "--index", "0", "--attempt", "1", "--exit-code", str(code))
    assert ended.returncode == 0
    result = result_of(tmp_path, ENDLESS_PAIR)
    assert result.status == "failed"
    assert "rank 0 ended without leaving a file" in message_of(result)
    assert result.ranks[1]["steps_done"] == 2


@pytest.mark.parametrize(
    ("how", "rank", "step"),
    [("torchrun", 1, 4), ("fork", 1, 4), ("by_hand", 1, 4), ("by_hand", 0, -1)],
)
def test_an_exception_of_a_rank_is_the_runs_error(
    tmp_path: Path, launch: Launch, how: str, rank: int, step: int
) -> None:
    tasks = write_tasks(tmp_path, ENDLESS_PAIR)
    codes = getattr(launch, how)(2, tasks, program=HOOKED, ACCIDENT=f"{rank}:{step}:raise").wait()
    assert set(codes) == {1}
    result = result_of(tmp_path, ENDLESS_PAIR)
    assert result.status == "failed"
    assert result.error is not None
    assert result.error.type == "ValueError", launch.logs()
    assert f"rank {rank} on" in result.error.message
    assert f"an accident before step {step}" in result.error.message
    assert "happen" in (result.error.traceback_tail or "")


def test_out_of_memory_on_one_rank_makes_the_run_oom(tmp_path: Path, launch: Launch) -> None:
    tasks = write_tasks(tmp_path, ENDLESS_PAIR)
    launch.by_hand(2, tasks, HOOKED, ACCIDENT="1:3:memory").wait()
    result = result_of(tmp_path, ENDLESS_PAIR)
    assert result.status == "oom"
    assert result.error is not None
    assert result.error.hint is not None
    assert "batch_size" in result.error.hint


# Ranks that do not meet


def test_a_peer_does_not_join_a_foreign_rendezvous(tmp_path: Path, launch: Launch) -> None:
    tasks = write_tasks(tmp_path, PAIR, wait_s=2.0)
    worker("begin", "--tasks", str(tasks), "--index", "0")
    attempt = attempt_of(tmp_path, PAIR)
    attempt.rendezvous_path.write_text('{"address": "127.0.0.1", "port": 1, "nonce": "somebody/1/else"}')
    launch.start([*["-m", "hpcbench.worker"], "--tasks", str(tasks), "--index", "0", "--attempt", "1"],
                 PMI_RANK="1", PMI_SIZE="2")  # fmt: skip
    assert launch.wait() == [1]
    error = attempt.read_ranks()[1].error
    assert error is not None
    assert "belongs to another launch ('somebody/1/else')" in error.message
    assert "waited 2 s" in error.message


def test_a_stale_rendezvous_is_passed_over_until_rank_0_comes(tmp_path: Path, launch: Launch) -> None:
    """The file of an earlier start of this very attempt, with a port at which somebody else may answer by now."""
    tasks = write_tasks(tmp_path, PAIR)
    worker("begin", "--tasks", str(tasks), "--index", "0")
    attempt = attempt_of(tmp_path, PAIR)
    stale = {"address": "127.0.0.1", "port": 1, "nonce": f"{run_id(PAIR)}/1/stale"}
    attempt.rendezvous_path.write_text(json.dumps(stale))
    words = ["-m", "hpcbench.worker", "--tasks", str(tasks), "--index", "0", "--attempt", "1"]
    launch.start(words, PMI_RANK="1", PMI_SIZE="2")
    time.sleep(0.5)
    launch.start(words, PMI_RANK="0", PMI_SIZE="2")
    assert launch.wait() == [0, 0], launch.logs()
    assert result_of(tmp_path, PAIR).status == "ok"


def test_rank_0_names_the_ranks_that_did_not_come(tmp_path: Path, launch: Launch) -> None:
    three = make_spec(strategy="ddp", tasks_per_node=3, dp_degree=3)
    tasks = write_tasks(tmp_path, three, wait_s=2.0)
    assert launch.by_hand(3, tasks, only=range(1)).wait() == [1]
    result = result_of(tmp_path, three)
    assert "ranks 1, 2 of 3" in message_of(result)
    assert str(attempt_of(tmp_path, three).rendezvous_path) in message_of(result)
