"""The share of single terms of the cost model in its score: each switched off, or one that was not kept switched on.

    python -m benchmarks.oracle.ablation    print the table of docs/oracle-figures.md

Every row predicts all committed configurations of both reruns from the committed calibration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import exp, log
from statistics import fmean, median
from typing import Any
from unittest import mock

from msgspec.structs import replace

from benchmarks.oracle import cases
from benchmarks.oracle.neighbours import SITUATIONS, held_out_cases, moved_cases, regret_text
from hpcbench.oracle import cost_model
from hpcbench.oracle.calibration import calibration_store
from hpcbench.oracle.machine import CommParameters
from hpcbench.oracle.measured_shapes import SizeCurve
from hpcbench.oracle.placement import GroupPlacement
from hpcbench.oracle.scoring import ValidationCase, accuracy, score_predictor
from hpcbench.report.oracle_validation import ORACLE_NAME

COLUMNS = ("accuracy", "common factor removed", "regret", "moved by all others", "regret, strategy unmeasured")
_SIZES = [2.0**exponent for exponent in range(8, 31)]


def _unshared(measured: CommParameters, rate: float) -> tuple[float, float]:
    """One pair of constants, each in proportion to the link's rate."""
    slowed = measured.comm_slowdown
    return 1.0 + (measured.overlap_slowdown - 1.0) * rate, max(1.0, slowed * rate) if slowed > 1.0 else 1.0


def _processor_floor() -> Callable[..., Any]:
    """A collective that takes at least its processor seconds, as the overlap of the calibration implies them."""
    apply = calibration_store.apply_calibration

    def floored(nominal: Any, stored: Any, problems: list[str]) -> Any:
        machine, then = apply(nominal, stored, problems), stored.calibration
        measured, link = then.machine.comm, machine.comm.inter_node
        share = measured.comm_slowdown * (1.0 - 1.0 / measured.overlap_slowdown)
        floor = link._replace(beta_s_per_byte=max(link.beta_s_per_byte, share * then.inter_node.beta_s_per_byte))
        return replace(machine, comm=replace(machine.comm, inter_node=floor))

    return floored


def _monotone_messages() -> Callable[..., Any]:
    """Times of messages that never fall with the size, between sizes of which the fitted lines give them."""
    priced = cost_model.CostModel._priced

    def monotone(self: cost_model.CostModel, operation: str, size: float, group: GroupPlacement) -> tuple[float, float]:
        seconds, latency_s = priced(self, operation, size, group)
        if group.ranks < 2 or not size:
            return seconds, latency_s
        curves = self.__dict__.setdefault("_curves", {})
        if (operation, group) not in curves:
            points = [(point, priced(self, operation, point, group)[0]) for point in _SIZES]
            curves[operation, group] = SizeCurve(points)
        pooled = curves[operation, group].at(size) or seconds
        return pooled, min(latency_s, pooled)

    return monotone


_Patches = Sequence[tuple[object, str, Callable[[], Any]]]
_SUMS: _Patches = [(cost_model, "accumulations_per_pass", lambda: lambda _: 0.0)]
_SHARES: _Patches = [(calibration_store, "slowdowns_at_rate", lambda: _unshared)]
_BOUND: _Patches = [(calibration_store, "plausible_overhead", lambda: lambda overhead: overhead)]
VARIANTS: Mapping[str, _Patches] = {
    "all terms": [],
    "without sums of gradients over micro-batches": _SUMS,
    "without a shared processor under overlap": _SHARES,
    "without the bound of a library's overhead": _BOUND,
    "without all three": [*_SUMS, *_SHARES, *_BOUND],
    "with processor seconds as a floor of collectives": [(calibration_store, "apply_calibration", _processor_floor)],
    "with monotone times of messages": [(cost_model.CostModel, "_priced", _monotone_messages)],
}


def variant_cases(sweep: str, variant: str) -> list[ValidationCase]:
    """Return the cases of a rerun as ``variant`` predicts them."""
    measured = [case.measured for case in cases.read(cases.path_of(sweep)).validation_cases()]
    with ExitStack() as stack:
        for target, name, value in VARIANTS[variant]:
            stack.enter_context(mock.patch.object(target, name, value()))
        return cases.predicted_cases(sweep, measured, baselines=False).validation_cases()


def cells(alone: Sequence[ValidationCase]) -> list[str]:
    """Return the cells of ``COLUMNS`` for predictions by the calibration alone."""
    score, moved = score_predictor(alone, ORACLE_NAME), score_predictor(held_out_cases(alone), ORACLE_NAME)
    others = score_predictor(moved_cases(alone, SITUATIONS["all of other strategies"]), ORACLE_NAME)
    assert score.total is not None
    assert moved.total is not None
    pairs = [*_pairs(alone)]
    common = exp(median(log(measured / predicted) for predicted, measured in pairs))
    shaped = fmean(accuracy(predicted * common, measured) for predicted, measured in pairs)
    return [
        f"{score.total.mean:.1%}", f"{shaped:.1%}", regret_text(score), f"{moved.total.mean:.1%}", regret_text(others),
    ]  # fmt: skip


def _pairs(found: Sequence[ValidationCase]) -> Iterator[tuple[float, float]]:
    for case in found:
        predicted, measured = case.said[ORACLE_NAME].step_time_s, case.measured.step_time_s
        if predicted and measured:
            yield predicted, measured


def rows() -> dict[str, dict[str, list[str]]]:
    """Return by rerun and variant the cells."""
    return {sweep: {name: cells(variant_cases(sweep, name)) for name in VARIANTS} for sweep in cases.SWEEPS}


if __name__ == "__main__":
    for sweep, found in rows().items():
        print(sweep, *COLUMNS, sep=" | ")
        for name, own in found.items():
            print(name, *own, sep=" | ")
    sys.exit(0)
