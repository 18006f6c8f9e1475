"""A rank's life: from its environment to its part of the result."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path

from hpcbench.config.task import Task, TaskHeader, read_task
from hpcbench.errors import WorkerError
from hpcbench.parallel.catalog import resolve_runtime
from hpcbench.results.attempts import Attempt
from hpcbench.results.store import ClusterTree
from hpcbench.worker import environ, launch
from hpcbench.worker.begin import done
from hpcbench.worker.closing import Closing
from hpcbench.worker.environ import given_environment
from hpcbench.worker.rank import RankInfo, check_world, rank_info
from hpcbench.worker.stop import Stop


def run_rank(tasks: Path, index: int, attempt_number: int | None) -> int:
    """Run one rank of a run; returns the exit code: 0 where the run (as far as this rank knows) is ok.

    Without ``attempt_number`` rank 0 begins an attempt, unless the run is done already, and the others find it.
    """
    header, task = read_task(tasks, index)
    given = environ.as_given(os.environ, Path(f"/proc/{os.getppid()}/environ"))
    environ.apply(task.spec.env, task.run_id)
    stop = Stop()
    stop.install()
    info = rank_info(os.environ, os.getpid(), os.getppid())
    attempt = _attempt(tasks, index, header, task, info, attempt_number)
    if attempt is None:
        return 0
    marker = attempt.start_marker()
    stop.set_deadline(marker.deadline_unix_s if marker else None, task.time_limit_s)
    closing = Closing(header, task, attempt, info, stop)
    closing.given_env = given
    stop.on_stuck(closing.abandon)
    try:
        _measure(closing)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the result says it
        return closing.end(error)
    return closing.end(None)


def _attempt(
    tasks: Path, index: int, header: TaskHeader, task: Task, info: RankInfo, number: int | None
) -> Attempt | None:
    tree = ClusterTree(Path(header.tree))
    folder = tree.run_folder(task.run_id)
    if number is not None:
        return Attempt(folder, number)
    # Whoever starts a rank by hand wants this very run: only what is done is left alone.
    if why := done(tree, task):
        print(f"hpcbench: {task.run_id}: {why}: nothing to do", file=sys.stderr)  # noqa: T201
        return None
    if info.rank == 0:
        return launch.claim(tasks, index, header, task, info.launch)
    return launch.find(folder, info, header.wait_s)


def _measure(closing: Closing) -> None:
    header, spec, info, stop = closing.header, closing.task.spec, closing.info, closing.stop
    check_world(info, spec)
    _import_torch()
    stop.check()

    from hpcbench.worker import device as devices
    from hpcbench.worker.data.feed import make_feed
    from hpcbench.worker.evaluate import accuracy
    from hpcbench.worker.loop import Progress, run_loop
    from hpcbench.worker.memory import peak
    from hpcbench.worker.models.build import build_model
    from hpcbench.worker.provenance import collect, environment_digest
    from hpcbench.worker.world import barrier, enter_world

    closing.warnings += devices.settle_threads(closing.given_env | spec.env, header, info)
    device = closing.device = devices.choose(header.device, info)
    place = enter_world(closing, device)
    closing.provenance = collect(header, spec, info, device)
    closing.provenance["environment_digest"] = environment_digest(
        closing.provenance, header, given_environment(closing.given_env, spec.env)
    )
    stop.check()
    strategy = resolve_runtime(spec.strategy)()
    feed = make_feed(spec, device)
    strategy.setup(build_model(spec), spec, place)
    closing.replica = strategy.replica
    closing.progress = Progress(spec, device)
    run_loop(strategy, feed, spec, closing.progress, stop, lambda: barrier(place))
    closing.peak = peak(device)
    if info.rank == 0:
        closing.accuracy = accuracy(strategy.module, feed)
    strategy.close()


def _import_torch() -> None:
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise WorkerError(
            f"{sys.executable} on {socket.gethostname()} cannot import torch: {error}",
            status="unsupported",
            hint="install it into the profile's environment: python -m pip install torch",
        ) from error
