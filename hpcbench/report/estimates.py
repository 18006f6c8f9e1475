"""What can be said of a sweep that is under way: how fast its runs end, when the last one will, what it costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpcbench.submit.state import ACTIVE
from hpcbench.submit.watch import ArrayLook, Shape, Snapshot, Timed

RATE_RUNS = 20
"""So many of the last runs make the rate."""
_FEW = 10
"""Of fewer durations than this the least and the most stand for their spread, of more the first and last tenth."""
_FREE = ACTIVE | {"planned", "skipped"}
"""States of runs that have used nothing that counts here, or nothing yet."""
_LEFT_AT_LEAST = 0.1
"""A run that has already taken longer than others did is taken to have this share of their time left."""


class Duration(NamedTuple):
    """How long finished runs took, in seconds."""

    median_s: float
    low_s: float
    high_s: float
    runs: int


class End(NamedTuple):
    """Seconds until the last run ends, between ``low_s`` and ``high_s`` as finished runs varied, and what says so."""

    left_s: float
    low_s: float
    high_s: float
    basis: str


class Cost(NamedTuple):
    """Node-hours within runs: queueing and the launches' own time are not in them."""

    used: float
    left: float | None
    """``None`` where no run has ended to tell by."""


def duration(timed: Iterable[Timed]) -> Duration | None:
    """How long the ok ones took; ``None`` where there is none."""
    took = sorted(one.took_s for one in timed if one.is_ok)
    if not took:
        return None
    edge = len(took) // 10 if len(took) >= _FEW else 0
    return Duration(statistics.median(took), took[edge], took[-1 - edge], len(took))


def runs_per_hour(snapshot: Snapshot) -> tuple[float, int] | None:
    """Runs that ended per hour up to now, and of how many: the last ``RATE_RUNS`` of submissions that are under way.

    ``None`` before two runs have ended.
    """
    under_way = {array.submission for array in snapshot.arrays if _active(array)}
    timed = (one for array in snapshot.arrays if array.submission in under_way for one in array.timed)
    ended = sorted(timed, key=lambda one: one.ended_unix_s)
    if len(ended) < 2:
        return None
    last = ended[-RATE_RUNS:]
    before = ended[-len(last) - 1].ended_unix_s if len(ended) > len(last) else min(one.began_unix_s for one in last)
    since_s = snapshot.now_unix_s - before
    return (len(last) / since_s * 3600, len(last)) if since_s > 0 else None


def end(snapshot: Snapshot) -> End | None:
    """When the last run ends if as many run at the same time as do now and runs take as long as finished ones did.

    ``None`` where nothing runs, or no run has ended and nothing was predicted.
    """
    active = [array for array in snapshot.arrays if _active(array)]
    running = sum(array.counts.get("running", 0) for array in active)
    found = [_left(array, snapshot) for array in active]
    known = [one for one in found if one is not None]
    if active and running and len(known) == len(active):
        works = [sum(one.works[place] for one in known) for place in range(3)]
        longest = max(one.longest_s for one in known)
        middle, low, high = (max(work / running, longest) for work in works)
        return End(middle, min(low, middle), max(high, middle), _basis(known, running))
    if snapshot.predicted_s is not None and active:
        return End(snapshot.predicted_s, snapshot.predicted_s, snapshot.predicted_s, "predicted")
    return None


def cost(snapshot: Snapshot) -> Cost:
    """Node-hours that finished runs have used and the others are likely to, each as the newest of its array."""
    used, left = 0.0, 0.0
    unknown = False
    for array in snapshot.arrays:
        if array.shape is None:
            continue
        took = [one.took_s for one in array.timed]
        ended = sum(count for state, count in array.counts.items() if state not in _FREE)
        if took:
            used += array.shape.nodes * max(ended, len(took)) * statistics.fmean(took)
        rest = _left(array, snapshot) if _active(array) else None
        if rest is not None:
            left += array.shape.nodes * rest.works[0]
        elif _active(array):
            unknown = True
    return Cost(used / 3600, None if unknown else left / 3600)


class _Left(NamedTuple):
    """What an array has still to do."""

    works: tuple[float, float, float]
    """Seconds of runs one after another: as the median, at least, at most."""
    longest_s: float
    """What the run that began last has left."""
    runs: int
    """How many finished runs it goes by."""
    is_own: bool
    """They had the same shape."""


def _active(array: ArrayLook) -> int:
    return sum(array.counts.get(state, 0) for state in ACTIVE)


def _left(array: ArrayLook, snapshot: Snapshot) -> _Left | None:
    found = _like(array.shape, snapshot.arrays)
    if found is None:
        return None
    took, is_own = found
    running = array.counts.get("running", 0)
    queued = _active(array) - running
    ages = [max(0.0, snapshot.now_unix_s - since) for since in array.running_since_unix_s[:running]]
    # Of runs that have left no marker nothing is known; they are taken to be half done.
    unknown = running - len(ages)
    works = [
        queued * each + sum(_rest(each, age) for age in ages) + unknown * each / 2
        for each in (took.median_s, took.low_s, took.high_s)
    ]
    newest = min(ages, default=took.median_s / 2)
    longest = took.median_s if queued else (_rest(took.median_s, newest) if running else 0.0)
    return _Left((works[0], works[1], works[2]), longest, took.runs, is_own)


def _rest(took_s: float, age_s: float) -> float:
    return max(took_s - age_s, _LEFT_AT_LEAST * took_s)


def _like(shape: Shape | None, arrays: Sequence[ArrayLook]) -> tuple[Duration, bool] | None:
    """How long runs of ``shape`` took, or, where none has ended, those of all shapes."""
    same = duration(one for array in arrays if array.shape == shape for one in array.timed)
    if same is not None:
        return same, True
    others = duration(one for array in arrays for one in array.timed)
    return (others, False) if others is not None else None


def _basis(known: Sequence[_Left], running: int) -> str:
    runs = min(one.runs for one in known)
    if not all(one.is_own for one in known):
        finished = "finished runs of other shapes"
    elif runs == 1:
        finished = "the finished run of the same shape"
    else:
        finished = f"the {runs} finished runs of the same shape"
    return f"if {running} run at a time and take as long as {finished}"
