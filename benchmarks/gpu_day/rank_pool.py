"""Run task files in ranks that live on from run to run: ``python -m benchmarks.gpu_day.rank_pool --tasks FILE``.

A launch of its own imports torch twice and creates its devices' contexts anew. A pool does so once, which counts where
a machine is lent for minutes::

    pool          claims an attempt, sends its number to the run's ranks, writes how it ended if no rank did
    rank 0        run a | run b | run c | ...     as run_rank does, in one process
    rank 1                      | run c | ...
    fork server   has imported torch; a new rank is a copy of it

After a run that did not end well, all ranks end and the next run gets new ones: neither a broken CUDA context nor a
collective that hangs outlives its run. The allocator and the libraries of such ranks have been in use before, so a
result states that it is a pool's: the launcher in its provenance is ``pool``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from hpcbench.config.run_spec import RunSpec, read_task, read_tasks, run_label
from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.fileio import share_with_group
from hpcbench.results.attempts import Attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.worker.begin import claim_attempt, done_reason, read_result
from hpcbench.worker.distributed.rank_environment import RankInfo
from hpcbench.worker.end import end
from hpcbench.worker.run_rank import execute_rank
from hpcbench.worker.shutdown import StopController, exit_now

LAUNCHER = "pool"
_EXIT_TIME_LIMIT = 124
"""The code of ``timeout`` for a command that it ended."""
_FOLLOW_S = 10.0
"""Seconds that the other ranks of a run have once one has failed: they gather its result within that time."""
_IMPORTED = ["hpcbench.worker.measured_run", "torch.distributed.fsdp", "torch.distributed.optim"]


@dataclass(frozen=True)
class _Order:
    """A run, for the ranks that take part in it."""

    tasks: Path
    index: int
    attempt: int
    launch: str


class _Interrupted(BaseException):
    """The pool received a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class RankPool:
    """Ranks in processes of their own, started as runs need them.

    Example::

        pool = RankPool()
        status = pool.run(Path("0.jsonl"), index=3, limit_s=60.0)
        pool.close()
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED)
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def run(self, tasks: Path, index: int, limit_s: float) -> str:
        """Run number ``index`` of a task file, for ``limit_s`` seconds at most; return the status of its result.

        Raises:
            WorkerError: the task file cannot be read, or the run sets variables, which only a new process can have.
            StorageError: the results tree cannot be written.
        """
        header, task = read_task(tasks, index)
        tree = ClusterTree(Path(header.tree))
        if done_reason(tree, task):
            return "done"
        if task.spec.env:
            raise WorkerError(
                f"{tasks}: run {index} sets {', '.join(sorted(task.spec.env))}, which the ranks of a pool cannot get",
                hint="submit this sweep: launches of their own have the variables of env",
            )
        launch = secrets.token_hex(8)
        attempt = claim_attempt(tasks, index, header, task, launch, min(limit_s, task.time_limit_s))
        deadline_s = time.monotonic() + min(limit_s, task.time_limit_s)
        code, received = 1, ""
        try:
            if not all(process.is_alive() for process, _ in self._ranks):
                # The kernel may have killed a rank for memory between two runs.
                self.close()
            self._start(task.spec.ranks)
            for _, pipe in self._ranks[: task.spec.ranks]:
                pipe.send(_Order(tasks, index, attempt.number, launch))
            code = self._exit_code(task.spec.ranks, deadline_s)
        except _Interrupted as stopped:
            code, received = 128 + stopped.number, signal.Signals(stopped.number).name
            raise
        finally:
            if received or code:
                self.close()
            end(tasks, index, attempt.number, code, received)
        result = read_result(tree, task.run_id)
        return result.status if result is not None else "lost"

    def close(self, *, keep: int = 0) -> None:
        """End the ranks from number ``keep`` on, and with them the device's memory that they hold."""
        ended, self._ranks = self._ranks[keep:], self._ranks[:keep]
        for process, pipe in ended:
            process.kill()
            process.join()
            pipe.close()

    def _start(self, count: int) -> None:
        for rank in range(len(self._ranks), count):
            ours, theirs = self._context.Pipe()
            # No daemon, which might start no loader workers. It ends with its pipe.
            process = self._context.Process(target=_serve, args=(rank, theirs), daemon=False)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _exit_code(self, count: int, deadline_s: float) -> int:
        """Return 0 if all ranks end the run well before the deadline, else the code of the first that does not."""
        waiting = {pipe: process for process, pipe in self._ranks[:count]}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return _EXIT_TIME_LIMIT
            for pipe in ready:
                assert isinstance(pipe, Connection), "pipes alone were waited for"
                process = waiting.pop(pipe)
                try:
                    code: Any = pipe.recv()
                except (EOFError, OSError):
                    process.join()
                    code = process.exitcode or 1
                if code:
                    # The others follow: their files make the result complete.
                    deadline_s = min(deadline_s, time.monotonic() + _FOLLOW_S)
                    for other in waiting:
                        other.poll(max(0.0, deadline_s - time.monotonic()))
                    return int(128 - code if code < 0 else code)
        return 0


def _serve(rank: int, pipe: Connection) -> None:
    """Take part in the runs that the pool orders; the process ends with the pool, and after a run that failed."""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            order: _Order = pipe.recv()
            code = _take_part(rank, order)
            pipe.send(code)
            if code:
                break
    exit_now(0)


def _take_part(rank: int, order: _Order) -> int:
    header, task = read_task(order.tasks, order.index)
    attempt = Attempt(ClusterTree(Path(header.tree)).run_folder(task.run_id), order.attempt)
    for name, stream in (("out.log", sys.stdout), ("err.log", sys.stderr)):
        stream.flush()
        file = os.open(attempt.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        share_with_group(attempt.folder / name)
        os.dup2(file, stream.fileno())
        os.close(file)
    info = RankInfo(rank, rank, task.spec.ranks, task.spec.ranks, 0, LAUNCHER, order.launch)
    stop = StopController()
    code = execute_rank(header, task, attempt, info, dict(os.environ), stop)
    # A thread that waits for other ranks keeps the controller until it has seen their end, and must not keep a model.
    stop.abort = None
    from hpcbench.worker.distributed.world import leave_world

    leave_world()
    return code


def run_pool(files: Sequence[Path], limit_s: float) -> int:
    """Run the tasks of ``files`` in order until ``limit_s`` seconds have passed; print how each ended.

    Returns:
        0 if every run has an ok result, else 1.
    """
    for name in ("SIGTERM", "SIGINT"):
        signal.signal(getattr(signal, name), _raise_interrupted)
    began_s, pool = time.monotonic(), RankPool()
    orders = [(file, index, task.spec) for file in files for index, task in enumerate(read_tasks(file))]
    statuses = []
    try:
        for number, (file, index, spec) in enumerate(orders):
            left_s = limit_s - (time.monotonic() - began_s)
            if left_s <= 0:
                statuses.append("no time left")
                continue
            run_began_s = time.monotonic()
            pool.close(keep=_widest(orders[number:]))
            statuses.append(pool.run(file, index, left_s))
            took_s = time.monotonic() - run_began_s
            print(f"{number + 1}/{len(orders)} {statuses[-1]} {took_s:.1f} s: {run_label(spec)}", flush=True)
    except _Interrupted as stopped:
        return 128 + stopped.number
    finally:
        pool.close()
    return int(any(status not in ("ok", "done") for status in statuses))


def _widest(orders: Sequence[tuple[Path, int, RunSpec]]) -> int:
    """Return the most ranks that a run of ``orders`` has."""
    return max(spec.ranks for _, _, spec in orders)


def _raise_interrupted(number: int, _frame: FrameType | None) -> None:
    raise _Interrupted(number)


def main() -> int:
    """Run the files of the command line; the exit code is 128 + N after signal N."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, required=True, nargs="+", metavar="FILE", help="task files, in order")
    text = "seconds after which no run starts and the present one ends"
    parser.add_argument("--limit-s", type=float, default=float("inf"), metavar="S", help=text)
    arguments = parser.parse_args()
    try:
        return run_pool(arguments.tasks, arguments.limit_s)
    except HpcbenchError as error:
        print(f"hpcbench: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
