"""The share of single terms of the cost model in its score: each is switched off once.

Every row predicts all committed configurations of a score from its committed calibrations
(``python -m benchmarks.oracle.figures`` writes the tables).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

from msgspec.structs import replace

from benchmarks.oracle import cases
from benchmarks.oracle.neighbours import regret_text
from benchmarks.oracle.registered import DATA_PARALLEL, Score
from benchmarks.oracle.scoring import ORACLE_NAME, ScoredCase, score_predictor
from hpcbench.predict.calibration import calibration_store
from hpcbench.units import format_percent


def _without(part: str, field: str) -> Callable[[], Callable[..., Any]]:
    """Return a maker of calibrations' machines whose ``part`` lacks the measurements in ``field``."""

    def make() -> Callable[..., Any]:
        apply = calibration_store.apply_calibration

        def applied(nominal: Any, stored: Any, problems: list[str]) -> Any:
            machine = apply(nominal, stored, problems)
            return replace(machine, **{part: replace(getattr(machine, part), **{field: []})})

        return applied

    return make


VARIANTS: Mapping[str, Sequence[tuple[object, str, Callable[[], Any]]]] = {
    "all terms": [],
    "without measured overlaps": [(calibration_store, "apply_calibration", _without("comm", "overlaps"))],
    "without measured messages": [(calibration_store, "apply_calibration", _without("comm", "messages"))],
    "without measured kernels": [(calibration_store, "apply_calibration", _without("compute", "kernels"))],
}
"""By term its functions, and a maker of each function without it."""
COLUMNS = ("accuracy", "data parallelism", "signed", "regret", "plain calibration: accuracy", "its regret")


def rows(score: Score) -> dict[str, list[str]]:
    """Return by variant the cells of ``COLUMNS``."""
    cells = {}
    for variant in VARIANTS:
        found = varied_cases(score, variant)
        whole = score_predictor(found, ORACLE_NAME)
        plain = score_predictor(found, cases.CALIBRATED)
        data = score_predictor([case for case in found if case.measured.spec.strategy in DATA_PARALLEL], ORACLE_NAME)
        assert whole.total is not None
        assert data.total is not None
        assert plain.total is not None
        cells[variant] = [
            format_percent(whole.total.mean, 1), format_percent(data.total.mean, 1),
            format_percent(whole.total.signed or 0.0, 1, sign='+'),
            regret_text(whole), format_percent(plain.total.mean, 1), regret_text(plain),
        ]  # fmt: skip
    return cells


def varied_cases(score: Score, variant: str) -> list[ScoredCase]:
    """Return the cases of a score as ``variant`` predicts them, from all its calibrations and from the plain one."""
    measured = cases.read(score.cases).scored_cases()
    with ExitStack() as stack:
        for target, name, value in VARIANTS[variant]:
            stack.enter_context(mock.patch.object(target, name, value()))
        return cases.with_present_predictions(score, measured, [ORACLE_NAME, cases.CALIBRATED])
