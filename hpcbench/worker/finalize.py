"""Finalizer of a rank: it writes the rank's file and, on rank 0, the result of the run, also after errors and signals.

This module does not import torch."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpcbench.config.run_spec import RunSpec, RunTask, TaskFileHeader
from hpcbench.errors import HpcbenchError, StorageError
from hpcbench.fileio import read_error, read_tail, write_patiently
from hpcbench.results.attempts import Attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK, FailureRecord, RankResult
from hpcbench.worker.distributed.rank_environment import RankInfo, cpu_mask
from hpcbench.worker.failure import FailureCause, decide_outcome, describe_error, is_peer_lost
from hpcbench.worker.measure.host import read_peak_memory
from hpcbench.worker.shutdown import PeerEnded, StopController, Stopped, exit_now
from hpcbench.worker.summary import summarize_run

if TYPE_CHECKING:
    import torch

    from hpcbench.worker.distributed.rendezvous import ControlChannel
    from hpcbench.worker.measure.counters import RegionCounters
    from hpcbench.worker.training_loop import LoopProgress

FAILURE_GATHER_S = 5.0
"""Time limit of rank 0 for the other ranks' results once the run has failed: a scheduler's patience is short."""

EXIT_NOT_OK = 1


@dataclass(frozen=True)
class RunContext:
    """Fixed facts of this rank's part in a run."""

    header: TaskFileHeader
    task: RunTask
    attempt: Attempt
    info: RankInfo
    user_env: dict[str, str]
    """Environment variables of the process before the run's own were applied."""

    @property
    def spec(self) -> RunSpec:
        return self.task.spec


@dataclass
class RankMeasurements:
    """Measurements of this rank so far.

    The main thread adds to them as the run proceeds, so that an early end keeps what there is. The stop thread reads
    them while the main thread may be stuck.
    """

    result: RankResult
    pending: set[str] = field(default_factory=set)
    """Parts (``verification``, ``probe``) without which the run is incomplete, however well its steps were timed."""
    device: torch.device | None = None
    progress: LoopProgress | None = None
    counters: RegionCounters | None = None
    peak: tuple[int, int | None] | None = None
    setup_peak: tuple[int, int | None] | None = None
    """Peak memory before the first timed step; ``None`` where the system's peak cannot be reset there."""
    pipeline_state: Callable[[], str | None] | None = None
    """Description of what a pipeline's rank is doing."""
    is_pooled: bool = False
    """The process is older than the run: neither its age nor, on a cpu, its memory is the run's."""

    @classmethod
    def of(cls, context: RunContext) -> RankMeasurements:
        numbers = {name: getattr(context.info, name) for name in ("rank", "local_rank", "node_rank")}
        result = RankResult(**numbers, host=socket.gethostname(), pid=os.getpid(), device=context.header.device)
        pending = {"verification"} if context.spec.verify else set[str]()
        return cls(result, pending, is_pooled=context.info.launcher == "pool")

    def rank_result(self, status: str, failure: FailureRecord | None, may_wait: bool) -> RankResult:
        """Complete the record of this rank. Nothing waits for the device unless ``may_wait``."""
        result = self.result
        result.status, result.error = status, failure
        result.cpu_mask = cpu_mask()
        peak, reserved = self.peak or read_peak_memory(self.device)
        if self.setup_peak is not None:
            result.steady_peak_memory_bytes = peak
            peak = max(peak, self.setup_peak[0])
            reserved = None if reserved is None else max(reserved, self.setup_peak[1] or 0)
        result.peak_memory_bytes, result.peak_reserved_bytes = peak, reserved
        if self.device is not None:
            result.device = str(self.device)
        if self.progress is not None:
            self.progress.write_into(result, may_wait)
        if self.is_pooled:
            result.time_to_first_step_s = None
            if self.device is None or self.device.type == "cpu":
                result.peak_memory_bytes = result.steady_peak_memory_bytes = None
        if self.counters is not None:
            self.counters.write_into(result)
        if failure is not None and self.pipeline_state is not None:
            result.state = self.pipeline_state()
        return result


class RunFinalizer:
    """Ends this rank's part in the run: it writes the rank's file and, on rank 0, the result of the run.

    The main thread calls ``finish``. A signal or the end of another rank makes another thread call ``abort``, which
    works while the main thread is stuck in a collective. The first call counts.

    Example::

        finalizer = RunFinalizer(context, RankMeasurements.of(context), stop)
        exit_code = finalizer.finish(error=None)
    """

    def __init__(self, context: RunContext, measurements: RankMeasurements, stop: StopController) -> None:
        """Set the sources of the record; nothing is read or written yet.

        Args:
            context: fixed facts of this rank.
            measurements: the measurements so far, filled by the main thread as the run proceeds.
            stop: the reason of a stop that was requested (a signal, the time limit).
        """
        self.context = context
        self.measurements = measurements
        self.stop = stop
        self.channel: ControlChannel | None = None
        """Connection to the other ranks; ``None`` before the rendezvous and for a lone rank."""
        self._lock = threading.Lock()

    def abort(self, cause: BaseException) -> None:
        """Write the record and end the process, from a thread while the main one may be stuck.

        It returns only if another thread is ending the process already.

        Args:
            cause: the reason of the end: ``Stopped``, ``PeerEnded`` or an error of this rank.
        """
        if self._lock.acquire(blocking=False):
            code = EXIT_NOT_OK
            try:
                code = self._finish(cause, may_wait=False)
            finally:
                exit_now(code)

    def finish(self, error: BaseException | None) -> int:
        """Write this rank's file and, on rank 0, the result of the run; return the exit code of the process.

        If another thread is ending the process already, the call never returns.

        Args:
            error: the exception that ended the run early; ``None`` after a complete run.

        Returns:
            0 if the status of the run (on other ranks: of this rank) is ``ok``, else 1.

        Raises:
            StorageError: on rank 0, if the result cannot be written.
        """
        if not self._lock.acquire(blocking=False):
            # Another thread is finishing and ends the process.
            threading.Event().wait()
        return self._finish(error, may_wait=True)

    def _finish(self, error: BaseException | None, may_wait: bool) -> int:
        context, measurements, channel = self.context, self.measurements, self.channel
        if error is not None and isinstance(self.stop.reason, Stopped) and is_peer_lost(error):
            # The other ranks were stopped as well: their end is no failure.
            error = self.stop.reason
        wait_s = context.header.wait_s if error is None else FAILURE_GATHER_S
        is_timed = measurements.progress is not None and measurements.progress.complete
        is_harmless = isinstance(error, Stopped) or (error is not None and is_peer_lost(error))
        if is_timed and is_harmless and not measurements.pending:
            measurements.result.warnings.append(f"after the last timed step: {error}")
            error = None
        status, failure = self._describe(error)
        if error is not None and channel is not None:
            cause = None
            if failure is not None and not is_peer_lost(error):
                cause = FailureCause(context.info.rank, socket.gethostname(), status, failure)
            channel.announce_abort(cause)
        result = measurements.rank_result(status, failure, may_wait)
        is_written = self._write_rank(result, patience_s=0.0)
        if channel is not None:
            channel.send(result)
        if context.info.rank == 0:
            status = write_run_result(context, channel, result, error, wait_s)
        if not is_written:
            # Rank 0 had it from the channel, unless that was closed already.
            self._write_rank(result, write_patience_s(context.attempt))
        return 0 if status == STATUS_OK else EXIT_NOT_OK

    def _write_rank(self, result: RankResult, patience_s: float) -> bool:
        with contextlib.suppress(HpcbenchError):
            write_patiently(lambda: self.context.attempt.write_rank(result), patience_s)
            return True
        return False

    def _describe(self, error: BaseException | None) -> tuple[str, FailureRecord | None]:
        if error is None:
            return STATUS_OK, None
        if isinstance(error, Stopped):
            return error.status, FailureRecord(type="Stopped", message=str(error))
        if not isinstance(error, PeerEnded):
            traceback.print_exception(error)
        status, failure = describe_error(error)
        if is_peer_lost(error) and self.channel is not None:
            cause = self.channel.cause()
            status = cause.status if cause is not None and cause.failure.type == "Stopped" else status
        return status, failure


def write_run_result(
    context: RunContext, channel: ControlChannel | None, rank_0: RankResult, error: BaseException | None, wait_s: float
) -> str:
    """Collect the ranks' results, write the result of the run and return its status. Called on rank 0.

    Args:
        rank_0: the result of rank 0.
        error: the exception that ended rank 0, or ``None``.
        wait_s: time limit for the results of the other ranks.

    Raises:
        StorageError: the results tree was moved or removed, or the result cannot be written.
    """
    attempt, spec = context.attempt, context.spec
    patience_s = write_patience_s(attempt)
    write_patiently(lambda: _check_folder(attempt, context.header.tree), patience_s)
    if channel is not None:
        ranks = channel.collect(attempt, wait_s)
    else:
        # Without a store (the ranks never met) there are only files.
        give_up = time.monotonic() + min(wait_s, FAILURE_GATHER_S)
        while len(ranks := attempt.read_ranks()) < spec.ranks and time.monotonic() <= give_up:
            time.sleep(0.1)
    ranks = {**ranks, context.info.rank: rank_0}
    marker = write_patiently(attempt.read_start, patience_s)
    outcome = decide_outcome(
        spec.ranks,
        ranks,
        cause=channel.cause() if channel is not None else None,
        only_follows=error is not None and is_peer_lost(error),
        launcher=context.info.launcher,
        oom_kills_before=marker.oom_kills if marker else None,
        log=read_tail(attempt.folder / "err.log"),
    )
    result = summarize_run(context.header, context.task, attempt.number, ranks, outcome.status, outcome.error)
    tree = ClusterTree(Path(context.header.tree))
    write_patiently(lambda: tree.write_result(result, context.task.supersedes), patience_s)
    return outcome.status


def _check_folder(attempt: Attempt, tree: str) -> None:
    """Raise ``StorageError`` if the attempt's folder has gone: making it anew would hide the results."""
    try:
        attempt.folder.stat()
    except FileNotFoundError:
        message = f"the results tree {tree} is gone: its folder {attempt.folder} was there at the start"
        hint = "was it moved or removed while jobs ran? submit runs this again"
        raise StorageError(message, hint=hint) from None
    except OSError as error:
        raise read_error(error, attempt.folder) from error


_MAX_PATIENCE_S = 600.0
_MIN_PATIENCE_S = 60.0


def write_patience_s(attempt: Attempt) -> float:
    """Seconds for which a measured result may wait for its file system: until the job's limit, 600 at most."""
    with contextlib.suppress(HpcbenchError):
        start = attempt.read_start()
        if start is not None and start.deadline_unix_s is not None:
            return min(max(start.deadline_unix_s - time.time(), _MIN_PATIENCE_S), _MAX_PATIENCE_S)
    return _MAX_PATIENCE_S
