"""Rank processes that live as long as a test module; every call goes to two or all of them."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpcbench.worker.distributed.process_groups import TCPStore, to_timedelta
from tests.distributed.cases import Case, OfRank, run_parallel
from tests.distributed.forking import IMPORTED

RANKS = 4
T = TypeVar("T")
_WAIT_S = 120


class Pool:
    """``run`` hands a case to the first ranks and returns what each of them found."""

    def __init__(self, ranks: int = RANKS) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._store = TCPStore("127.0.0.1", 0, None, True, to_timedelta(_WAIT_S), wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(ranks)]
        self._pipes, self._calls = [ours for ours, _ in pipes], 0
        self._processes = [
            context.Process(
                target=_serve, args=(rank, ranks, self._store.port, theirs, self._stacks_of(rank)), daemon=False
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for rank in range(ranks):
            self._stacks_of(rank).touch()
        self._groups = 0
        """The most process groups that a rank is in."""
        for process in self._processes:
            process.start()

    def run(self, case: Case) -> list[OfRank]:
        """One result per rank of the case's world."""
        return self.call(case.spec.ranks, run_parallel, case)

    def call(self, ranks: int, function: Callable[..., T], *arguments: Any) -> list[T]:
        """Return the results of ``function(*arguments, group)`` on each of the first ``ranks``.

        A rank that raises fails the test with its traceback.
        """
        pipes = self._pipes[:ranks]
        self._calls += 1
        self._check_alive()
        for pipe in pipes:
            pipe.send((self._calls, ranks, function, arguments, self._groups))
        answers = [self._answer(pipe) for pipe in pipes]
        self._groups = max(self._groups, *(count for _, _, count in answers))
        found: list[T] = []
        for rank, (ok, data, _) in enumerate(answers):
            assert ok, f"rank {rank} of the pool raised\n{data}"
            found.append(torch.load(io.BytesIO(bytes(data)), weights_only=False))
        return found

    def _answer(self, pipe: Connection) -> tuple[bool, Any, int]:
        """Return a rank's answer to this call and its number of groups; late answers to abandoned calls are dropped."""
        deadline = time.monotonic() + _WAIT_S
        while pipe.poll(max(deadline - time.monotonic(), 0.0)):
            try:
                call, ok, data, groups = pipe.recv()
            except EOFError:
                wait([process.sentinel for process in self._processes], _WAIT_S)
                self._check_alive()
                raise
            if call == self._calls:
                return ok, data, groups
        return False, f"no answer in {_WAIT_S} s", 0

    def _check_alive(self) -> None:
        """A process that has ended, as one that the kernel killed for memory has, would show as a broken pipe."""
        for rank, process in enumerate(self._processes):
            assert process.exitcode is None, (
                f"rank {rank} of the pool has ended with {process.exitcode}\n{self._stacks_of(rank).read_text()}"
            )

    def _stacks_of(self, rank: int) -> Path:
        """The file of a rank's threads, written where a signal such as SIGSEGV ends it."""
        return Path(self._folder.name) / f"rank{rank}.txt"

    def close(self) -> None:
        """End the processes; it is an error if one has ended by itself."""
        try:
            self._check_alive()
        finally:
            for pipe, process in zip(self._pipes, self._processes, strict=True):
                if process.is_alive():
                    pipe.send(None)
                    process.join(10)
                    process.kill()
            self._folder.cleanup()


def return_freed_memory() -> None:
    """Return freed memory to the system: after large models glibc keeps a gigabyte and more between used blocks."""
    gc.collect()
    gc.freeze()  # the next collection looks at what is new
    ctypes.CDLL(None).malloc_trim(0)


def _first_or_alone(rank: int, size: int, ranks: int) -> Any:
    """The group of the first ``size`` ranks, where ``rank`` is one of them."""
    made = [dist.new_group(members) for members in (list(range(size)), *([other] for other in range(size, ranks)))]
    return made[0] if rank < size else None


def _serve(rank: int, ranks: int, port: int, pipe: Connection, stacks: Path) -> None:
    import os

    faulthandler.enable(stacks.open("w"))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()
    store = TCPStore("127.0.0.1", port, None, False, to_timedelta(_WAIT_S), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=to_timedelta(_WAIT_S))
    # A rank that is left out of a group makes one of its own: torch names the groups that a part of the ranks makes
    # later by how many a rank is in already.
    groups: dict[int, Any] = {size: _first_or_alone(rank, size, ranks) for size in range(2, ranks + 1)}
    while (order := pipe.recv()) is not None:
        call, size, function, arguments, wanted = order
        while len(dist.distributed_c10d._world.pg_names) < wanted:
            # As above, for the groups of calls that this rank was not in.
            dist.new_group([rank], use_local_synchronization=True)
        try:
            buffer = io.BytesIO()
            torch.save(function(*arguments, groups[size]), buffer)
            answer: tuple[bool, bytes | str] = True, buffer.getvalue()
        except Exception:  # noqa: BLE001 - the test shows it
            answer = False, traceback.format_exc()
        pipe.send((call, *answer, len(dist.distributed_c10d._world.pg_names)))
        del order, function, arguments, buffer, answer
        return_freed_memory()
    os._exit(0)
