"""Life of one rank, from its environment to its part of the result.

torch is imported only once the run's environment variables are set."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path

import msgspec

from hpcbench.config.command import Command
from hpcbench.config.run_spec import RunTask, TaskFileHeader, read_task
from hpcbench.errors import unsupported
from hpcbench.results.attempts import Attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.strategies.catalog import COLLECTIVES
from hpcbench.worker import begin
from hpcbench.worker.distributed import rank_environment
from hpcbench.worker.finalize import RankMeasurements, RunContext, RunFinalizer
from hpcbench.worker.shutdown import StopController


def run_rank(tasks: Path, index: int, attempt_number: int | None, info: rank_environment.RankInfo | None = None) -> int:
    """Run one rank of a run; returns the exit code: 0 where the run (as far as this rank can see) is ok.

    Without ``attempt_number`` rank 0 begins an attempt, unless the run is done already, and the others find it. Without
    ``info`` the launcher's variables state which rank this is.
    """
    header, task = read_task(tasks, index)
    user_env = rank_environment.user_environment(os.environ, Path(f"/proc/{os.getppid()}/environ"))
    rank_environment.apply_run_environment(task.spec.env, task.run_id)
    stop = StopController()
    stop.install()
    info = info or rank_environment.detect_rank(os.environ, os.getpid(), os.getppid())
    attempt = _find_or_claim_attempt(tasks, index, header, task, info, attempt_number)
    if attempt is None:
        return 0
    marker = attempt.read_start()
    stop.warning_file = attempt.folder / "limit-warning"
    stop.set_deadline(marker.deadline_unix_s if marker else None, task.time_limit_s, header.warning_s)
    return execute_rank(header, task, attempt, info, user_env, stop)


def execute_rank(
    header: TaskFileHeader, task: RunTask, attempt: Attempt, info: rank_environment.RankInfo, user_env: dict[str, str],
    stop: StopController,
) -> int:  # fmt: skip
    """Measure as this rank of the attempt and write its file, on rank 0 the result too; returns the exit code.

    ``user_env``: the environment before the run's own variables were set.
    """
    context = RunContext(header, task, attempt, info, user_env)
    finalizer = RunFinalizer(context, RankMeasurements.of(context), stop)
    stop.abort = finalizer.abort
    try:
        rank_environment.check_world_size(info, task.spec)
        if header.device == "cpu":
            rank_environment.hide_gpus()
        try:
            importlib.import_module("torch")
        except ImportError as error:
            message = f"{sys.executable} on {socket.gethostname()} cannot import torch: {error}"
            hint = "install it into the profile's environment: python -m pip install torch"
            raise unsupported(message, hint) from error
        stop.raise_if_stopped()
        if task.spec.workload == "command":
            from hpcbench.worker.command.run_command import run_command

            run_command(finalizer, msgspec.convert(header.command, Command))
        else:
            from hpcbench.worker.measured_run import measure_run, run_collectives

            run = run_collectives if task.spec.workload == COLLECTIVES else measure_run
            run(finalizer)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it becomes the result
        return finalizer.finish(error)
    return finalizer.finish(None)


def _find_or_claim_attempt(
    tasks: Path, index: int, header: TaskFileHeader, task: RunTask, info: rank_environment.RankInfo, number: int | None
) -> Attempt | None:
    tree = ClusterTree(Path(header.tree))
    folder = tree.run_folder(task.run_id)
    if number is not None:
        return Attempt(folder, number)
    # Whoever starts a rank by hand wants this very run: only what is done is left alone.
    if why := begin.done_reason(tree, task):
        print(f"hpcbench: {task.run_id}: {why}: nothing to do", file=sys.stderr)  # noqa: T201
        return None
    if info.rank == 0:
        return begin.claim_attempt(tasks, index, header, task, info.launch)
    return begin.find_attempt(folder, info, header.wait_s)
