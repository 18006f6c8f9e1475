"""The launcher of one machine: real processes, with programs that end as ranks do."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import os, signal, sys, time
from hpcbench.worker import fork_ranks
from hpcbench.worker.shutdown import exit_now

def program(info):
    signal.signal(signal.SIGTERM, lambda *_: exit_now(40 + info.rank))
    places = info.rank, info.local_rank, info.world_size, info.local_world_size, info.node_rank
    os.write(1, f"{{places}} {{info.launcher}}\\n".encode())
    {body}
    return 0

fork_ranks._FOLLOW_S = 0.5
sys.exit(fork_ranks.fork_and_wait(3, program))
"""


def start(body: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", PROGRAM.format(body=body)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_every_rank_has_its_place() -> None:
    launcher = start("")
    out, _ = launcher.communicate()
    assert launcher.returncode == 0
    assert sorted(out.splitlines()) == [f"({rank}, {rank}, 3, 3, 0) fork" for rank in range(3)]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return 7 if info.rank == 1 else 0", 7),
        ("os.kill(os.getpid(), signal.SIGKILL) if info.rank == 2 else None", 137),
        # The others do not follow, and are killed.
        ("return 5 if info.rank == 0 else time.sleep(600)", 5),
        ("exit_now(6 if info.rank == 0 else 0)", 6),
        ("raise ValueError if info.rank == 1 else SystemExit(0)", 1),
    ],
)
def test_the_exit_code_is_that_of_the_first_rank_that_failed(body: str, code: int) -> None:
    launcher = start(body)
    launcher.communicate()
    assert launcher.returncode == code


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks, each of which has printed its line."""
    assert launcher.stdout is not None
    for _ in range(3):
        launcher.stdout.readline()
    found: list[psutil.Process] = psutil.Process(launcher.pid).children()
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ranks_receive_term_whatever_the_launcher_receives(number: signal.Signals) -> None:
    launcher = start("time.sleep(600)")
    ranks = ranks_of(launcher)
    launcher.send_signal(number)
    launcher.communicate()
    assert launcher.returncode in (40, 41, 42)
    assert not any(rank.is_running() for rank in ranks)


def test_no_rank_outlives_its_launcher() -> None:
    launcher = start("time.sleep(600)")
    ranks = ranks_of(launcher)
    assert len(ranks) == 3
    launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
