"""Drift of a machine, planted into the launches of a reference and into the runs between them."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from hpcbench.config.run_spec import REFERENCE_REPEAT
from hpcbench.report.findings.findings_report import derive_findings
from hpcbench.report.reference_drift import drift_notes, reference_drifts, remove_drift
from tests.report import planted

_MINUTE_NS = 60_000_000_000
STEP, RATE = "metrics.step_time_s.median", "metrics.samples_per_s"


def at(minute: float) -> int:
    """Unix time (ns) so many minutes after the first run."""
    return 10**18 + int(minute * _MINUTE_NS)


def row(minute: float, step_s: float, repeat: int = 0, **columns: Any) -> dict[str, Any]:
    return {
        "cluster": "c", "sweep": "s", "status": "ok", "spec.repeat": repeat, "file.mtime_ns": at(minute),
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
    assert drift.slowness_at(at(15)) == pytest.approx(1.15 / 1.2)
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
    assert drift.slowness_at(at(20)) == 1


def test_sweeps_without_a_reference_stay_as_they_are(frame: pl.DataFrame) -> None:
    other = pl.DataFrame([row(5, 0.2, sweep="t"), row(20, 0.3, sweep="t")])
    assert remove_drift(pl.concat([frame, other])).tail(2).equals(other)
    few = frame.filter(pl.col("file.mtime_ns") <= at(15))
    assert list(reference_drifts(few)) == []
    assert remove_drift(few).equals(few)


def test_runs_of_an_unknown_time_stay_as_they_are(frame: pl.DataFrame) -> None:
    unknown = pl.DataFrame([row(0, 0.2) | {"file.mtime_ns": None}], schema=frame.schema)
    assert remove_drift(pl.concat([frame, unknown]))[STEP].to_list()[-1] == 0.2


def test_findings_that_depend_on_the_run_order_are_marked() -> None:
    """``ddp`` ran in the first half, ``fsdp`` in the second, which was 40 % slower; both take as long."""
    results, minutes = [], []
    for minute in range(20):
        slowness = 1.0 if minute < 10 else 1.4
        strategy = "ddp" if minute < 10 else "fsdp"
        results.append(
            planted.launch(0.1 * slowness * (1 + planted.NOISE[minute % 5]), strategy=strategy, repeat=minute % 10)
        )
        results.append(planted.launch(0.3 * slowness, strategy="single", repeat=REFERENCE_REPEAT + minute))
        minutes += [minute, minute]
    frame = planted.frame_of(results).with_columns(pl.Series("file.mtime_ns", list(map(at, minutes)), dtype=pl.Int64))
    doubts = [finding.text for finding in derive_findings(frame).of_kind("doubt")]
    assert any(text.startswith("step times of the reference changed by") for text in doubts)
    assert any(text.startswith("the answer depends on the order of the runs") for text in doubts)
    steady = derive_findings(frame.with_columns(pl.lit(1, dtype=pl.Int64).alias("file.mtime_ns")))
    assert not [finding for finding in steady.of_kind("doubt") if "order of the runs" in finding.text]
