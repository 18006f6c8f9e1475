"""Real training on this machine, stopped by a person: submitit's job cancels it, Ctrl-C stops a whole submission."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcbench.results.store import ClusterTree
from hpcbench.submit.executor import LocalScriptJob
from hpcbench.submit.journal import read_journal
from hpcbench.submit.queue_state import queue_process
from hpcbench.submit.submission_record import submissions_of

pytestmark = pytest.mark.distributed

ENDLESS = 'name = "endless"\n[fixed]\nmodel = "resnet18"\ndataset = "digits"\nstrategy = "ddp"\nbatch_size = 4\nwarmup_steps = 1\nsteps = 1000000\ntasks_per_node = 2\n[grid]\nseed = [1, 2]\n'


def wait_for(what: str, found: Callable[[], Any], limit_s: float = 120.0) -> Any:
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        if value := found():
            return value
        time.sleep(0.2)
    raise AssertionError(f"waited {limit_s:g} s for {what}")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterTree:
    (tmp_path / "endless.toml").write_text(ENDLESS)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HPCBENCH_RESULTS", str(tmp_path / "results"))
    return ClusterTree(tmp_path / "results" / "local")


def results(tree: ClusterTree) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted(tree.root.glob("runs/*/*/result.json"))]


def training(tree: ClusterTree) -> bool:
    """Whether the ranks of a run have met; a few steps later they have something to leave."""
    met = list(tree.root.glob("runs/*/*/attempts/1/rendezvous.json"))
    return bool(met) and time.time() - met[0].stat().st_mtime > 5


def hpcbench(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hpcbench", *arguments]


def test_submitits_job_cancels_a_run_and_the_queue_goes_on(tree: ClusterTree, tmp_path: Path) -> None:
    subprocess.run(
        hpcbench("submit", str(tmp_path / "endless.toml"), "--cluster", "local"), check=True, capture_output=True
    )
    wait_for("the first run to train", lambda: training(tree))
    ((folder, _),) = submissions_of(tree)
    (job_id,) = read_journal(folder).job_ids()
    job = LocalScriptJob(folder=folder / "jobs", job_id=job_id)
    assert job.state == "RUNNING"
    job.cancel()
    (result,) = wait_for("its result", lambda: results(tree))
    assert (result["status"], len(result["ranks"])) == ("cancelled", 2)
    assert len(result["step_times_s"]) >= 1
    wait_for("the second run", lambda: len(read_journal(folder).job_ids()) == 2)
    queue = queue_process(folder)
    assert queue is not None
    queue.terminate()
    wait_for("the queue to end", lambda: queue_process(folder) is None)


def test_ctrl_c_in_run_stops_what_it_started(tree: ClusterTree, tmp_path: Path) -> None:
    command = hpcbench("run", str(tmp_path / "endless.toml"))
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        wait_for("the first run to train", lambda: training(tree))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "run the same command again to go on" in said
    ((folder, _),) = submissions_of(tree)
    assert queue_process(folder) is None
    assert [result["status"] for result in results(tree)] == ["cancelled"]
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout.split()
    assert [pid for pid in left if int(pid) != os.getpid()] == []
