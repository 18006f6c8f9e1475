"""Write down how runs ended of which only the scheduler knows: their nodes died, or nothing was left to write it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from hpcbench.config.task import read_task
from hpcbench.errors import HpcbenchError
from hpcbench.results.attempts import latest_attempt
from hpcbench.results.schema import STATUSES, Failure, RunResult
from hpcbench.results.store import ClusterTree
from hpcbench.submit.state import LATE_S, RunState


def settle(tree: ClusterTree, states: Mapping[str, RunState]) -> list[str]:
    """Give every run whose job ended without leaving a result the one that the scheduler's word amounts to.

    Runs whose job ended a moment ago are left for later, and so are all where this user may not write.
    Returns the ``run_id``s that got a result. The scheduler forgets a job after a while; the tree does not.
    """
    settled = []
    for run_id, state in states.items():
        if state.ended_unix_s is None or state.state not in STATUSES or state.ticket is None:
            continue
        if time.time() - state.ended_unix_s < LATE_S:
            continue
        with contextlib.suppress(HpcbenchError):
            if tree.write_result(_result(tree, run_id, state)):
                settled.append(run_id)
    return settled


def _result(tree: ClusterTree, run_id: str, state: RunState) -> RunResult:
    ticket = state.ticket
    assert ticket is not None
    header, task = read_task(ticket.folder / f"{ticket.array.number}.jsonl", ticket.index)
    attempt = latest_attempt(tree.run_folder(run_id))
    return RunResult(
        run_id=run_id,
        config_id=task.config_id,
        attempt=attempt.number if attempt else 0,
        sweep=task.sweep,
        cluster=header.cluster,
        status=state.state,
        spec=task.spec,
        error=Failure(type="SchedulerEnded", message=f"job {state.job_id}: {state.reason}"),
    )
