"""Real training on this machine, stopped by a person: submitit's job cancels it, and a screen that goes away."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.journal import read_journal
from hpcbench.submit.local_queue import LocalScriptJob
from hpcbench.submit.local_scheduler import queue_process
from hpcbench.submit.submission_record import list_submissions

pytestmark = pytest.mark.slow

ENDLESS = 'name = "endless"\n[fixed]\nmodel = "resnet18"\ndataset = "digits"\nstrategy = "ddp"\nbatch_size = 4\nwarmup_steps = 1\nsteps = 1000000\ntasks_per_node = 2\n[grid]\nseed = [1, 2]\n'

SHORT = 'name = "short"\n[fixed]\nmodel = "resnet18"\ndataset = "digits"\nstrategy = "single"\nbatch_size = 4\nwarmup_steps = 1\nsteps = 2\n[grid]\nseed = [1, 2]\n'


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
    """Whether the ranks of a run have met, and had time for a few steps by what they took to start."""
    met = list(tree.root.glob("runs/*/*/attempts/1/rendezvous.json"))
    if not met:
        return False
    began, joined = (path.stat().st_mtime for path in (met[0].with_name("attempt.json"), met[0]))
    return time.time() - joined > 5 + 2 * (joined - began)


def hpcbench(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hpcbench", *arguments]


NOISY = """#!/bin/bash
printf "\\e[32mActivating /opt/conda/envs/bench ...\\e[0m\\r\\nloading /tmp "
{python} "$@"
code=$?
printf "\\r\\n/tmp\\ndone with {{"
exit $code
"""


def test_a_wrapper_of_the_interpreter_may_print(tree: ClusterTree, tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(SHORT)
    (tmp_path / "noisy").write_text(NOISY.format(python=sys.executable).replace("{{", "{"))
    (tmp_path / "noisy").chmod(0o755)
    profile = (
        f'name = "local"\nextends = "local"\ndefault_environment = "e"\n[environments.e]\npython = "{tmp_path}/noisy"\n'
    )
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "local.toml").write_text(profile)
    done = subprocess.run(
        hpcbench("run", "short.toml", "--cluster", "local"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [result["status"] for result in results(tree)] == ["ok", "ok"]
    report = subprocess.run(
        hpcbench("doctor", "--cluster", "local", "--no-job"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "torch" in report.stdout
    assert "local is ready" in report.stdout


def test_a_path_with_percent_signs_is_no_pattern(
    tree: ClusterTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a%j b%t %A%a 100%%"
    folder.mkdir()
    (folder / "short.toml").write_text(SHORT)
    monkeypatch.setenv("HPCBENCH_RESULTS", str(folder / "results"))
    done = subprocess.run(
        hpcbench("run", "short.toml", "--cluster", "local"), cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("results/local/submissions/*/jobs/*_0_log.out"))) == 2
    (folder / "endless.toml").write_text(ENDLESS)
    subprocess.run(
        hpcbench("submit", "endless.toml", "--cluster", "local"), cwd=folder, check=True, capture_output=True
    )
    there = ClusterTree(folder / "results" / "local")
    wait_for("the first run to train", lambda: training(there))
    status = subprocess.run(
        hpcbench("status", "endless"), cwd=folder, capture_output=True, text=True, check=False
    ).stdout
    assert re.search("waits for run [0-9a-f]{16} of its sweep", " ".join(status.split()))
    stopped = subprocess.run(
        hpcbench("cancel", "endless", "--wait"), cwd=folder, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in stopped.stderr
    assert {"ok", "cancelled"} >= {result["status"] for result in results(there)}


def test_the_reason_of_a_queue_that_broke_down_is_in_its_log(tree: ClusterTree, tmp_path: Path) -> None:
    subprocess.run(
        hpcbench("submit", str(tmp_path / "endless.toml"), "--cluster", "local"), check=True, capture_output=True
    )
    wait_for("the first run to train", lambda: training(tree))
    ((folder, _),) = list_submissions(tree)
    process = queue_process(folder)
    assert process is not None
    for child in [*process.children(recursive=True), process]:
        child.kill()
    (folder / "queue.log").write_text("RuntimeError: the queue broke down\n")
    for log in folder.glob("jobs/*.out"):
        log.unlink()
    wait_for("the end of the queue", lambda: queue_process(folder) is None)

    def shown() -> str:
        words = subprocess.run(
            hpcbench("status", "endless"), capture_output=True, text=True, check=False
        ).stdout.split()
        return " ".join(words)

    assert "the queue broke down" in wait_for("the reason", lambda: text if "lost" in (text := shown()) else "")


def test_submitits_job_cancels_a_run_and_the_queue_goes_on(tree: ClusterTree, tmp_path: Path) -> None:
    subprocess.run(
        hpcbench("submit", str(tmp_path / "endless.toml"), "--cluster", "local"), check=True, capture_output=True
    )
    wait_for("the first run to train", lambda: training(tree))
    ((folder, _),) = list_submissions(tree)
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


def test_ctrl_c_leaves_the_runs_running_and_cancel_stops_them(tree: ClusterTree, tmp_path: Path) -> None:
    command = hpcbench("run", str(tmp_path / "endless.toml"))
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        wait_for("the first run to train", lambda: training(tree))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the runs go on: hpcbench status endless --watch shows them again" in said
    ((folder, _),) = list_submissions(tree)
    assert queue_process(folder) is not None
    assert results(tree) == []
    subprocess.run(hpcbench("cancel", "endless", "--wait"), check=True, capture_output=True)
    assert [result["status"] for result in results(tree)] == ["cancelled"]
    # Whoever has waited can submit at once: nothing is taken to be on its way any more.
    told = subprocess.run(hpcbench("status", "endless", "--json"), capture_output=True, check=False)
    (sweep,) = json.loads(told.stdout)["sweeps"]
    assert sorted(run["state"] for run in sweep["runs"]) == ["cancelled", "planned"]
    wait_for("the queue to end", lambda: queue_process(folder) is None)
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout.split()
    assert [pid for pid in left if int(pid) != os.getpid()] == []


def on_a_terminal(*arguments: str, until: str) -> tuple[int, str]:
    """Call hpcbench on a terminal of its own, hang up once it has shown ``until``; how it ended, and the screen."""
    pid, terminal = pty.fork()
    if pid == 0:
        # Tests that are started with nohup ignore it, and so would what they start.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        os.execv(sys.executable, hpcbench(*arguments))
    shown = b""
    with contextlib.suppress(OSError):
        while until.encode() not in shown and (part := os.read(terminal, 65536)):
            shown += part
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_a_terminal_that_is_closed_takes_no_run_with_it(tree: ClusterTree, tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(SHORT)
    ended, shown = on_a_terminal("run", str(tmp_path / "short.toml"), until=" running")
    assert (ended, "short on local: 2 runs" in shown) == (-signal.SIGHUP, True)
    ((folder, _),) = list_submissions(tree)
    assert queue_process(folder) is not None
    _, shown = on_a_terminal("status", "short", "--watch", until="2 ok")
    assert "2 ok" in shown
    wait_for("the queue to end", lambda: queue_process(folder) is None)
    assert [result["status"] for result in results(tree)] == ["ok", "ok"]
    assert [len(list(run.glob("attempts/*"))) for run in tree.root.glob("runs/*/*")] == [1, 1]
    again = subprocess.run(hpcbench("run", str(tmp_path / "short.toml")), capture_output=True, text=True, check=True)
    assert "2 runs, 0 submitted, 2 done before" in again.stderr
