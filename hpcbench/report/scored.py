"""The oracle and its baselines, scored on results."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpcbench.oracle.cases import Case
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.score import Score, score
from hpcbench.report.validation import OURS, Forecasts, cases_of
from hpcbench.results.store import ResultsTree

if TYPE_CHECKING:
    import polars


class Scored(NamedTuple):
    """The cases, the scores of every predictor, the oracle's first, and what it made its predictions from."""

    cases: list[Case]
    scores: list[Score]
    machines: list[Machine]
    notes: list[str]


def scored(frame: polars.DataFrame, results: ResultsTree) -> Scored:
    """``frame`` has ``validation.COLUMNS``; calibrations are ``results``'."""
    forecasts = Forecasts(results)
    found = cases_of(frame, forecasts)
    names = found.cases[0].said if found.cases else []
    scores = [score(found.cases, name, None if name == OURS else OURS) for name in names]
    machines = [machine for one in forecasts.made() for machine in one.machines()]
    reasons = {one.said[OURS].reason for one in found.cases} - {""}
    return Scored(found.cases, scores, machines, [*found.notes, *(f"not predicted: {one}" for one in sorted(reasons))])
