"""``fork``: the ranks of one machine, forked from one process that has imported torch.

A launcher that starts an interpreter for each rank imports torch once more than there are ranks. One import for all
saves two fifths of the processor time of a short run::

    launcher   imports torch | forks | passes SIGTERM on, waits for all ranks
    rank 0                   | measures, writes the result
    rank 1                   | measures
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hpcbench.config.run_spec import read_task
from hpcbench.identity import end_with_parent
from hpcbench.worker.distributed.rank_environment import RankInfo, apply_run_environment, hide_gpus
from hpcbench.worker.shutdown import exit_now

_FOLLOW_S = 30.0
"""Time that the other ranks have to end once one has failed, as torchrun gives them."""
_POLL_S = 0.05
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def fork_ranks(tasks: Path, index: int, count: int, rank_main: Callable[[RankInfo], int]) -> int:
    """Run ``rank_main`` in ``count`` forked processes.

    Args:
        tasks: The task file.
        index: Number of the run in it. Its variables are set before torch is imported.
        count: How many ranks there are, all of them here.
        rank_main: The program of a rank; its result is the process's exit code.

    Returns:
        0 if all ranks return 0, else the exit code of the first that failed; 128 + N for signal N.
    """
    header, task = read_task(tasks, index)
    apply_run_environment(task.spec.env, task.run_id)
    if header.device == "cpu":
        hide_gpus()
    # A rank imports the same again, and names a missing package.
    with suppress(ImportError):
        is_command = task.spec.workload == "command"
        importlib.import_module("hpcbench.worker.command.run_command" if is_command else "hpcbench.worker.measured_run")
        if header.device == "cpu" and task.spec.workload == "training":
            # Optimizers import it with their first step. On GPUs it may ask the driver for devices, and no process can
            # use them after a fork.
            importlib.import_module("torch._dynamo")
    gc.freeze()
    return fork_and_wait(count, rank_main)


def fork_and_wait(count: int, rank_main: Callable[[RankInfo], int]) -> int:
    """``fork_ranks`` without its imports."""
    launcher = os.getpid()
    launch = f"fork.{socket.gethostname()}.{launcher}"
    running: set[int] = set()

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        for process in running:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    # A signal waits until all ranks are known, and no rank has this process's handler when it comes.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    for rank in range(count):
        process = os.fork()
        if process == 0:
            end_with_parent()
            if os.getppid() != launcher:
                exit_now(1)  # it had ended before this process could ask to end with it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
            exit_now(rank_main(RankInfo(rank, rank, count, count, 0, "fork", launch)))
        running.add(process)
    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    return _wait_for_all(running)


def _wait_for_all(running: set[int]) -> int:
    """Wait for the end of the processes and return the exit code; those that do not follow a failed one are killed."""
    code, deadline_s = 0, float("inf")
    while running:
        process, status = os.waitpid(-1, 0 if code == 0 else os.WNOHANG)
        if process in running:
            running.remove(process)
            ended = os.waitstatus_to_exitcode(status)
            if ended and code == 0:
                code, deadline_s = (ended if ended > 0 else 128 - ended), time.monotonic() + _FOLLOW_S
        elif time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        else:
            for left in running:
                os.kill(left, signal.SIGKILL)
            deadline_s = float("inf")
    return code
