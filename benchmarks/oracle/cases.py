"""The measured configurations of both reruns with predictions, so that every score can be recomputed from the tree.

    python -m benchmarks.oracle.cases            write paradl_cases.json and ddlbench_cases.json
    python -m benchmarks.oracle.cases --check    compare the oracle's predictions with those in the files

Measured times come from ``docs/reruns``: the launches from ``*-oracle.json``, and those of one device,
which it leaves out, from ``*.parquet``. Predictions are made from the committed calibration alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars

from benchmarks.oracle.registered import HERE, Score
from benchmarks.rerun import fits
from benchmarks.testbed import CLUSTER, RATE_MBIT, Testbed
from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.errors import ConfigError
from hpcbench.fileio import make_folder, write_atomic
from hpcbench.oracle.baselines import BASELINES, choice_results
from hpcbench.oracle.calibration.calibration_store import read_calibrations
from hpcbench.oracle.scoring import MeasuredConfiguration, PredictorResult, ValidationCase
from hpcbench.report.oracle_validation import ORACLE_NAME, ClusterForecasts, baseline_predictor, oracle_predictor
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import STATUS_OK

RERUNS = HERE.parents[1] / "docs" / "reruns"
SWEEPS = ("paradl-small", "ddlbench-small")
BLIND, CALIBRATED = "blind", "calibrated"
"""The oracle from the profile alone, and from a calibration without any shape of the sweep."""
_SAME = 0.002
"""Relative difference up to which two predictions are the same one on another processor."""
_SHARED = ("precision", "optimizer", "momentum", "weight_decay", "warmup_steps", "steps", "profile_steps", "data",
           "time_limit_min")  # fmt: skip
"""Parameters that the data table leaves out, since all runs of a sweep share them."""


class RerunCase(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A measured configuration of a rerun with its predictions."""

    config_id: str
    spec: RunSpec
    predicted_step_time_s: float | None
    """The oracle's, from the calibration alone."""
    measured_step_times_s: list[float]
    """Median step time of every launch."""
    run_ids: list[str] = []
    """Of the launches, where slices of a score add some to those of earlier slices."""
    status: str = STATUS_OK
    figures: dict[str, float] = {}
    """Measured parts of the step and memory, as ``MeasuredConfiguration``."""
    figures_noise: dict[str, float] = {}
    said: dict[str, PredictorResult] = {}
    """By predictor; where one says nothing it is left out."""

    @classmethod
    def of(cls, case: ValidationCase) -> RerunCase:
        """Return ``case`` as the file has it; constant choices follow from it."""
        measured, said = case.measured, case.said
        known = {name: result for name, result in said.items() if name == ORACLE_NAME or result.step_time_s is not None}
        return cls(
            config_id=measured.config_id, spec=measured.spec, predicted_step_time_s=said[ORACLE_NAME].step_time_s,
            measured_step_times_s=measured.launches_s, run_ids=measured.run_ids, status=measured.status,
            figures=measured.figures, figures_noise=measured.figures_noise, said=known,
        )  # fmt: skip


class RerunCases(msgspec.Struct, kw_only=True):
    """The file of one rerun."""

    sweep: str
    sources: list[str]
    """What the predictions were made from."""
    cases: list[RerunCase]

    def validation_cases(self) -> list[ValidationCase]:
        """Return the cases as ``hpcbench.oracle.scoring`` takes them, with the constant choices."""
        cases = []
        for case in self.cases:
            choices = choice_results(case.spec.strategy, case.said[ORACLE_NAME].fits)
            cases.append(ValidationCase(_measured(case), {**case.said, **choices}))
        return cases


def with_earlier_launches(now: RerunCases, before: RerunCases) -> RerunCases:
    """Return ``now`` with the launches of ``before`` that it lacks. Parts of a step stay those of the later slice.

    Raises:
        ConfigError: The predictions are others than those of ``before``.
    """
    if now.sources != before.sources:
        raise ConfigError(
            f"earlier launches were predicted from {'; '.join(before.sources)}, these from {'; '.join(now.sources)}",
            hint="remove the file of the earlier cases, or measure with their predictions",
        )
    merged = {case.config_id: case for case in before.cases}
    for later in now.cases:
        earlier = merged.get(later.config_id)
        launches: dict[str, float] = {}
        for case in (earlier, later):
            if case is not None and case.status == STATUS_OK:
                launches |= zip(case.run_ids, case.measured_step_times_s, strict=True)
        merged[later.config_id] = msgspec.structs.replace(
            later if later.status == STATUS_OK or earlier is None else earlier,
            run_ids=[*launches] or later.run_ids,
            measured_step_times_s=[*launches.values()],
        )
    return msgspec.structs.replace(now, cases=[*merged.values()])


def path_of(sweep: str, folder: Path = HERE) -> Path:
    """The file of a rerun."""
    return folder / f"{sweep.removesuffix('-small')}_cases.json"


def read(path: Path) -> RerunCases:
    """Read a file of cases."""
    return msgspec.json.decode(path.read_bytes(), type=RerunCases)


def _measured(case: RerunCase) -> MeasuredConfiguration:
    return MeasuredConfiguration(
        cluster=CLUSTER, config_id=case.config_id, spec=case.spec, status=case.status,
        launches_s=case.measured_step_times_s, figures=case.figures, figures_noise=case.figures_noise,
    )  # fmt: skip


def measured_cases(sweep: str, folder: Path = RERUNS) -> list[MeasuredConfiguration]:
    """Return the measured configurations of a rerun as the committed files have them."""
    document = json.loads((folder / f"{sweep}-oracle.json").read_text())
    fields = MeasuredConfiguration.__struct_fields__
    known = [
        msgspec.convert({key: value for key, value in case.items() if key in fields}, MeasuredConfiguration)
        for case in document["cases"]
    ]
    shared = {name: value for name, value in document["cases"][0]["spec"].items() if name in _SHARED}
    names = {case.config_id for case in known}
    rows = polars.read_parquet(folder / f"{sweep}.parquet").to_dicts()
    return [*known, *(_measured_row(row, shared) for row in rows if row["config_id"] not in names)]


def _measured_row(row: dict[str, Any], shared: dict[str, Any]) -> MeasuredConfiguration:
    """A row of the data table, whose one or two launches its bounds name."""
    own = {name: row[name] for name in RunSpec.__struct_fields__ if row.get(name) is not None}
    momentum = shared.get("momentum", 0.0)
    spec = msgspec.convert({**shared, "momentum": momentum, **own, "options": json.loads(row["options"])}, RunSpec)
    assert config_id(spec) == row["config_id"], f"{row['config_id']}: the table leaves out a parameter"
    launches = [row["low_s"], row["high_s"]] if row["launches"] == 2 else [row["step_time_s"]]
    return MeasuredConfiguration(
        cluster=CLUSTER, config_id=row["config_id"], spec=spec, status=row["status"],
        launches_s=launches if row["status"] == STATUS_OK else [],
        figures={"peak_memory_bytes": float(row["peak_memory_bytes"])} if row["status"] == STATUS_OK else {},
    )  # fmt: skip


def predicted_cases(sweep: str, measured: Sequence[MeasuredConfiguration], *, baselines: bool) -> RerunCases:
    """Predict the configurations of a rerun from the committed calibration, in a folder of its own."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        bed = Testbed(Path(folder))
        bed.describe(RATE_MBIT)
        tree = ResultsTree(bed.results)
        fits.lend(tree.cluster(CLUSTER))
        os.chdir(folder)
        try:
            forecasts = ClusterForecasts(tree)
            predictors = {ORACLE_NAME: oracle_predictor(forecasts, learns=False)}
            if baselines:
                predictors |= {name: baseline_predictor(forecasts, rule, measured) for name, rule in BASELINES.items()}
            cases = [
                RerunCase.of(ValidationCase(case, {name: predict(case) for name, predict in predictors.items()}))
                for case in measured
            ]
            sources = sorted({machine.source for machine in forecasts.machines()})
        finally:
            os.chdir(before)
    return RerunCases(sweep=sweep, sources=sources, cases=cases)


def write(sweep: str) -> Path:
    """Write the file of a rerun."""
    found, path = predicted_cases(sweep, measured_cases(sweep), baselines=True), path_of(sweep)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return path


def forecasts_by_kind(score: Score, work: Path) -> dict[str, ClusterForecasts]:
    """Return the oracle's forecasts from all calibrations of a score, from those without its shapes, and from none.

    Their trees are made in ``work``; they need the box's profile in the current folder.
    """
    kinds: dict[str, ClusterForecasts] = {}
    for name in (ORACLE_NAME, CALIBRATED, BLIND):
        shutil.rmtree(work / name, ignore_errors=True)
        tree = ResultsTree(work / name)
        target = tree.cluster(CLUSTER).path("calibrations")
        make_folder(target)
        for path in score.calibrations.glob("*.json"):
            shutil.copy(path, target)
        for stored in read_calibrations(tree.cluster(CLUSTER), CLUSTER)[0]:
            if name == BLIND or (name == CALIBRATED and stored.calibration.machine.measured is not None):
                stored.path.unlink()
        kinds[name] = ClusterForecasts(tree, score.sweep.parent)
    return kinds


def with_present_predictions(score: Score, cases: Sequence[ValidationCase]) -> list[ValidationCase]:
    """Return ``cases`` with the oracle's predictions as it makes them now from the score's calibrations."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        bed = Testbed(Path(folder), score.shape)
        bed.describe(score.scored_mbit)
        os.chdir(folder)
        try:
            kinds = forecasts_by_kind(score, Path(folder))
            predictors = {name: oracle_predictor(own, learns=False) for name, own in kinds.items()}
            return [
                ValidationCase(
                    case.measured, case.said | {name: predict(case.measured) for name, predict in predictors.items()}
                )
                for case in cases
            ]
        finally:
            os.chdir(before)


def differences(sweep: str, stored: RerunCases, folder: Path = RERUNS) -> Iterator[str]:
    """Yield where a file differs from the measurements in ``folder`` and from the oracle's predictions."""
    measured = {case.config_id: case for case in measured_cases(sweep, folder)}
    if len(measured) != len(stored.cases):
        yield f"{sweep}: {len(stored.cases)} cases, measured were {len(measured)}"
    table = {row["config_id"]: row for row in polars.read_parquet(folder / f"{sweep}.parquet").to_dicts()}
    for case in stored.cases:
        there = measured.get(case.config_id)
        if there is None or there.launches_s != case.measured_step_times_s or there.figures != case.figures:
            yield f"{sweep}: {case.config_id}: measured {case.measured_step_times_s}, docs/reruns has another value"
            continue
        step_s, row_s = there.step_time_s, table[case.config_id]["step_time_s"]
        if (step_s is None) != (row_s is None) or (step_s and abs(step_s / row_s - 1) > 1e-9):
            yield f"{sweep}: {case.config_id}: median {step_s} s, {sweep}.parquet has {row_s}"
    now = {case.config_id: case for case in predicted_cases(sweep, [*measured.values()], baselines=False).cases}
    for case in stored.cases:
        before, after = case.predicted_step_time_s, now[case.config_id].predicted_step_time_s
        if before != case.said[ORACLE_NAME].step_time_s or not _is_same(before, after):
            yield f"{sweep}: {case.config_id}: predicted {before} s, the oracle predicts {after} s"


def _is_same(before: float | None, after: float | None) -> bool:
    return before == after or (before is not None and after is not None and abs(after / before - 1) <= _SAME)


def main(arguments: Sequence[str]) -> int:
    """Write the files, or compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oracle.cases", description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args(arguments).check:
        for sweep in SWEEPS:
            print(write(sweep))
        return 0
    wrong = [line for sweep in SWEEPS for line in differences(sweep, read(path_of(sweep)))]
    print("\n".join(wrong) or "the same")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
