"""The states of sweeps, as ``status``, ``run`` and ``submit --wait`` show them: queried once, or until all runs end.

``SweepWatcher.query`` asks the scheduler, ``SweepWatcher.refresh_results`` reads results between two queries.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.config.sweep_loader import spec_condition
from hpcbench.errors import StorageError
from hpcbench.fileio import TEMPORARY_REFUSALS
from hpcbench.results.attempts import latest_attempt
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.results.schema import STATUS_OK, ResultSummary
from hpcbench.submit.run_state import ACTIVE_STATES, RunState, record_scheduler_failures, run_states
from hpcbench.submit.scheduler_registry import poll_period_s, send_unsent
from hpcbench.submit.submission_record import (
    SweepRecord,
    folder_owner,
    list_submissions,
    read_run_specs,
    select_sweeps,
)

States = list[tuple[str, str, dict[str, RunState]]]
"""Sweep, cluster and the state of each run."""


class WatchedTree(ClusterTree):
    """A ``ClusterTree`` that reads an ok result once: nothing but another ok one replaces it."""

    def __init__(self, root: Path, superseded: Mapping[str, str]) -> None:
        """``superseded``: of runs that are measured again, the environment key of the result that is replaced."""
        super().__init__(root)
        self._superseded, self._ok = superseded, dict[str, ResultSummary]()

    def summary(self, run_id: str) -> ResultSummary | None:
        if run_id in self._ok:
            return self._ok[run_id]
        summary = super().summary(run_id)
        if summary is not None and summary.status == STATUS_OK and not self._is_superseded(run_id, summary):
            self._ok[run_id] = summary
        return summary

    def _is_superseded(self, run_id: str, summary: ResultSummary) -> bool:
        return summary.environment_key is not None and summary.environment_key == self._superseded.get(run_id)

    def stale(self) -> set[str]:
        """The runs whose result is still the one that a new measurement is to replace."""
        summaries = self.summaries(self._superseded)
        return {key for key, summary in summaries.items() if self._is_superseded(key, summary)}


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
        self.tree = WatchedTree(root, superseded)
        self.sweeps = sweeps
        self.profile = profile

    def query(self) -> dict[str, RunState]:
        """The state of every run. Failures that only the scheduler reports are recorded."""
        run_ids = dict.fromkeys(run_id for run_ids in self.sweeps.values() for run_id in run_ids)
        states = run_states(self.tree, run_ids, self.profile, time.time(), self.tree.stale())
        record_scheduler_failures(self.tree, states)
        return states

    def query_again(self, states: dict[str, RunState]) -> dict[str, RunState]:
        """``query``; the earlier ``states`` while the file system refuses for a reason that may pass."""
        return _unless_refused(self.query, states)

    def refresh_results(self, states: dict[str, RunState]) -> dict[str, RunState]:
        """``states`` with the ok results that have come since, without a query of the scheduler."""
        return _unless_refused(lambda: self._with_new_results(states), states)

    def _with_new_results(self, states: Mapping[str, RunState]) -> dict[str, RunState]:
        summaries = self.tree.summaries([key for key, state in states.items() if state.state in ACTIVE_STATES])
        stale, fresh = self.tree.stale(), dict(states)
        for key, summary in summaries.items():
            if summary.status == STATUS_OK and key not in stale:
                fresh[key] = RunState(STATUS_OK, ended_unix_s=summary.ended_at_s)
        return fresh

    def poll_period_s(self, states: Mapping[str, RunState]) -> float:
        """Pause (s) until the next query, by the schedulers of the runs that are queued or running."""
        runs = (state.submitted_run for state in states.values() if state.state in ACTIVE_STATES)
        kinds = {(run.record.scheduler, run.record.cluster) for run in runs if run is not None}
        return max((poll_period_s(*kind, self.profile) for kind in kinds), default=0.0)


def _unless_refused(read: Callable[[], dict[str, RunState]], states: dict[str, RunState]) -> dict[str, RunState]:
    try:
        return read()
    except StorageError as error:
        if error.errno not in TEMPORARY_REFUSALS:
            raise
        return states


Watched = list[tuple[SweepWatcher, dict[str, RunState]]]
"""Watchers, each with the states of its runs."""


def make_watchers(
    selected: list[tuple[str, SweepRecord]], results: ResultsTree, existing: Iterable[SweepWatcher] = ()
) -> list[SweepWatcher]:
    """Make one watcher for all selected sweeps of a cluster; ``existing`` ones are reused with their caches."""
    sweeps_by_cluster: dict[str, dict[str, list[str]]] = {}
    profiles: dict[str, str] = {}
    for cluster, record in selected:
        profiles[cluster] = record.profile
        sweeps_by_cluster.setdefault(cluster, {})[record.sweep] = record.run_ids
    watchers = {watcher.tree.root.name: watcher for watcher in existing}
    for cluster, sweeps in sweeps_by_cluster.items():
        if cluster in watchers:
            watchers[cluster].sweeps = sweeps
        else:
            root = results.cluster(cluster).root
            watchers[cluster] = SweepWatcher(root, load_cluster(profiles[cluster])[0], sweeps)
    return [watchers[cluster] for cluster in sweeps_by_cluster]


def query_sweeps(results: ResultsTree, sweeps: Sequence[str], cluster: str | None) -> States:
    watchers = make_watchers(select_sweeps(results, sweeps, cluster), results)
    return states_by_sweep([(watcher, watcher.query()) for watcher in watchers])


def states_by_sweep(watched: Watched) -> States:
    return [
        (sweep, watcher.tree.root.name, {run_id: states[run_id] for run_id in run_ids})
        for watcher, states in watched
        for sweep, run_ids in watcher.sweeps.items()
    ]


def has_active_runs(watched: Watched) -> bool:
    return any(state.state in ACTIVE_STATES for _, states in watched for state in states.values())


_PAUSE_FACTOR = 9.0
_MAX_PAUSE_S = 120.0
_RESULT_POLL_S = 0.5


def poll_pause_s(every_s: float, took_s: float) -> float:
    """The pause after a query that took ``took_s``: a slow file system or scheduler is queried less often.

    Queries take at most a tenth of the time, as long as that means no pause of more than two minutes.
    """
    return max(every_s, min(_PAUSE_FACTOR * took_s, _MAX_PAUSE_S))


def refresh_until_query(watched: Watched, took_s: float, show: Callable[[Watched], None]) -> Watched:
    """Read new results until the scheduler is to be queried again, or no run is active; return the newest states.

    Results are read often, because that costs little.

    Args:
        watched: the watchers of several clusters, each with the states of its last query.
        took_s: duration of these queries.
        show: called with the states after every reading.
    """
    every_s = max((watcher.poll_period_s(states) for watcher, states in watched), default=0.0)
    next_query_s, read_took_s = time.monotonic() + poll_pause_s(every_s, took_s), 0.0
    while has_active_runs(watched) and (pause_s := next_query_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, poll_pause_s(_RESULT_POLL_S, read_took_s)))
        began_s = time.monotonic()
        watched = [(watcher, watcher.refresh_results(states)) for watcher, states in watched]
        read_took_s = time.monotonic() - began_s
        show(watched)
    return watched


def wait_for_runs(watcher: SweepWatcher, notify: Callable[[dict[str, RunState]], None]) -> dict[str, RunState]:
    """Block until no run is waiting, pending or running; ``notify`` is called with the states after every query.

    Jobs that could not be submitted are submitted again whenever the scheduler is queried. Raises ``SubmitError`` if
    the scheduler refuses them.
    """
    began_s = time.monotonic()
    states = watcher.query()
    while True:
        notify(states)
        took_s = time.monotonic() - began_s
        ((_, states),) = refresh_until_query([(watcher, states)], took_s, lambda watched: notify(watched[0][1]))
        if not has_active_runs([(watcher, states)]):
            return states
        if any(state.state == "waiting" for state in states.values()):
            refused = send_unsent(watcher.tree, list(states), watcher.profile).refused
            if refused:
                raise refused[0]
        began_s = time.monotonic()
        states = watcher.query_again(states)


class RunDetails(NamedTuple):
    """The details of a run beside its state."""

    spec: RunSpec | None = None
    elapsed_s: float | None = None
    """Since the start of its newest attempt, until its result if it has one."""
    submitted_by: str | None = None
    """The account that owns its newest submission."""


class RunCatalog:
    """Specifications, times and owners of the runs of one cluster, read when they are first asked for."""

    def __init__(self, tree: ClusterTree) -> None:
        self._tree = tree

    @functools.cached_property
    def _submitted(self) -> dict[str, tuple[RunSpec, Path]]:
        """Specification and newest submission of each run."""
        return {
            run_id: (spec, folder)
            for folder, record in list_submissions(self._tree)
            for run_id, spec in read_run_specs(folder, record).items()
        }

    def details(self, run_id: str, state: RunState) -> RunDetails:
        """All that is known of a run."""
        spec, folder = self._submitted.get(run_id, (None, None))
        attempt = latest_attempt(self._tree.run_folder(run_id))
        start = attempt.read_start() if attempt else None
        elapsed_s = None
        if start is not None:
            ended_unix_s = time.time() if state.state in ACTIVE_STATES else state.ended_unix_s
            if ended_unix_s is None:
                # Results of earlier versions state no date.
                with contextlib.suppress(OSError):
                    ended_unix_s = self._tree.result_path(run_id).lstat().st_mtime
            if ended_unix_s is not None and ended_unix_s >= start.started_unix_s:
                elapsed_s = ended_unix_s - start.started_unix_s
        return RunDetails(spec, elapsed_s, folder_owner(folder) if folder is not None else None)

    def satisfying(self, states: Mapping[str, RunState], where: str) -> dict[str, RunState]:
        """Return the runs of ``states`` whose parameters satisfy the expression ``where``."""
        is_wanted = spec_condition(where)
        return {
            run_id: state
            for run_id, state in states.items()
            if run_id in self._submitted and is_wanted(self._submitted[run_id][0])
        }
