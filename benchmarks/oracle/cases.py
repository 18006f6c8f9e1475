"""The measured launches of the scores beside their predictions: every figure can be recomputed from the tree."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars

from benchmarks.oracle import registered
from benchmarks.oracle.baselines import choice_results
from benchmarks.oracle.registered import Score
from benchmarks.oracle.scoring import ORACLE_NAME, PredictorResult, ScoredCase, ScoredConfiguration, oracle_predictor
from benchmarks.rerun import pages
from benchmarks.testbed import CLUSTER
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.fileio import make_folder, write_atomic
from hpcbench.predict.calibration.calibration_store import read_calibrations
from hpcbench.predict.cluster_forecasts import ClusterForecasts
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import STATUS_OK

BLIND, CALIBRATED = "blind", "calibrated"
"""The oracle from the profile alone, and from a calibration without any shape of the sweep."""
KINDS = {"the profile alone": BLIND, "calibrated": CALIBRATED, "calibrated for the sweep": ORACLE_NAME}
"""By words the predictor of each calibration that the oracle's predictions follow from."""
_SAME = 0.002
"""Relative difference up to which two predictions are the same one on another processor."""


class ScoreCase(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A measured configuration of a score with its predictions."""

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
    """Measured parts of the step and memory, as ``ScoredConfiguration``."""
    figures_noise: dict[str, float] = {}
    said: dict[str, PredictorResult] = {}
    """By predictor; where one says nothing it is left out."""

    @classmethod
    def of(cls, case: ScoredCase) -> ScoreCase:
        """Return ``case`` as the file has it; constant choices follow from it."""
        measured, said = case.measured, case.said
        known = {name: result for name, result in said.items() if name == ORACLE_NAME or result.step_time_s is not None}
        return cls(
            config_id=measured.config_id, spec=measured.spec, predicted_step_time_s=said[ORACLE_NAME].step_time_s,
            measured_step_times_s=measured.launches_s, run_ids=measured.run_ids, status=measured.status,
            figures=measured.figures, figures_noise=measured.figures_noise, said=known,
        )  # fmt: skip


class ScoreCases(msgspec.Struct, kw_only=True):
    """The file of one score."""

    sweep: str
    cluster: str = CLUSTER
    sources: list[str]
    """What the predictions were made from."""
    cases: list[ScoreCase]

    def scored_cases(self) -> list[ScoredCase]:
        """Return the cases as ``scoring`` takes them, with the constant choices."""
        cases = []
        for case in self.cases:
            choices = choice_results(case.spec.strategy, case.said[ORACLE_NAME].fits)
            cases.append(ScoredCase(_measured(case, self.cluster), {**case.said, **choices}))
        return cases


def with_earlier_launches(now: ScoreCases, before: ScoreCases) -> ScoreCases:
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


def read(path: Path) -> ScoreCases:
    """Read a file of cases."""
    return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=ScoreCases)


def write(path: Path, document: ScoreCases) -> None:
    """Write a file of cases."""
    write_atomic(path, compressed(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"))


def compressed(data: bytes) -> bytes:
    """Return ``data`` as gzip, the same bytes for the same data: a tenth of the JSON of cases and calibrations."""
    return gzip.compress(data, mtime=0)


def _measured(case: ScoreCase, cluster: str) -> ScoredConfiguration:
    return ScoredConfiguration(
        cluster=cluster, config_id=case.config_id, spec=case.spec, status=case.status, run_ids=case.run_ids,
        launches_s=case.measured_step_times_s, figures=case.figures, figures_noise=case.figures_noise,
    )  # fmt: skip


def forecasts_by_kind(score: Score, work: Path) -> dict[str, ClusterForecasts]:
    """Return the oracle's forecasts from all calibrations of a score, from those without its shapes, and from none.

    Their trees are made in ``work``; they need the box's profile in the current folder.
    """
    kinds: dict[str, ClusterForecasts] = {}
    cluster = score.bed(work).cluster
    for name in KINDS.values():
        shutil.rmtree(work / name, ignore_errors=True)
        tree = ResultsTree(work / name)
        own = tree.cluster(cluster)
        make_folder(own.path("calibrations"))
        for path in score.calibrations.glob("*.json.gz"):
            (own.path("calibrations") / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        for stored in read_calibrations(own, cluster)[0]:
            if name == BLIND or (name == CALIBRATED and stored.calibration.sweeps):
                stored.path.unlink()
        kinds[name] = ClusterForecasts(tree, score.sweep.parent)
    return kinds


def with_present_predictions(
    score: Score, cases: Sequence[ScoredCase], names: Collection[str] = tuple(KINDS.values())
) -> list[ScoredCase]:
    """Return ``cases`` with the oracle's predictions as it makes them now from the score's calibrations.

    Those kinds of predictions that are not in ``names`` stay as registered.
    """
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        score.bed(Path(folder)).describe(score.scored_mbit)
        os.chdir(folder)
        try:
            kinds = forecasts_by_kind(score, Path(folder))
            predictors = {name: oracle_predictor(own) for name, own in kinds.items() if name in names}
            return [
                ScoredCase(
                    case.measured, case.said | {name: predict(case.measured) for name, predict in predictors.items()}
                )
                for case in cases
            ]
        finally:
            os.chdir(before)


def differences(score: Score, root: Path) -> Iterator[str]:
    """Yield where the cases of a score differ from its registered predictions and from the table of its results."""
    stored = read(score.cases)
    table = pages.data_of(stored.sweep, root)
    if table.exists():
        yield from _table_differences(stored, {row["config_id"]: row for row in polars.read_parquet(table).to_dicts()})
    for case in stored.cases:
        if case.predicted_step_time_s != case.said[ORACLE_NAME].step_time_s:
            yield f"{stored.sweep}: {case.config_id}: predicted_step_time_s is not that of the oracle"
    expected = {one.config_id: one.said for one in registered.read(score.predictions).configurations}
    for case in stored.cases:
        before, after = case.said[ORACLE_NAME].step_time_s, expected[case.config_id][ORACLE_NAME].step_time_s
        if not _is_same(before, after):
            yield f"{stored.sweep}: {case.config_id}: predicted {before} s, the oracle predicts {after} s"


def _table_differences(stored: ScoreCases, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if len(rows) != len(stored.cases):
        yield f"{stored.sweep}: {len(stored.cases)} cases, the table of results has {len(rows)}"
    for case in stored.cases:
        step_s = _measured(case, stored.cluster).step_time_s
        row_s = rows[case.config_id]["step_time_s"] if case.config_id in rows else None
        if (step_s is None) != (row_s is None) or (step_s and row_s and abs(step_s / row_s - 1) > 1e-9):
            yield f"{stored.sweep}: {case.config_id}: median {step_s} s, the table of results has {row_s}"


def _is_same(before: float | None, after: float | None) -> bool:
    return before == after or (before is not None and after is not None and abs(after / before - 1) <= _SAME)
