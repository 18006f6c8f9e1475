"""The finalizer of a rank: it writes the rank's file and, on rank 0, the run's result, also after errors and
signals."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcbench.config.run_spec import RunTask, TaskFileHeader
from hpcbench.errors import HpcbenchError
from hpcbench.parallel.traffic import Traffic
from hpcbench.results.attempts import Attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import (
    STATUS_OK,
    FailureRecord,
    PipelinePrediction,
    ProbeResults,
    RankResult,
    StepPhases,
    TimelineSpan,
    VerificationResult,
)
from hpcbench.worker.distributed.rank_environment import RankInfo, cpu_mask
from hpcbench.worker.failure import RunOutcome, decide_outcome, describe_error, is_peer_lost
from hpcbench.worker.measure.host import PeakMemory, read_peak_memory
from hpcbench.worker.shutdown import PeerEnded, StopController, Stopped, exit_now
from hpcbench.worker.summary import summarize_run

if TYPE_CHECKING:
    import torch

    from hpcbench.worker.distributed.rendezvous import ControlChannel, FailureCause
    from hpcbench.worker.measure.counters import RegionCounters
    from hpcbench.worker.training_loop import LoopProgress

FAILURE_GATHER_S = 5.0
"""How long rank 0 waits for the others once the run has gone wrong: a scheduler's patience is short."""

EXIT_NOT_OK = 1


class RunFinalizer:
    """Everything that is known about this rank, from either of two threads; only the first to ``end`` does.

    Fields are filled in as the rank gets on, so that an early end leaves what there is.
    """

    def __init__(
        self, header: TaskFileHeader, task: RunTask, attempt: Attempt, info: RankInfo, stop: StopController
    ) -> None:
        self.header = header
        self.task = task
        self.attempt = attempt
        self.info = info
        self.stop = stop
        self.device: torch.device | None = None
        self.link: ControlChannel | None = None
        self.progress: LoopProgress | None = None
        self.replica = 0
        self.flops_per_sample: float | None = None
        self.phases: StepPhases | None = None
        self.timeline: list[TimelineSpan] = []
        self.state: Callable[[], str] | None = None
        """Where a pipeline's rank stands, in words."""
        self.predicted: PipelinePrediction | None = None
        self.probe: ProbeResults | None = None
        self.traffic: list[Traffic] = []
        self.peak: PeakMemory | None = None
        self.watch: RegionCounters | None = None
        self.owes = task.spec.verify
        """Without its verification, or what else it is to measure, such a run is not what was asked for, however well
        its steps were timed."""
        self.verification: VerificationResult | None = None
        self.provenance: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.given_env: dict[str, str] = {}
        self._first = threading.Lock()

    def abandon(self, cause: BaseException) -> None:
        """End the process from a thread: the main one has not come back. Returns only where that one is ending."""
        if self._first.acquire(blocking=False):
            code = EXIT_NOT_OK
            try:
                code = self._end(cause, may_wait=False)
            finally:
                exit_now(code)

    def end(self, error: BaseException | None) -> int:
        """Leave this rank's file and, on rank 0, the result; returns the exit code."""
        if not self._first.acquire(blocking=False):
            # The other thread is at it and ends the process.
            threading.Event().wait()
        return self._end(error, may_wait=True)

    def _end(self, error: BaseException | None, may_wait: bool) -> int:
        if error is not None and isinstance(self.stop.reason, Stopped) and is_peer_lost(error):
            # Told to stop, the others were too: that they are gone is no failure.
            error = self.stop.reason
        wait_s = self.header.wait_s if error is None else FAILURE_GATHER_S
        measured = self.progress is not None and self.progress.complete
        if measured and not self.owes and _is_harmless_after_timing(error):
            self.warnings.append(f"after the last timed step: {error}")
            error = None
        status, failure = self._own(error)
        if error is not None and self.link is not None:
            self.link.give_up(self._cause(error, status, failure))
        mine = self._rank_result(status, failure, may_wait)
        with contextlib.suppress(HpcbenchError):
            self.attempt.write_rank(mine)
        if self.link is not None:
            self.link.send(mine)
        if self.info.rank == 0:
            status = self._write_run(mine, error, wait_s)
        return 0 if status == STATUS_OK else EXIT_NOT_OK

    def _own(self, error: BaseException | None) -> tuple[str, FailureRecord | None]:
        if error is None:
            return STATUS_OK, None
        if isinstance(error, Stopped):
            return error.status, FailureRecord(type="Stopped", message=str(error))
        if not isinstance(error, PeerEnded):
            traceback.print_exception(error)
        status, failure = describe_error(error)
        if is_peer_lost(error) and self.link is not None:
            known = self.link.cause()
            status = known.status if known is not None and known.type == "Stopped" else status
        return status, failure

    def _cause(self, error: BaseException, status: str, failure: FailureRecord | None) -> FailureCause | None:
        from hpcbench.worker.distributed.rendezvous import FailureCause

        if failure is None or is_peer_lost(error):
            return None
        return FailureCause(
            rank=self.info.rank,
            host=socket.gethostname(),
            status=status,
            type=failure.type,
            message=failure.message,
            hint=failure.hint,
            traceback_tail=failure.traceback_tail,
        )

    def _rank_result(self, status: str, failure: FailureRecord | None, may_wait: bool) -> RankResult:
        times = self.progress.step_times_s() if self.progress else []
        evaluations = self.progress.evaluations if self.progress else []
        memory = self.peak or read_peak_memory(self.device)
        return RankResult(
            rank=self.info.rank,
            local_rank=self.info.local_rank,
            node_rank=self.info.node_rank,
            replica=self.replica,
            status=status,
            error=failure,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=str(self.device or self.header.device),
            cpu_mask=cpu_mask(),
            steps_done=len(times),
            step_times_s=times,
            step_samples=self.progress.samples[: len(times)] if self.progress else [],
            losses=self.progress.read_losses(may_wait) if self.progress else [],
            peak_memory_bytes=memory.memory_bytes,
            peak_reserved_bytes=memory.reserved_bytes,
            time_to_first_step_s=self.progress.time_to_first_step_s if self.progress else None,
            accuracy=evaluations[-1].accuracy if evaluations else None,
            evaluations=evaluations,
            phases=self.phases,
            timeline=self.timeline,
            state=self.state() if failure is not None and self.state is not None else None,
            predicted=self.predicted,
            probe=self.probe,
            traffic=self.traffic,
            flops_per_sample=self.flops_per_sample,
            verification=self.verification,
            watched=self.watch.watched if self.watch else None,
            energy_j=self.watch.energy_j if self.watch else None,
            energy_source=self.watch.energy_source if self.watch else None,
            warnings=self.warnings,
            provenance=self.provenance,
        )

    def _write_run(self, mine: RankResult, error: BaseException | None, wait_s: float) -> str:
        """Gather, judge, write; returns the run's status."""
        ranks = self._gather(mine, wait_s)
        verdict = self._judge(ranks, error)
        result = summarize_run(self.header, self.task, self.attempt.number, ranks, verdict.status, verdict.error)
        ClusterTree(Path(self.header.tree)).write_result(result, self.task.supersedes)
        return verdict.status

    def _gather(self, mine: RankResult, wait_s: float) -> dict[int, RankResult]:
        others = self.link.collect(self.attempt, wait_s) if self.link else self._from_files(wait_s)
        return {**others, self.info.rank: mine}

    def _from_files(self, wait_s: float) -> dict[int, RankResult]:
        """Without a store (the ranks never met) files are all there is."""
        give_up = time.monotonic() + min(wait_s, FAILURE_GATHER_S)
        while True:
            found = self.attempt.read_ranks()
            if len(found) >= self.task.spec.ranks or time.monotonic() > give_up:
                return found
            time.sleep(0.1)

    def _judge(self, ranks: dict[int, RankResult], error: BaseException | None) -> RunOutcome:
        marker = self.attempt.read_start()
        return decide_outcome(
            self.task.spec.ranks,
            ranks,
            cause=self.link.cause() if self.link else None,
            only_follows=error is not None and is_peer_lost(error),
            launcher=self.info.launcher,
            oom_kills_before=marker.oom_kills if marker else None,
        )


def _is_harmless_after_timing(error: BaseException | None) -> bool:
    """Whether ``error`` takes nothing away from a rank that has made its timed steps."""
    return isinstance(error, Stopped) or (error is not None and is_peer_lost(error))
