"""Repeated queries of sweeps in progress, and waiting for their end.

``SweepWatcher.query`` asks the scheduler, ``SweepWatcher.refresh_results`` reads results between two queries.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from hpcbench.errors import StorageError
from hpcbench.fileio import TEMPORARY_REFUSALS
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK, ResultSummary
from hpcbench.submit.run_state import ACTIVE_STATES, RunState, record_scheduler_failures, run_states
from hpcbench.submit.scheduler_registry import poll_period_s, send_unsent

if TYPE_CHECKING:
    from hpcbench.config.cluster_profile import ClusterProfile

_MAX_SINGLE_LOOKUPS = 50
"""So many are looked at one by one: there are more folders than that."""
_MTIME_RESOLUTION_S = 2.0
"""A change within this time of another may bear the same modification time."""


class IncrementalClusterTree(ClusterTree):
    """A ``ClusterTree`` whose ``heads`` costs a look at each folder ``runs/<first two hex>``, and what changed there.

    Whoever writes a result touches that folder. An ok result is read once: nothing but another ok one replaces it.
    ``head`` of one run alone always reads its file.
    """

    def __init__(
        self,
        root: Path,
        clock: Callable[[], float] = time.monotonic,
        superseded: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``superseded``: of runs that are measured again, the environment key of the result that is replaced."""
        super().__init__(root)
        self._clock, self._superseded = clock, superseded
        self._heads: dict[str, ResultSummary] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        """Modification time (ns) of every folder, and when it was seen first."""
        self._settled: dict[str, int] = {}
        """Modification time (ns) of the folder of each run that was read when the folder had kept this time for a
        while."""

    def summaries(self, run_ids: Collection[str]) -> dict[str, ResultSummary]:
        """Return the summaries of ``ClusterTree.summaries``; runs that are new to the watcher are looked up."""
        wanted = [run_id for run_id in run_ids if not self._is_ok(run_id)]
        if len(wanted) <= _MAX_SINGLE_LOOKUPS:
            for run_id in wanted:
                self.summary(run_id)
        else:
            self._look_for(wanted)
        return {run_id: self._heads[run_id] for run_id in run_ids if run_id in self._heads}

    def _is_ok(self, run_id: str) -> bool:
        head = self._heads.get(run_id)
        return head is not None and head.status == STATUS_OK and not self.is_superseded(run_id, head)

    def is_superseded(self, run_id: str, head: ResultSummary) -> bool:
        """Whether it is still the result that a new measurement is to replace."""
        return head.environment_key is not None and head.environment_key == self._superseded.get(run_id)

    def _look_for(self, wanted: Collection[str]) -> None:
        """Read those of ``wanted`` that are in folders that have changed since each was read last."""
        now_s, mtimes_ns = self._clock(), self.prefix_mtimes_ns()
        for prefix, mtime_ns in mtimes_ns.items():
            if prefix not in self._seen or self._seen[prefix][0] != mtime_ns:
                self._seen[prefix] = (mtime_ns, now_s)
        names: dict[str, set[str]] = {}
        for run_id in wanted:
            prefix = run_id[:2]
            if prefix not in mtimes_ns:
                self._heads.pop(run_id, None)
                continue
            if self._settled.get(run_id) == mtimes_ns[prefix]:
                continue
            if prefix not in names:
                names[prefix] = set()
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    names[prefix].update(os.listdir(self.root / "runs" / prefix))
            if run_id in names[prefix]:
                self.summary(run_id)
            else:
                self._heads.pop(run_id, None)
            if now_s - self._seen[prefix][1] > _MTIME_RESOLUTION_S:
                # Later changes cannot bear this time any more.
                self._settled[run_id] = mtimes_ns[prefix]

    def summary(self, run_id: str) -> ResultSummary | None:
        """Return the summary of one result as its file is now; ``None`` if there is no result."""
        head = super().summary(run_id)
        if head is None:
            self._heads.pop(run_id, None)
            return None
        self._heads[run_id] = head
        return head


class SweepWatcher:
    """Queries the sweeps of one cluster again and again; each query asks the scheduler once, about all of them."""

    def __init__(
        self,
        root: Path,
        profile: ClusterProfile,
        sweeps: Mapping[str, Sequence[str]],
        superseded: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``sweeps``: the ``run_id``s by sweep. ``superseded``: for runs that are measured again, the environment key
        of the result that does not count."""
        self.tree = IncrementalClusterTree(root, superseded=superseded)
        self.sweeps = sweeps
        self._profile, self._superseded = profile, superseded

    def query(self) -> dict[str, RunState]:
        """The state of every run. Failures that only the scheduler reports are recorded."""
        run_ids = dict.fromkeys(run_id for run_ids in self.sweeps.values() for run_id in run_ids)
        states = run_states(self.tree, run_ids, self._profile, time.time(), self._stale())
        if any(state.ended_unix_s is not None for state in states.values()):
            record_scheduler_failures(self.tree, states)
        return states

    def query_again(self, states: dict[str, RunState]) -> dict[str, RunState]:
        """``query``; the earlier ``states`` while the file system refuses for a reason that may pass."""
        return _unless_refused(self.query, states)

    def refresh_results(self, states: dict[str, RunState]) -> dict[str, RunState]:
        """``states`` with the ok results that have come since, without a query of the scheduler."""
        return _unless_refused(lambda: self._with_new_results(states), states)

    def _with_new_results(self, states: Mapping[str, RunState]) -> dict[str, RunState]:
        heads = self.tree.summaries([key for key, state in states.items() if state.state in ACTIVE_STATES])
        done = {key for key, head in heads.items() if head.status == STATUS_OK} - self._stale()
        return {key: RunState(STATUS_OK) if key in done else state for key, state in states.items()}

    def poll_period_s(self, states: Mapping[str, RunState]) -> float:
        """Pause (s) until the next query, by the schedulers of the runs that are queued or running."""
        runs = (state.submitted_run for state in states.values() if state.state in ACTIVE_STATES)
        kinds = {(run.record.scheduler, run.record.cluster) for run in runs if run is not None}
        return max((poll_period_s(*kind, self._profile) for kind in kinds), default=0.0)

    def _stale(self) -> set[str]:
        """Runs whose result is still the one that is being replaced."""
        heads = self.tree.summaries(self._superseded)
        return {key for key, head in heads.items() if self.tree.is_superseded(key, head)}


def _unless_refused(read: Callable[[], dict[str, RunState]], states: dict[str, RunState]) -> dict[str, RunState]:
    try:
        return read()
    except StorageError as error:
        if error.errno not in TEMPORARY_REFUSALS:
            raise
        return states


_PAUSE_FACTOR = 9.0
_MAX_PAUSE_S = 120.0


def poll_pause_s(every_s: float, took_s: float) -> float:
    """The pause after a query that took ``took_s``: a slow file system or scheduler is queried less often.

    Queries take at most a tenth of the time, as long as that means no pause of more than two minutes.
    """
    return max(every_s, min(_PAUSE_FACTOR * took_s, _MAX_PAUSE_S))


_RESULT_POLL_S = 0.5
_WATCH_POLL_S = 2.0
Watched = list[tuple[SweepWatcher, dict[str, RunState]]]
"""Watchers, each with the states of its runs."""


def has_active_runs(watched: Watched) -> bool:
    return any(state.state in ACTIVE_STATES for _, states in watched for state in states.values())


def refresh_until_query(watched: Watched, took_s: float, show: Callable[[Watched], None]) -> Watched:
    """Read new results until the scheduler is to be queried again, or no run is active; return the newest states.

    Results are read often, because that costs little.

    Args:
        watched: the watchers of several clusters, each with the states of its last query.
        took_s: duration of these queries.
        show: called with the states after every reading.
    """
    every_s = max((watcher.poll_period_s(states) for watcher, states in watched), default=0.0)
    next_query_s = time.monotonic() + poll_pause_s(every_s, took_s)
    while has_active_runs(watched) and (pause_s := next_query_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, _WATCH_POLL_S))
        watched = [(watcher, watcher.refresh_results(states)) for watcher, states in watched]
        show(watched)
    return watched


def wait_for_runs(
    watcher: SweepWatcher, profile: ClusterProfile, notify: Callable[[dict[str, RunState]], None]
) -> dict[str, RunState]:
    """Block until no run is waiting, pending or running; ``notify`` is called with the states after every query.

    Results are read often, because that costs little; the scheduler is queried rarely. Jobs that could not be submitted
    are submitted again whenever the scheduler is queried. Raises ``SubmitError`` if the scheduler refuses them.
    """
    every_s = poll_period_s(profile.scheduler.kind, profile.name, profile)
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
            states = watcher.query_again(states)
            queried_s = time.monotonic()
            next_query_s = queried_s + poll_pause_s(every_s, queried_s - began_s)
        else:
            states = watcher.refresh_results(states)
            read_took_s = time.monotonic() - began_s
        notify(states)
    return states
