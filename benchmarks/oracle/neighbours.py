"""Scores of predictions that measured configurations move, on the committed cases of the reruns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from math import exp, hypot, log, sqrt
from statistics import median

import msgspec

from benchmarks.oracle.baselines import CHOICE_BASELINES
from benchmarks.oracle.cases import KINDS
from benchmarks.oracle.scoring import (
    MACHINE_ONLY,
    ORACLE_NAME,
    PredictorResult,
    PredictorScore,
    ScoredCase,
    score_predictor,
)
from hpcbench.predict.measured_factors import LearnedFactor, MeasuredFactors, MeasuredRatio, model_key, strategy_key
from hpcbench.predict.prediction import PredictionInterval, correct_interval, neighbour_basis
from hpcbench.results.schema import STATUS_OK
from hpcbench.units import format_percent

_NORMAL_90 = 1.645
SMALL = 2
"""Devices of the runs that larger ones are predicted from."""
SITUATIONS: dict[str, Callable[[ScoredCase], Hashable]] = {
    "all of other models": lambda case: model_key(case.measured.spec),
    "all of other strategies": lambda case: strategy_key(case.measured.spec),
}
"""By what was measured: the key of the cases that are left out together."""


def moved_cases(cases: Sequence[ScoredCase], key: Callable[[ScoredCase], Hashable]) -> list[ScoredCase]:
    """Move the oracle's prediction of every case by the cases with another ``key``."""
    keys = [key(case) for case in cases]
    factors = {
        left_out: MeasuredFactors([
            ratio
            for case, own in zip(cases, keys, strict=True)
            if own != left_out and (ratio := _ratio_of(case)) is not None
        ])
        for left_out in dict.fromkeys(keys)
    }  # fmt: skip
    return [_moved(case, factors[own]) for case, own in zip(cases, keys, strict=True)]


def held_out_cases(cases: Sequence[ScoredCase]) -> list[ScoredCase]:
    """Move the prediction of every case by all others."""
    return moved_cases(cases, lambda case: case.measured.config_id)


def cases_from_small(cases: Sequence[ScoredCase]) -> list[ScoredCase]:
    """Move the predictions of larger runs by the measured ones on at most ``SMALL`` devices."""
    small = MeasuredFactors([
        ratio
        for case in cases
        if case.measured.spec.devices <= SMALL and (ratio := _ratio_of(case)) is not None
    ])  # fmt: skip
    return [_moved(case, small) for case in cases if case.measured.spec.devices > SMALL]


def cases_after_pilots(cases: Sequence[ScoredCase]) -> list[ScoredCase]:
    """Move the predictions by one measured configuration, the smallest, of each model and strategy; without these."""
    pilots: dict[Hashable, ScoredCase] = {}
    for case in sorted(cases, key=lambda one: (one.measured.spec.devices, one.measured.spec.batch_size)):
        if _ratio_of(case) is not None:
            pilots.setdefault((model_key(case.measured.spec), strategy_key(case.measured.spec)), case)
    names = {case.measured.config_id for case in pilots.values()}
    factors = MeasuredFactors([ratio for case in pilots.values() if (ratio := _ratio_of(case)) is not None])
    return [_moved(case, factors) for case in cases if case.measured.config_id not in names]


def _ratio_of(case: ScoredCase) -> MeasuredRatio | None:
    measured, predicted_s = case.measured, case.said[ORACLE_NAME].step_time_s
    if measured.status != STATUS_OK or measured.step_time_s is None or not predicted_s:
        return None
    launches = tuple(measured.launches_s)
    return MeasuredRatio(measured.config_id, measured.spec, launches, measured.step_time_s, predicted_s)


def _moved(case: ScoredCase, factors: MeasuredFactors) -> ScoredCase:
    alone = case.said[ORACLE_NAME]
    learned = factors.learned(case.measured.spec, case.measured.config_id)
    others = {name: result for name, result in case.said.items() if name != ORACLE_NAME}
    ours = alone if learned is None or not alone.step_time_s else _moved_result(alone, alone.step_time_s, learned)
    return ScoredCase(case.measured, {ORACLE_NAME: ours, MACHINE_ONLY: alone, **others})


def _moved_result(alone: PredictorResult, step_time_s: float, learned: LearnedFactor) -> PredictorResult:
    assert alone.low_s is not None
    assert alone.high_s is not None
    interval = correct_interval(step_time_s, PredictionInterval(low=alone.low_s, high=alone.high_s), learned)
    parts = {
        name: value * (learned.factor if name.endswith("_s") else 1.0) for name, value in alone.figures.items()
    }  # fmt: skip
    return msgspec.structs.replace(
        alone, step_time_s=step_time_s * learned.factor, low_s=interval.low, high_s=interval.high, figures=parts,
        rests_on=neighbour_basis(learned, None if alone.rests_on is None else alone.rests_on.kind),
    )  # fmt: skip


def neighbours_rows(cases: Sequence[ScoredCase], held_out: Sequence[ScoredCase]) -> dict[str, list[str]]:
    """Return by situation the cells of accuracy, regret and intervals of a rerun.

    ``held_out``: the ``held_out_cases`` of ``cases``.
    """
    small = cases_from_small(cases)
    return {
        "nothing (calibration alone)": _cells(cases, ORACLE_NAME),
        "all other configurations": _cells(held_out, ORACLE_NAME),
        **{name: _cells(moved_cases(cases, key), ORACLE_NAME) for name, key in SITUATIONS.items()},
        f"nothing, of runs on more than {SMALL} devices": _cells(small, MACHINE_ONLY),
        f"all on one and two devices, of runs on more than {SMALL}": _cells(small, ORACLE_NAME),
    }


def _cells(cases: Sequence[ScoredCase], predictor: str) -> list[str]:
    score = score_predictor(cases, predictor)
    assert score.total is not None
    results = (case.said[predictor] for case in cases if case.measured.step_time_s is not None)
    widths = [sqrt(result.high_s / result.low_s) for result in results if result.low_s and result.high_s]
    holds = f"{format_percent(score.total.covered)}, x {median(widths):.2f}"
    return [
        format_percent(score.total.mean, 1),
        regret_text(score),
        holds,
        _ratio_cell(cases) if predictor == ORACLE_NAME else "",
    ]


def _ratio_cell(cases: Sequence[ScoredCase]) -> str:
    """How often the interval of the ratio of two strategies holds, as ``recommend`` computes it, and its width."""
    groups: dict[Hashable, list[ScoredCase]] = defaultdict(list)
    for case in cases:
        spec, basis = case.measured.spec, case.said[ORACLE_NAME].rests_on
        if case.measured.step_time_s and basis is not None and basis.counts:
            groups[model_key(spec), spec.dataset, spec.input_size, spec.devices].append(case)
    holds, widths = [], []
    for left, right in (pair for group in groups.values() for pair in combinations(group, 2)):
        if strategy_key(left.measured.spec) != strategy_key(right.measured.spec):
            error, spread = _log_error(left) - _log_error(right), hypot(_distinct_spread(left), _distinct_spread(right))
            holds.append(abs(error) <= _NORMAL_90 * spread)
            widths.append(exp(_NORMAL_90 * spread))
    return f"{format_percent(sum(holds) / len(holds))}, x {median(widths):.2f}" if holds else ""


def _log_error(case: ScoredCase) -> float:
    predicted_s, measured_s = case.said[ORACLE_NAME].step_time_s, case.measured.step_time_s
    assert predicted_s is not None
    assert measured_s is not None
    return log(predicted_s / measured_s)


def _distinct_spread(case: ScoredCase) -> float:
    basis = case.said[ORACLE_NAME].rests_on
    assert basis is not None
    return hypot(basis.distinct, basis.spread)


def regret_text(score: PredictorScore) -> str:
    """``14.4 % (worst 82 %)``, mean and worst regret."""
    regret, worst = score.ranking.regret, score.ranking.worst_regret
    return "" if regret is None or worst is None else f"{format_percent(regret, 1)} (worst {format_percent(worst)})"


def regret_rows(held_out: Sequence[ScoredCase]) -> dict[str, list[str]]:
    """Return by predictor the cells of accuracy, regret and regret with every difference counted."""
    names = {
        "the oracle: moved by all other configurations": ORACLE_NAME,
        "always `ddp`": "always_ddp",
        "`ddp`, `fsdp` where it does not fit": "ddp_else_fsdp",
        "ParaDL's formulas": "paradl",
        "DDLBench's equations": "ddlbench",
        "computation alone": "compute_only",
        "the largest smaller scale, unchanged": "flat",
        "two devices, scaled perfectly": "perfect",
        "a line over log p": "log_p",
    }
    # What the oracle predicted is here moved by all others.
    kinds = {f"the oracle: {words}": MACHINE_ONLY if name == ORACLE_NAME else name for words, name in KINDS.items()}
    rows = {}
    for words, name in {**kinds, **names}.items():
        score = score_predictor(held_out, name, None if name in (ORACLE_NAME, *CHOICE_BASELINES) else ORACLE_NAME)
        ranking = score.ranking
        total = "" if score.total is None else f"{format_percent(score.total.mean, 1)} of {score.total.count}"
        every = "" if ranking.median_regret is None else format_percent(ranking.median_regret, 1)
        rows[words] = [total, f"{regret_text(score)} of {ranking.groups}", every]
    return rows
