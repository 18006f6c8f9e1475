"""The share of single terms of the cost model in its score: each switched off, or one that was not kept switched on.

    python -m benchmarks.oracle.ablation    print the table of docs/oracle-figures.md

Every row predicts all committed configurations of a score from its committed calibrations.
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
from benchmarks.oracle.registered import DATA_PARALLEL, RERUNS, SCORES, Score
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


def _without_processor_s() -> Callable[..., float]:
    """Collectives that take the time of their links alone."""
    priced = cost_model.measured_collective_s

    def wire_s(span: Any, operation: str, sample: Any, payload_bytes: float) -> float:
        own = None if sample is None else replace(sample, cpu_latency_s=0.0, cpu_s_per_byte=0.0)
        return priced(span, operation, own, payload_bytes)

    return wire_s


def _without(**fields: Any) -> Callable[[], Callable[..., Any]]:
    """Return a maker of calibrations' machines whose measured shapes lack ``fields``."""

    def make() -> Callable[..., Any]:
        apply = calibration_store.apply_calibration

        def applied(nominal: Any, stored: Any, problems: list[str]) -> Any:
            machine = apply(nominal, stored, problems)
            shapes = machine.measured
            return machine if shapes is None else replace(machine, measured=replace(shapes, **fields))

        return applied

    return make


def _without_call_s() -> Callable[..., Any]:
    """Collectives whose calls take the computing thread no time."""
    apply = calibration_store.apply_calibration

    def applied(nominal: Any, stored: Any, problems: list[str]) -> Any:
        machine = apply(nominal, stored, problems)
        return replace(machine, comm=replace(machine.comm, call_s=0.0))

    return applied


SWEEP_VARIANTS: Mapping[str, _Patches] = {
    "all terms": [],
    "without sums of gradients over micro-batches": _SUMS,
    "without a shared processor under overlap": _SHARES,
    "without the bound of a library's overhead": _BOUND,
    "without processor seconds of collectives": [(cost_model, "measured_collective_s", _without_processor_s)],
    "without the cost of a call": [(calibration_store, "apply_calibration", _without_call_s)],
    "without the overlap of own blocks": [(calibration_store, "apply_calibration", _without(overlaps=[]))],
    "without a processor quota as a bucket": [(calibration_store, "apply_calibration", _without(quota=None))],
    "without own blocks": [(calibration_store, "apply_calibration", _without(kernels=[]))],
    "without own messages": [(calibration_store, "apply_calibration", _without(messages=[]))],
}
"""Terms of scores that are calibrated for their sweep."""
SWEEP_COLUMNS = ("accuracy", "data parallelism", "signed", "regret")


def sweep_rows(score: Score) -> dict[str, list[str]]:
    """Return by variant the cells of ``SWEEP_COLUMNS``."""
    rows = {}
    for name, patches in SWEEP_VARIANTS.items():
        found = _varied_cases(score, patches)
        whole = score_predictor(found, ORACLE_NAME)
        data = score_predictor([case for case in found if case.measured.spec.strategy in DATA_PARALLEL], ORACLE_NAME)
        assert whole.total is not None
        assert data.total is not None
        rows[name] = [
            f"{whole.total.mean:.1%}", f"{data.total.mean:.1%}", f"{whole.total.signed or 0.0:+.1%}",
            regret_text(whole),
        ]  # fmt: skip
    return rows


def variant_cases(name: str, variant: str) -> list[ValidationCase]:
    """Return the cases of a rerun as ``variant`` predicts them."""
    return _varied_cases(SCORES[name], VARIANTS[variant])


def _varied_cases(score: Score, patches: _Patches) -> list[ValidationCase]:
    measured = cases.read(score.cases).validation_cases()
    with ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value()))
        return cases.with_present_predictions(score, measured)


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
    """Return by rerun and variant the cells, of the reruns that are not calibrated for their sweep."""
    plain = [name for name in RERUNS if not SCORES[name].predictions.exists()]
    return {name: {variant: cells(variant_cases(name, variant)) for variant in VARIANTS} for name in plain}


if __name__ == "__main__":
    for sweep, found in rows().items():
        print(sweep, *COLUMNS, sep=" | ")
        for name, own in found.items():
            print(name, *own, sep=" | ")
    sys.exit(0)
