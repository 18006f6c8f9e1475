"""Repeated queries of sweeps in progress, snapshots of them for the live screen, and waiting for their end.

SweepWatcher.query()  -->  states  -->  SweepWatcher.snapshots(states)  -->  live screen
SweepWatcher.refresh_results(states)  reads results between two queries
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from hpcbench.config.run_spec import RunSpec, read_task, run_label
from hpcbench.errors import HpcbenchError, StorageError
from hpcbench.fileio import TEMPORARY_REFUSALS
from hpcbench.results.attempts import Attempt, latest_start
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK, ResultSummary
from hpcbench.submit.run_state import ACTIVE_STATES, RunState, record_scheduler_failures, run_states
from hpcbench.submit.scheduler import HasSchedulerSettings, poll_period_s, scheduler_class, send_unsent
from hpcbench.submit.submission_record import JobArray, list_submissions

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
        self._ended: dict[str, float] = {}
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
        if head != self._heads.get(run_id):
            self._heads[run_id] = head
            with contextlib.suppress(OSError):
                self._ended[run_id] = os.lstat(self.root / "runs" / run_id[:2] / run_id / "result.json").st_mtime
        return head

    def cached_summary(self, run_id: str) -> ResultSummary | None:
        """Return the summary as it was read last; ``None`` if none was."""
        return self._heads.get(run_id)

    def ended_unix_s(self, run_id: str) -> float | None:
        """Return the time at which the result that counts was written (Unix seconds); ``None`` if none was read."""
        return self._ended.get(run_id) if run_id in self._heads else None


MAX_SHOWN_FAILURES = 5
_MAX_TIMED_RUNS = 50
"""Number of an array's newest runs that are timed: each is a small file, read once."""


class TimedRun(msgspec.Struct, frozen=True, gc=False):
    """An execution that has ended: Unix times (s) of its start marker and of its result."""

    began_unix_s: float
    ended_unix_s: float
    is_ok: bool = True

    @property
    def took_s(self) -> float:
        """The time from the start of the ranks to the result; 0 if the clocks of two machines differ by more."""
        return max(0.0, self.ended_unix_s - self.began_unix_s)


class ArrayShape(msgspec.Struct, frozen=True):
    """The resources of each job of an array."""

    nodes: int
    ranks: int
    partition: str | None = None


class ArraySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a sweep whose newest submission is in one array; without a ``name``: that are in no submission."""

    name: str = ""
    """``<submission>/<number>``."""
    job_id: str | None = None
    """The scheduler's, of the whole array."""
    shape: ArrayShape | None = None
    counts: Mapping[str, int]
    """Number of runs by state."""
    timed: tuple[TimedRun, ...] = ()
    """The newest runs that have ended, the last one last."""
    running_since_unix_s: tuple[float, ...] = ()
    """The start times of running runs, from their start markers."""

    @property
    def submission(self) -> str:
        return self.name.partition("/")[0]


class FailedRun(msgspec.Struct, frozen=True):
    """A run that failed."""

    run_id: str
    state: str
    label: str
    """Strategy, model and sizes as text; empty if they are unknown."""
    reason: str
    ended_unix_s: float | None


class SweepSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep on a cluster as it was at ``now_unix_s``."""

    sweep: str
    cluster: str
    now_unix_s: float
    arrays: tuple[ArraySnapshot, ...]
    failures: tuple[FailedRun, ...] = ()
    """The newest ones, the last one last."""
    failed: int = 0
    """Number of all failed runs."""
    silence: str = ""
    """The reason why the scheduler did not answer; empty if it did."""
    predicted_s: float | None = None
    """Seconds until the last run ends, by the oracle."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of runs by state."""
        total: Counter[str] = Counter()
        for array in self.arrays:
            total.update(array.counts)
        return dict(total)


class SweepWatcher:
    """Queries the sweeps of one cluster again and again; each query asks the scheduler once, about all of them."""

    def __init__(
        self,
        root: Path,
        profile: HasSchedulerSettings,
        sweeps: Mapping[str, Sequence[str]],
        superseded: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``sweeps``: the ``run_id``s by sweep. ``superseded``: for runs that are measured again, the environment key
        of the result that does not count."""
        self.tree = IncrementalClusterTree(root, superseded=superseded)
        self.sweeps = sweeps
        self.predicted_s: dict[str, float] = {}
        """Predicted seconds until a sweep's last run ends, by sweep; shown until runs have ended."""
        self._profile, self._superseded = profile, superseded
        self._timed: dict[tuple[str, float], TimedRun | None] = {}
        self._since: dict[str, float] = {}
        self._labels: dict[str, str] = {}
        self._jobs: dict[str, str] = {}

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

    def snapshots(self, states: Mapping[str, RunState]) -> list[SweepSnapshot]:
        """The contents of the live screen, sweep by sweep."""
        self._since = {key: since for key, since in self._since.items() if states[key].state == "running"}
        newest: dict[str, tuple[str, JobArray]] = {}
        for folder, record in list_submissions(self.tree):
            for array in record.arrays:
                newest |= dict.fromkeys(states.keys() & array.run_ids, (folder.name, array))
        return [self._snapshot(sweep, run_ids, states, newest) for sweep, run_ids in self.sweeps.items()]

    def _snapshot(
        self,
        sweep: str,
        run_ids: Sequence[str],
        states: Mapping[str, RunState],
        newest: Mapping[str, tuple[str, JobArray]],
    ) -> SweepSnapshot:
        """``newest``: the folder and array of each run's newest submission."""
        by_array: dict[tuple[str, int], list[str]] = {}
        for run_id in run_ids:
            folder, array = newest.get(run_id, ("", None))
            by_array.setdefault((folder, array.number if array else 0), []).append(run_id)
        # Arrays by submission and number, runs that were never submitted at the end.
        ordered = sorted(by_array.items(), key=lambda entry: (not entry[0][0], *entry[0]))
        arrays = [self._array(array_runs, states, newest.get(array_runs[0])) for _, array_runs in ordered]
        failed = [key for key in run_ids if states[key].state not in (STATUS_OK, "planned", *ACTIVE_STATES)]
        latest = sorted(failed, key=lambda key: self._ended(key, states[key]) or 0.0)[-MAX_SHOWN_FAILURES:]
        reasons = (states[key].reason for key in run_ids if states[key].state in ACTIVE_STATES)
        return SweepSnapshot(
            sweep=sweep,
            cluster=self.tree.root.name,
            now_unix_s=time.time(),
            arrays=tuple(arrays),
            failures=tuple(self._failure(key, states[key]) for key in latest),
            failed=len(failed),
            predicted_s=self.predicted_s.get(sweep),
            silence=next((reason for reason in reasons if "scheduler does not answer" in reason), ""),
        )

    def _array(
        self, run_ids: Sequence[str], states: Mapping[str, RunState], newest: tuple[str, JobArray] | None
    ) -> ArraySnapshot:
        counts = Counter(states[run_id].state for run_id in run_ids)
        if newest is None:
            return ArraySnapshot(counts=counts)
        folder, array = newest
        name = f"{folder}/{array.number}"
        ended: list[tuple[float, str]] = []
        for run_id in run_ids:
            ended_unix_s = self.tree.ended_unix_s(run_id)
            if ended_unix_s is not None and states[run_id].state not in ACTIVE_STATES:
                ended.append((ended_unix_s, run_id))
        latest = sorted(ended, key=lambda entry: entry[0])[-_MAX_TIMED_RUNS:]
        timed = [self._timed_run(run_id, end_unix_s, states[run_id]) for end_unix_s, run_id in latest]
        running = [run_id for run_id in run_ids if states[run_id].state == "running"][:_MAX_TIMED_RUNS]
        since = [self._running_since(run_id) for run_id in running]
        for run in (states[run_id].submitted_run for run_id in run_ids):
            if run is not None and run.job_id and scheduler_class(run.record.scheduler, run.record.cluster).has_arrays:
                self._jobs[name] = run.job_id.partition("_")[0]
                break
        return ArraySnapshot(
            name=name,
            job_id=self._jobs.get(name),
            shape=ArrayShape(array.nodes, array.ranks, array.partition),
            counts=counts,
            timed=tuple(run for run in timed if run is not None),
            running_since_unix_s=tuple(since_unix_s for since_unix_s in since if since_unix_s is not None),
        )

    def _timed_run(self, run_id: str, ended_unix_s: float, state: RunState) -> TimedRun | None:
        if (run_id, ended_unix_s) not in self._timed:
            head = self.tree.cached_summary(run_id)
            marker = Attempt(self.tree.run_folder(run_id), head.attempt).read_start() if head else None
            self._timed[run_id, ended_unix_s] = (
                TimedRun(marker.started_unix_s, ended_unix_s, state.state == STATUS_OK) if marker else None
            )
        return self._timed[run_id, ended_unix_s]

    def _running_since(self, run_id: str) -> float | None:
        if run_id not in self._since:
            latest = latest_start(self.tree.run_folder(run_id))
            if latest is None:
                return None
            self._since[run_id] = latest[1].started_unix_s
        return self._since[run_id]

    def _failure(self, run_id: str, state: RunState) -> FailedRun:
        if run_id not in self._labels:
            spec = self._spec(run_id, state)
            self._labels[run_id] = run_label(spec) if spec else ""
        return FailedRun(run_id, state.state, self._labels[run_id], state.reason, self._ended(run_id, state))

    def _spec(self, run_id: str, state: RunState) -> RunSpec | None:
        """The specification from the result, or from the task file if the run left no result."""
        with contextlib.suppress(HpcbenchError, msgspec.MsgspecError):
            result = self.tree.read_result(run_id)
            if result is not None:
                return result.spec
            if (run := state.submitted_run) is not None:
                return read_task(run.folder / f"{run.array.number}.jsonl", run.index)[1].spec
        return None

    def _ended(self, run_id: str, state: RunState) -> float | None:
        return self.tree.ended_unix_s(run_id) or state.ended_unix_s


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
