"""Snapshots of sweeps in progress: runs by array and state, durations of finished runs, and the latest failures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from hpcbench.config.run_spec import RunSpec, read_task, run_label
from hpcbench.errors import HpcbenchError
from hpcbench.results.attempts import Attempt, latest_attempt
from hpcbench.results.incremental_tree import IncrementalClusterTree
from hpcbench.results.schema import STATUS_OK
from hpcbench.submit.run_state import ACTIVE_STATES, RunState, record_scheduler_failures, run_states
from hpcbench.submit.scheduler_settings import HasSchedulerSettings
from hpcbench.submit.submission_record import list_submissions

MAX_SHOWN_FAILURES = 5
_MAX_TIMED_RUNS = 50
"""So many of an array's newest runs are asked how long they took; it is one small file each, read once."""


class TimedRun(msgspec.Struct, frozen=True, gc=False):
    """An execution that has ended: Unix times (s) of its start marker and of its result."""

    began_unix_s: float
    ended_unix_s: float
    is_ok: bool = True

    @property
    def took_s(self) -> float:
        """From the start of the ranks to the result; clocks of two machines may differ by more than that."""
        return max(0.0, self.ended_unix_s - self.began_unix_s)


class ArrayShape(msgspec.Struct, frozen=True):
    """What the jobs of an array ask for."""

    nodes: int
    ranks: int
    partition: str | None = None


class ArraySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a sweep that were submitted last with one array; without a ``name``: with none."""

    name: str = ""
    """``<submission>/<number>``."""
    job_id: str | None = None
    """The scheduler's, of the whole array."""
    shape: ArrayShape | None = None
    counts: Mapping[str, int]
    """How many of its runs are in each state."""
    timed: tuple[TimedRun, ...] = ()
    """The newest of those that have ended, the last one last."""
    running_since_unix_s: tuple[float, ...] = ()
    """Of those running runs that have left a start marker."""

    @property
    def submission(self) -> str:
        """The submission that it belongs to."""
        return self.name.partition("/")[0]


class FailedRun(msgspec.Struct, frozen=True):
    """A run that did not end well."""

    run_id: str
    state: str
    label: str
    """Empty where nothing says what the run is."""
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
    """How many there are in all."""
    silence: str = ""
    """Why the scheduler did not answer."""
    predicted_s: float | None = None
    """Seconds until the last run ends, as something else than finished runs has it."""

    @property
    def counts(self) -> dict[str, int]:
        """How many runs are in each state."""
        total: Counter[str] = Counter()
        for array in self.arrays:
            total.update(array.counts)
        return dict(total)


class SweepWatcher:
    """Looks at the sweeps of one cluster again and again; each look asks the scheduler once, about all of them."""

    def __init__(
        self,
        root: Path,
        profile: HasSchedulerSettings,
        sweeps: Mapping[str, Sequence[str]],
        clock: Callable[[], float] = time.time,
        superseded: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``superseded``: of runs that are measured again, the environment key of the result that does not count."""
        self.tree = IncrementalClusterTree(root, superseded=superseded)
        self.sweeps = sweeps
        self.predicted_s: dict[str, float] = {}
        """Per sweep, where somebody has predicted how long it takes: what is shown until runs have ended."""
        self._profile, self._clock, self._superseded = profile, clock, superseded
        self._timed: dict[tuple[str, float], TimedRun | None] = {}
        self._since: dict[str, float] = {}
        self._labels: dict[str, str] = {}
        self._jobs: dict[tuple[str, int], str] = {}

    def ask(self) -> dict[str, RunState]:
        """The state of every run; what only the scheduler knows is written down on the way."""
        wanted = dict.fromkeys(run_id for run_ids in self.sweeps.values() for run_id in run_ids)
        states = run_states(self.tree, wanted, self._profile, self._clock(), self._stale())
        if any(state.ended_unix_s is not None for state in states.values()):
            record_scheduler_failures(self.tree, states)
        return states

    def look(self, states: Mapping[str, RunState]) -> dict[str, RunState]:
        """``states`` with the ok results that have come since, without asking the scheduler."""
        heads = self.tree.summaries([key for key, state in states.items() if state.state in ACTIVE_STATES])
        done = {key for key, head in heads.items() if head.status == STATUS_OK} - self._stale()
        return {key: RunState(STATUS_OK) if key in done else state for key, state in states.items()}

    def _stale(self) -> set[str]:
        """Runs whose result is still the one that is being replaced."""
        heads = self.tree.summaries(self._superseded)
        return {key for key, head in heads.items() if self.tree.is_superseded(key, head)}

    def snapshots(self, states: Mapping[str, RunState]) -> list[SweepSnapshot]:
        """Everything that there is to show about ``states``, sweep by sweep."""
        places = self._places(states)
        self._since = {key: since for key, since in self._since.items() if states[key].state == "running"}
        return [self._snapshot(sweep, run_ids, states, places) for sweep, run_ids in self.sweeps.items()]

    def _snapshot(
        self, sweep: str, run_ids: Sequence[str], states: Mapping[str, RunState], places: Mapping[str, _ArrayOfRun]
    ) -> SweepSnapshot:
        grouped: dict[tuple[str, int], list[str]] = {}
        for run_id in run_ids:
            place = places.get(run_id)
            grouped.setdefault((place.folder, place.number) if place else ("", 0), []).append(run_id)
        failed = [key for key in run_ids if states[key].state not in (STATUS_OK, "planned", *ACTIVE_STATES)]
        newest = sorted(failed, key=lambda key: self._ended(key, states[key]) or 0.0)[-MAX_SHOWN_FAILURES:]
        reasons = (states[key].reason for key in run_ids if states[key].state in ACTIVE_STATES)
        return SweepSnapshot(
            sweep=sweep,
            cluster=self.tree.root.name,
            now_unix_s=self._clock(),
            arrays=tuple(self._array(key, grouped[key], states, places) for key in sorted(grouped, key=_array_order)),
            failures=tuple(self._failure(key, states[key]) for key in newest),
            failed=len(failed),
            predicted_s=self.predicted_s.get(sweep),
            silence=next((reason for reason in reasons if "scheduler does not answer" in reason), ""),
        )

    def _places(self, states: Mapping[str, RunState]) -> dict[str, _ArrayOfRun]:
        """Per run the newest submission that it is in."""
        found = {}
        for folder, record in list_submissions(self.tree):
            for array in record.arrays:
                shape = ArrayShape(array.nodes, array.ranks, array.partition)
                for run_id in states.keys() & array.run_ids:
                    found[run_id] = _ArrayOfRun(folder.name, array.number, shape)
        return found

    def _array(
        self,
        key: tuple[str, int],
        run_ids: Sequence[str],
        states: Mapping[str, RunState],
        places: Mapping[str, _ArrayOfRun],
    ) -> ArraySnapshot:
        counted = Counter(states[run_id].state for run_id in run_ids)
        if not key[0]:
            return ArraySnapshot(counts=counted)
        ended = [(run_id, at) for run_id in run_ids if (at := self.tree.ended_unix_s(run_id)) is not None]
        ended = [(run_id, at) for run_id, at in ended if states[run_id].state not in ACTIVE_STATES]
        newest = sorted(ended, key=lambda entry: entry[1])[-_MAX_TIMED_RUNS:]
        timed = (self._took(run_id, at, states[run_id]) for run_id, at in newest)
        running = (run_id for run_id in run_ids if states[run_id].state == "running")
        since = (self._running_since(run_id) for run_id, _ in zip(running, range(_MAX_TIMED_RUNS), strict=False))
        tickets = (ticket for run_id in run_ids if (ticket := states[run_id].ticket) is not None)
        if job_id := next((one.job_id for one in tickets if one.record.scheduler == "slurm" and one.job_id), None):
            self._jobs[key] = job_id.partition("_")[0]
        return ArraySnapshot(
            name=f"{key[0]}/{key[1]}",
            job_id=self._jobs.get(key),
            shape=places[run_ids[0]].shape,
            counts=counted,
            timed=tuple(one for one in timed if one is not None),
            running_since_unix_s=tuple(one for one in since if one is not None),
        )

    def _took(self, run_id: str, ended_unix_s: float, state: RunState) -> TimedRun | None:
        if (run_id, ended_unix_s) not in self._timed:
            head = self.tree.cached_summary(run_id)
            marker = Attempt(self.tree.run_folder(run_id), head.attempt).read_start() if head else None
            self._timed[run_id, ended_unix_s] = (
                TimedRun(marker.started_unix_s, ended_unix_s, state.state == STATUS_OK) if marker else None
            )
        return self._timed[run_id, ended_unix_s]

    def _running_since(self, run_id: str) -> float | None:
        if run_id not in self._since:
            attempt = latest_attempt(self.tree.run_folder(run_id))
            marker = attempt.read_start() if attempt else None
            if marker is None:
                return None
            self._since[run_id] = marker.started_unix_s
        return self._since[run_id]

    def _failure(self, run_id: str, state: RunState) -> FailedRun:
        if run_id not in self._labels:
            spec = self._spec(run_id, state)
            self._labels[run_id] = run_label(spec) if spec else ""
        return FailedRun(run_id, state.state, self._labels[run_id], state.reason, self._ended(run_id, state))

    def _spec(self, run_id: str, state: RunState) -> RunSpec | None:
        """Of the result, or of the task file where the run left none."""
        try:
            result = self.tree.read_result(run_id)
            if result is not None:
                return result.spec
            if state.ticket is not None:
                ticket = state.ticket
                return read_task(ticket.folder / f"{ticket.array.number}.jsonl", ticket.index)[1].spec
        except (HpcbenchError, msgspec.MsgspecError):
            pass
        return None

    def _ended(self, run_id: str, state: RunState) -> float | None:
        return self.tree.ended_unix_s(run_id) or state.ended_unix_s


class _ArrayOfRun(msgspec.Struct, frozen=True, gc=False):
    folder: str
    number: int
    shape: ArrayShape


def _array_order(key: tuple[str, int]) -> tuple[bool, str, int]:
    """Arrays by submission and number, what was never submitted at the end."""
    return (not key[0], *key)
