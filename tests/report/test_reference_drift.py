"""Drift of a machine, planted into the launches of a reference and into the runs between them."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from hpcbench.config.run_spec import REFERENCE_REPEAT
from hpcbench.report.reference_drift import drift_notes, reference_drifts, remove_drift

_MINUTE_NS = 60_000_000_000
STEP, RATE = "metrics.step_time_s.median", "metrics.samples_per_s"


def row(minute: float, step_s: float, repeat: int = 0, **columns: Any) -> dict[str, Any]:
    return {
        "cluster": "c", "sweep": "s", "status": "ok", "spec.repeat": repeat, "file.mtime_ns": int(minute * _MINUTE_NS),
        STEP: step_s, RATE: 8 / step_s, **columns,
    }  # fmt: skip


def slow(minute: float) -> float:
    """The machine becomes slower by 1 % of its first speed a minute."""
    return 1 + 0.01 * minute


@pytest.fixture
def frame() -> pl.DataFrame:
    references = [row(minute, 0.5 * slow(minute), REFERENCE_REPEAT + n) for n, minute in enumerate(range(0, 41, 10))]
    return pl.DataFrame([*references, *(row(minute, 0.2 * slow(minute)) for minute in (5, 15, 35))])


def test_drift_is_the_change_of_the_reference(frame: pl.DataFrame) -> None:
    (drift,) = reference_drifts(frame)
    assert drift.change == pytest.approx(0.4 / 1.2)
    assert drift.slowness_at(15 * _MINUTE_NS) == pytest.approx(1.15 / 1.2)
    (note,) = drift_notes([drift], removed=False)
    assert "reference of s on c: 5 launches, step time +33.3% from the first to the last" in note
    assert "--remove-drift" in note


def test_removal_gives_runs_of_one_configuration_one_step_time(frame: pl.DataFrame) -> None:
    runs = remove_drift(frame).filter(pl.col("spec.repeat") == 0)
    assert runs[STEP].to_list() == pytest.approx([0.2 * 1.2] * 3)
    assert runs[RATE].to_list() == pytest.approx([8 / 0.24] * 3)


def test_one_outlier_of_the_reference_is_no_drift() -> None:
    steps = [0.5, 0.5, 5.0, 0.5, 0.5]
    frame = pl.DataFrame([row(10 * n, step, REFERENCE_REPEAT + n) for n, step in enumerate(steps)])
    (drift,) = reference_drifts(frame)
    assert drift.change == 0
    assert drift.slowness_at(20 * _MINUTE_NS) == 1


def test_sweeps_without_a_reference_stay_as_they_are(frame: pl.DataFrame) -> None:
    other = pl.DataFrame([row(5, 0.2, sweep="t"), row(20, 0.3, sweep="t")])
    assert remove_drift(pl.concat([frame, other])).tail(2).equals(other)
    few = frame.filter(pl.col("file.mtime_ns") <= 15 * _MINUTE_NS)
    assert list(reference_drifts(few)) == []
    assert remove_drift(few).equals(few)


def test_runs_of_an_unknown_time_stay_as_they_are(frame: pl.DataFrame) -> None:
    unknown = pl.DataFrame([row(0, 0.2, **{"file.mtime_ns": None})], schema=frame.schema)
    assert remove_drift(pl.concat([frame, unknown]))[STEP].to_list()[-1] == 0.2
