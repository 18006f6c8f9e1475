"""Cancellation of runs, and waiting for their end.

Cancelled runs keep their measurements; ``submit`` runs them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.journal import drop_runs
from hpcbench.submit.run_state import ACTIVE_STATES, RunState
from hpcbench.submit.scheduler import scheduler_class, send_unsent
from hpcbench.submit.submission_record import SubmittedRun, find_submitted_runs
from hpcbench.submit.watcher import SweepWatcher, poll_interval_s, poll_pause_s

if TYPE_CHECKING:
    from hpcbench.config.cluster_profile import ClusterProfile

_RESULT_POLL_S = 0.5


def cancel_runs(tree: ClusterTree, states: Mapping[str, RunState], profile: ClusterProfile) -> list[str]:
    """Cancel the active runs among ``states`` and return their ``run_id``s.

    They are removed from their submissions first, so that none is sent or begun meanwhile. Then jobs that carry
    nothing else are cancelled; of jobs that carry more, only the running run is stopped.
    Raises ``SubmitError`` if the scheduler's command is absent or refuses.
    """
    active = {key for key, state in states.items() if state.state in ACTIVE_STATES}
    by_submission: dict[str, list[str]] = {}
    for key, run in find_submitted_runs(tree, active).items():
        by_submission.setdefault(run.folder.name, []).append(key)
    for folder, run_ids in by_submission.items():
        drop_runs(tree.submissions / folder, run_ids)
    # Some may have been submitted since their state was computed.
    runs = {key: run for key, run in find_submitted_runs(tree, active).items() if run.job_id}
    for kind in {run.record.scheduler for run in runs.values()}:
        of_kind = {key: run for key, run in runs.items() if run.record.scheduler == kind}
        whole = {run.job_id: run for run in of_kind.values() if _carries_only(run, active)}
        parts = [run for key, run in of_kind.items() if run.job_id not in whole and states[key].state == "running"]
        scheduler_class(kind, profile.name)(profile).cancel(list(whole.values()), parts)
    return sorted(active)


def _carries_only(run: SubmittedRun, active: Collection[str]) -> bool:
    """Whether the run's job carries only ``active`` runs."""
    return run.array.pack == 1 or all(run_id in active for run_id in run.array.runs_of(run.number))


def wait_for_runs(
    watcher: SweepWatcher, profile: ClusterProfile, notify: Callable[[dict[str, RunState]], None]
) -> dict[str, RunState]:
    """Block until no run is waiting, pending or running; ``notify`` is called with the states after every query.

    Results are read often, because that costs little; the scheduler is queried rarely. Jobs that could not be submitted
    are submitted again whenever the scheduler is queried. Raises ``SubmitError`` if the scheduler refuses them.
    """
    every_s = poll_interval_s(profile.scheduler.kind, profile.name)
    began_s = time.monotonic()
    states = watcher.query()
    queried_s, read_took_s = time.monotonic(), 0.0
    next_query_s = queried_s + poll_pause_s(every_s, queried_s - began_s)
    notify(states)
    while any(state.state in ACTIVE_STATES for state in states.values()):
        time.sleep(poll_pause_s(_RESULT_POLL_S, read_took_s))
        began_s = time.monotonic()
        if began_s >= next_query_s:
            if any(state.state == "waiting" for state in states.values()):
                refused = send_unsent(watcher.tree, list(states), profile).refused
                if refused:
                    raise refused[0]
            states = watcher.query()
            queried_s = time.monotonic()
            next_query_s = queried_s + poll_pause_s(every_s, queried_s - began_s)
        else:
            states = watcher.refresh_results(states)
            read_took_s = time.monotonic() - began_s
        notify(states)
    return states
