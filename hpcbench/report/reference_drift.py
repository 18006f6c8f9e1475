"""Drift of a machine while a sweep ran, from the launches of the sweep's reference, and its removal from the figures.

The reference is one configuration that runs again and again between the others. Its step time, relative to its median,
is the machine's slowness at that time; between two launches it is interpolated.

    slowness  1.1 |        .-o-.
              1.0 | o-----o     `o-----o      o: a launch of the reference
                  +----------------------> time at which results were put in place
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import polars as pl

from hpcbench.config.run_spec import REFERENCE_REPEAT
from hpcbench.results.schema import STATUS_OK, StepTimeStatistics
from hpcbench.units import pluralize

MIN_LAUNCHES = 3
"""Fewer launches of a reference show no drift."""
STEP_TIME = "metrics.step_time_s.median"
_TIME = "file.mtime_ns"
DRIFT_COLUMNS = ("cluster", "sweep", "status", "spec.repeat", _TIME, STEP_TIME)
"""Columns that a frame must have."""
_PHASES = tuple(
    f"metrics.{name}_s"
    for name in ("compute", "forward", "backward", "optimizer", "comm", "exposed_comm", "wire", "wait", "data")
)
_DURATIONS = (
    *(f"metrics.step_time_s.{name}" for name in StepTimeStatistics.__struct_fields__), *_PHASES, "metrics.timed_s",
    "metrics.epoch_time_s", "metrics.time_to_accuracy_s", "metrics.time_to_accuracy_with_evaluation_s",
)  # fmt: skip
_RATES = tuple(
    f"metrics.{name}"
    for name in ("samples_per_s", "tokens_per_s", "tokens_per_s_per_device", "flops_per_s", "mfu", "hfu")
)


class ReferenceDrift(NamedTuple):
    """The reference's launches of one sweep on one cluster, in the order of time."""

    cluster: str
    sweep: str
    times_ns: list[int]
    """Times at which the results were written, in nanoseconds since 1970."""
    slowness: list[float]
    """The step times over their median."""

    @property
    def change(self) -> float:
        """Change of the step time from the first to the last launch: the median slope (Theil, Sen) times the time."""
        points = list(zip(self.times_ns, self.slowness, strict=True))
        slopes = [
            (later - earlier) / (end - start)
            for (start, earlier), (end, later) in itertools.combinations(points, 2)
            if end > start
        ]
        return statistics.median(slopes) * (self.times_ns[-1] - self.times_ns[0]) if slopes else 0.0

    def slowness_at(self, time_ns: int) -> float:
        """The slowness at a time: linear between two launches, constant before the first and after the last.

        The median of three launches in a row stands for each: one outlier is no drift.
        """
        smooth = [
            statistics.median(self.slowness[max(0, number - 1) : number + 2]) if 0 < number < len(self.slowness) - 1
            else self.slowness[number]
            for number in range(len(self.slowness))
        ]  # fmt: skip
        points = list(zip(self.times_ns, smooth, strict=True))
        for (start, before), (end, after) in itertools.pairwise(points):
            if start <= time_ns < end:
                return before + (after - before) * (time_ns - start) / (end - start)
        return smooth[0] if time_ns < self.times_ns[0] else smooth[-1]


def reference_drifts(frame: pl.DataFrame) -> Iterator[ReferenceDrift]:
    """The drift of every sweep in ``frame`` that has enough launches of a reference.

    Args:
        frame: with ``DRIFT_COLUMNS``.
    """
    references = frame.filter(
        (pl.col("spec.repeat") >= REFERENCE_REPEAT) & (pl.col("status") == STATUS_OK) & (pl.col(STEP_TIME) > 0)
        & (pl.col(_TIME) > 0)
    )  # fmt: skip
    for (cluster, sweep), group in references.sort(_TIME).group_by("cluster", "sweep", maintain_order=True):
        if len(group) >= MIN_LAUNCHES:
            step_times: list[float] = group[STEP_TIME].to_list()
            middle = statistics.median(step_times)
            yield ReferenceDrift(
                str(cluster), str(sweep), group[_TIME].to_list(), [value / middle for value in step_times]
            )


def remove_drift(frame: pl.DataFrame) -> pl.DataFrame:
    """``frame`` with step times over the slowness of the machine at that time, and rates times it.

    Sweeps without a reference, and runs of an unknown time, stay as they are.
    """
    drifts = {(drift.cluster, drift.sweep): drift for drift in reference_drifts(frame)}
    if not drifts:
        return frame
    keys = frame.select("cluster", "sweep", _TIME).rows()
    slowness = pl.Series(
        [
            drifts[cluster, sweep].slowness_at(time_ns) if (cluster, sweep) in drifts and time_ns else 1.0
            for cluster, sweep, time_ns in keys
        ],
        dtype=pl.Float64,
    )
    present = set(frame.columns)
    return frame.with_columns(
        *(pl.col(name) / slowness for name in _DURATIONS if name in present),
        *(pl.col(name) * slowness for name in _RATES if name in present),
    )


def drift_notes(drifts: Sequence[ReferenceDrift], *, removed: bool) -> list[str]:
    """A sentence about each reference for readers of a table."""
    notes = []
    for drift in drifts:
        low, high = min(drift.slowness) - 1, max(drift.slowness) - 1
        launches = pluralize(len(drift.slowness), "launch", "launches")
        notes.append(
            f"reference of {drift.sweep} on {drift.cluster}: {launches}, step time {drift.change:+.1%} from the first "
            f"to the last, {low:+.1%} to {high:+.1%} of its median; "
            + ("this drift is removed from the figures" if removed else "--remove-drift removes it")
        )
    return notes
