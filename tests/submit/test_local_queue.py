"""The queue of a machine without a scheduler, with scripts that say when they ran instead of training."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.submit.journal import drop_runs, read_journal
from hpcbench.submit.local_queue import LocalScriptExecutor, LocalScriptJob
from hpcbench.submit.local_scheduler import LocalScheduler, queue_process, start_local_queue
from hpcbench.submit.machine_lock import machine_holder, take_machine
from hpcbench.submit.submission_record import JobArray, Submission, read_submission, runs_of_submission
from hpcbench.submit.submit import RenderedSubmission, write_submission

NOTE = """
note() { printf '%s %s %s\\n' "$1" "$2" "$(date +%s.%N)" >> notes; }
note begin "$1"
trap 'note told "$1"; kill "$child"' TERM
sleep "$2" & child=$!
wait "$child"
note end "$1"
"""


def wait_for(what: str, found: Callable[[], Any], limit_s: float = 60.0) -> Any:
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {limit_s:g} s for {what}")


def submission(folder: Path, runs: int, seconds: float, time_limit_s: float = 60.0) -> Path:
    array = JobArray(
        number=0,
        run_ids=[f"{index:016x}" for index in range(runs)],
        ranks=1,
        nodes=1,
        job_limit_s=time_limit_s,
    )
    script = NOTE.replace('sleep "$2"', f"sleep {seconds}").encode()
    rendered = RenderedSubmission(
        Submission(
            submission=folder.name,
            token="t",
            sweep="s",
            cluster="local",
            scheduler="local",
            created_unix_s=time.time(),
            arrays=[array],
        ),
        {"0.sh": script},
    )
    write_submission(rendered, folder)
    return folder


def notes(folder: Path) -> list[tuple[str, int, float]]:
    try:
        lines = (folder / "notes").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(word, int(index), float(at)) for word, index, at in (line.split() for line in lines)]


def ended(folder: Path) -> int:
    return sum(word == "end" for word, _, _ in notes(folder))


def has_ended(folder: Path, runs: int) -> bool:
    return ended(folder) == runs


def most_at_once(events: list[tuple[str, int, float]]) -> int:
    running = most = 0
    for word, _, _ in sorted(events, key=lambda event: event[2]):
        running += {"begin": 1, "end": -1}.get(word, 0)
        most = max(most, running)
    return most


@pytest.fixture
def cores_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Locks of this test's own: other queues on this machine must not hold it up."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "tmp"


def start(folder: Path) -> None:
    start_local_queue(folder, dict(os.environ), warning_s=1.0)


@pytest.mark.usefixtures("cores_folder")
def test_runs_are_run_one_by_one(tmp_path: Path) -> None:
    folder = submission(tmp_path / "s-0001", runs=3, seconds=0.2)
    start(folder)
    wait_for("all runs to end", lambda: sum(word == "end" for word, _, _ in notes(folder)) == 3)
    wait_for("the queue to end", lambda: queue_process(folder) is None)
    assert [index for word, index, _ in notes(folder) if word == "begin"] == [0, 1, 2]
    assert most_at_once(notes(folder)) == 1
    assert len(set(read_journal(folder).job_ids())) == 3


@pytest.mark.usefixtures("cores_folder")
def test_two_submissions_share_the_machine(tmp_path: Path) -> None:
    folders = [submission(tmp_path / f"s-000{number}", runs=2, seconds=0.3) for number in (1, 2)]
    for folder in folders:
        start(folder)
    for folder in folders:
        wait_for("all runs to end", functools.partial(has_ended, folder, 2))
    events = sorted((event for folder in folders for event in notes(folder)), key=lambda event: event[2])
    assert most_at_once(events) == 1
    assert [index for word, index, _ in events if word == "begin"] == [0, 0, 1, 1], "they take turns"


@pytest.mark.usefixtures("cores_folder")
def test_sigterm_to_the_queue_stops_its_runs_and_starts_no_more(tmp_path: Path) -> None:
    folder = submission(tmp_path / "s-0001", runs=50, seconds=30)
    start(folder)
    wait_for("the first to begin", lambda: notes(folder))
    process = queue_process(folder)
    assert process is not None
    process.send_signal(signal.SIGTERM)
    wait_for("the queue to end", lambda: queue_process(folder) is None)
    assert [word for word, _, _ in notes(folder)] == ["begin", "told", "end"]


@pytest.mark.usefixtures("cores_folder")
def test_the_time_limit_ends_a_run_and_the_next_one_begins(tmp_path: Path) -> None:
    folder = submission(tmp_path / "s-0001", runs=2, seconds=30, time_limit_s=3)
    start(folder)
    wait_for("both to be stopped", lambda: queue_process(folder) is None)
    assert [index for word, index, _ in notes(folder) if word == "begin"] == [0, 1]
    assert not [word for word, _, _ in notes(folder) if word == "end"]


@pytest.mark.usefixtures("cores_folder")
def test_the_machine_is_free_again_when_its_holder_dies(tmp_path: Path) -> None:
    code = (
        "from hpcbench.submit.machine_lock import take_machine; import time\n"
        f"held = take_machine({str(tmp_path)!r}, 'r-1')\nprint(held.closed, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n"
        assert take_machine(tmp_path, "r-2") is None
        holder = machine_holder()
        assert holder is not None
        assert (holder.process.pid, holder.folder, holder.run_id) == (process.pid, str(tmp_path), "r-1")
        process.kill()
    wait_for("the machine", lambda: machine_holder() is None, 10)
    machine = take_machine(tmp_path, "r-2")
    assert machine is not None
    with machine:
        assert getattr(machine_holder(), "run_id", None) == "r-2"


@pytest.mark.usefixtures("cores_folder")
def test_a_pending_run_names_the_run_that_it_waits_for(tmp_path: Path) -> None:
    first, second = (submission(tmp_path / f"s-000{number}", runs=2, seconds=60) for number in (1, 2))
    for folder in (first, second):
        start(folder)
        wait_for("the first run to begin", lambda: notes(first))
    record = read_submission(first)
    assert record is not None
    holder = record.arrays[0].run_ids[0]
    try:
        assert pending_reasons(first) == [f"waits for run {holder} of its sweep"]
        theirs = pending_reasons(second)
        assert theirs[0].startswith(f"waits for run {holder} of {first} (process ")
        assert len(theirs) == 2
    finally:
        for folder in (first, second):
            process = queue_process(folder)
            assert process is not None
            process.terminate()
    wait_for("the queues to end", lambda: queue_process(first) is None and queue_process(second) is None)


def pending_reasons(folder: Path) -> list[str]:
    record = read_submission(folder)
    assert record is not None
    runs = dict(runs_of_submission(folder, record, record.arrays[0].run_ids))
    states = LocalScheduler(ClusterProfile.model_validate({"name": "x", "scheduler": {"kind": "local"}})).state(runs)
    return [status.reason for status in states.values() if status.state == "pending"]


def test_a_local_submitit_job_reports_its_state_and_cancels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that started it and any other can do so."""
    script = tmp_path / "0.sh"
    script.write_text('trap \'echo told > told; kill "$child"\' TERM\nsleep 60 & child=$!\nwait "$child"\n')
    monkeypatch.chdir(tmp_path)
    job = LocalScriptExecutor(tmp_path / "jobs").submit_script(script, 0, time_limit_s=60, warning_s=5)
    assert job.state == "RUNNING"
    other = LocalScriptJob(folder=tmp_path / "jobs", job_id=job.job_id)
    assert other.state == "RUNNING"
    wait_for(
        "the script to begin",
        lambda: [
            child for child in psutil.Process(int(job.job_id)).children(recursive=True) if child.name() == "sleep"
        ],
    )
    other.cancel()
    wait_for("the script to end", job.done)
    assert (tmp_path / "told").read_text() == "told\n"
    assert job.state == "FINISHED"
    assert other.state == "UNKNOWN"


@pytest.mark.usefixtures("cores_folder")
def test_dropped_runs_do_not_begin(tmp_path: Path) -> None:
    folder = submission(tmp_path / "s-0001", runs=4, seconds=1)
    drop_runs(folder, [f"{1:016x}"])
    drop_runs(folder, [f"{3:016x}"])
    start(folder)
    wait_for("the queue to end", lambda: queue_process(folder) is None and notes(folder))
    assert [index for word, index, _ in notes(folder) if word == "begin"] == [0, 2]
    assert [chunk.first for chunk in read_journal(folder).of(0)] == [0, 2]


@pytest.mark.parametrize("visible", [None, "", "1,3"])
def test_a_run_sees_the_devices_that_its_submitter_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    script = tmp_path / "0.sh"
    script.write_text(f"printf '%s' \"${{CUDA_VISIBLE_DEVICES-all}}\" > {tmp_path}/seen\n")
    job = LocalScriptExecutor(tmp_path / "jobs").submit_script(script, 0, time_limit_s=60, warning_s=5)
    wait_for("the script to end", job.done)
    assert (tmp_path / "seen").read_text() == ("all" if visible is None else visible)
