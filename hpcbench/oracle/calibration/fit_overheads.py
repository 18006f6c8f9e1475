"""Fits of contention, overlap, crowding, stragglers, base memory and the overhead of each strategy's library."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import hypot, log
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from hpcbench.oracle.calibration.calibration_runs import CalibrationRun, fit_residual, runs_of_strategy
from hpcbench.oracle.calibration.calibration_store import FitResidual
from hpcbench.oracle.cost_model import CostModel, StepBreakdown, expected_normal_maximum
from hpcbench.oracle.machine import Machine, StrategyOverhead
from hpcbench.oracle.prediction import peak_rank_memory
from hpcbench.oracle.strategies.base import resolve_cost
from hpcbench.parallel.catalog import SINGLE_DEVICE, STRATEGIES
from hpcbench.parallel.strategies.probes import PROBE_COLLECTIVES, PROBE_LAYERS
from hpcbench.results.probe_records import CollectiveProbe, OverlapProbe

_STEP_NOISE = 0.03
_OVERHEAD_PRIOR = 0.1
"""A library's overhead is thought to be about a tenth of a step, as a factor of its computation or by the step."""
_MIN_HIDDEN_FRACTION = 0.05
"""Smallest fraction of a computation that overlaps with an all_reduce; smaller ones are noise."""
_MIN_CONTENDED_BYTES = 2**18

WorkloadKey = tuple[str, str, int, str]
"""Model, data set, batch size, precision."""


def fit_call_overhead(overlaps: Sequence[OverlapProbe]) -> float:
    """Return the time to issue a collective: the median of all placements."""
    return median(probe.issue_s for probe in overlaps) if overlaps else 0.0


def fit_overlap(overlaps: Sequence[OverlapProbe]) -> float:
    """Return kappa: the time of computation under an all_reduce over its time alone, at least 1."""
    return max(1.0, median(probe.compute_under_comm_s / probe.compute_s for probe in overlaps)) if overlaps else 1.0


def fit_comm_slowdown(overlaps: Sequence[OverlapProbe]) -> float:
    """Return lambda: the slow-down of an all_reduce while its rank computes, at least 1 and at most 20.

    Of an all_reduce of m seconds that lasts until ``both_s`` beside c seconds of computation, c / lambda are hidden:
    both = c + m - c / lambda.
    """
    hidden = [
        (probe.compute_under_comm_s + probe.comm_s - probe.both_s) / probe.compute_under_comm_s
        for probe in overlaps
        if probe.compute_under_comm_s > 0
    ]
    return 1.0 / min(max(median(hidden), _MIN_HIDDEN_FRACTION), 1.0) if hidden else 1.0


def fit_contention(probes: Iterable[CollectiveProbe]) -> dict[int, float]:
    """Return phi by the number of groups that send at the same time: the time of each over its time alone (ParaDL)."""
    alone: dict[tuple[int, int, int], float] = {}
    together: dict[int, list[float]] = defaultdict(list)
    large_probes = [probe for probe in probes if probe.nodes > 1 and probe.payload_bytes >= _MIN_CONTENDED_BYTES]
    for probe in sorted(large_probes, key=lambda probe: probe.groups):
        key = (probe.ranks, probe.nodes, probe.payload_bytes)
        if probe.groups == 1:
            alone[key] = min(probe.seconds, alone.get(key, probe.seconds))
        elif key in alone:
            together[probe.groups].append(probe.seconds / alone[key])
    return {groups: max(1.0, median(ratios)) for groups, ratios in together.items()}


class LoneRankTimes(NamedTuple):
    """The step times of a rank without contention, by workload, and the scatter between ranks."""

    steps_s: dict[WorkloadKey, float]
    straggling: float


def fit_lone_ranks(runs: Sequence[CalibrationRun]) -> LoneRankTimes:
    """Fit ranks on nodes of their own: of p that train side by side without communication, the slowest takes
    (1 + straggling z(p)) as long as one, z(p) being the expected largest of p normal draws.

    All launches of a workload have equal weight, of one rank or several; one that was held up moves neither.
    """
    points_by_workload: dict[WorkloadKey, list[tuple[float, float]]] = defaultdict(list)
    for run in runs_of_strategy(runs, PROBE_LAYERS, PROBE_COLLECTIVES, SINGLE_DEVICE):
        if run.spec.tasks_per_node == 1:
            points_by_workload[workload_key(run)].append((expected_normal_maximum(run.spec.ranks), run.step_s))
    steps_s, scatters = {}, []
    for key, points in points_by_workload.items():
        step_s, grown_s = _least_absolute_deviations_line(points)
        if len({largest for largest, _ in points}) > 1:
            scatters.append(grown_s / step_s)
        steps_s[key] = step_s
    if not scatters:
        # Without ranks on several nodes a lone rank's steps around their median are what there is. The 10th and the
        # 90th percentile of a normal distribution are 2.56 deviations apart.
        lone = (run.result.metrics.step_time_s for run in runs_of_strategy(runs, PROBE_LAYERS, SINGLE_DEVICE))
        scatters = [(times.p90 - times.p10) / 2.56 / times.median for times in lone if times is not None]
    return LoneRankTimes(steps_s, median(scatters) if scatters else 0.0)


def _least_absolute_deviations_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a > 0 and b >= 0 of the line a + b x with the least absolute deviations of log y over the points (x, y).

    Such a line goes through two of the points, or is level and goes through one.
    """
    lines = [(y, 0.0) for _, y in points]
    for (x, y), (further, higher) in combinations(sorted(points), 2):
        slope = (higher - y) / (further - x) if further > x else -1.0
        if slope >= 0 and y - slope * x > 0:
            lines.append((y - slope * x, slope))
    return min(lines, key=lambda line: sum(abs(log((line[0] + line[1] * x) / y)) for x, y in points))


def fit_crowding(runs: Sequence[CalibrationRun], alone: LoneRankTimes) -> dict[int, float]:
    """Return by ranks per node the slowdown of each over one alone, beyond the usual scatter."""
    crowded: dict[int, list[float]] = defaultdict(list)
    for run in runs_of_strategy(runs, PROBE_COLLECTIVES):
        if run.spec.tasks_per_node > 1 and workload_key(run) in alone.steps_s:
            waited = 1 + alone.straggling * expected_normal_maximum(run.spec.ranks)
            crowded[run.spec.tasks_per_node].append(run.step_s / alone.steps_s[workload_key(run)] / waited)
    return {tasks: max(1.0, median(slowdowns)) for tasks, slowdowns in crowded.items()}


def workload_key(run: CalibrationRun) -> WorkloadKey:
    """Return the key of the computation of one rank in a step of ``run``."""
    return run.spec.model, run.spec.dataset, run.spec.batch_size, run.spec.precision


def fit_base_bytes(runs: Sequence[CalibrationRun], device: str) -> tuple[float | None, list[FitResidual]]:
    """Return the bytes beside the predicted tensors, as measured peaks count; a probe on cuda has no workspaces."""
    pairs = [
        (float(peak_rank_memory(run.spec, run.table, device).total_bytes), float(peak))
        for run in runs
        if run.spec.strategy not in (PROBE_LAYERS, PROBE_COLLECTIVES) and (peak := run.result.metrics.peak_memory_bytes)
    ]
    if not pairs:
        probes = [run.result.probe for run in runs if run.result.probe is not None and device == "cpu"]
        return max((float(probe.base_memory_bytes or 0) for probe in probes), default=None), []
    base = max(median(peak - predicted for predicted, peak in pairs), 0.0)
    return base, [fit_residual("memory", "peak of a rank", [(predicted + base, peak) for predicted, peak in pairs])]


def fit_strategy_overheads(
    machine: Machine, runs: Sequence[CalibrationRun]
) -> tuple[dict[str, StrategyOverhead], list[FitResidual]]:
    """Fit what each strategy's library adds to the prediction of ``machine``, by the step and by its computation.

    Strategies of this project's own code have none: what remains of them are errors of the formulas, which another
    model does not share.
    """
    bare = msgspec.structs.replace(machine, strategies={})
    by_strategy: dict[str, list[CalibrationRun]] = defaultdict(list)
    for run in runs:
        if run.spec.strategy not in (PROBE_LAYERS, PROBE_COLLECTIVES, SINGLE_DEVICE):
            by_strategy[run.spec.strategy].append(run)
    overheads: dict[str, StrategyOverhead] = {}
    residuals = []
    for strategy, own_runs in sorted(by_strategy.items()):
        steps = [(run, _predicted_step(bare, run)) for run in own_runs]
        if STRATEGIES[strategy].library is None:
            pairs = [(step.step_time_s, run.step_s) for run, step in steps]
            residuals.append(fit_residual("strategies", strategy, pairs))
            continue
        overheads[strategy] = _fit_strategy_overhead(steps)
        fitted = msgspec.structs.replace(machine, strategies={strategy: overheads[strategy]})
        steps_after = [(run, _predicted_step(fitted, run)) for run in own_runs]
        for what, predicted in (("before", steps), ("with its overhead", steps_after)):
            pairs = [(step.step_time_s, run.step_s) for run, step in predicted]
            residuals.append(fit_residual("strategies", f"{strategy}, {what}", pairs))
    return overheads, residuals


def _predicted_step(machine: Machine, run: CalibrationRun) -> StepBreakdown:
    return resolve_cost(run.spec.strategy).step(run.spec, run.table, CostModel(machine, run.spec))


def _fit_strategy_overhead(pairs: Sequence[tuple[CalibrationRun, StepBreakdown]]) -> StrategyOverhead:
    """Return the ridge regression (Hoerl and Kennard 1970) of missing time on (computation, 1), both drawn to 0."""
    scale_s = fmean(step.compute_s for _, step in pairs)
    aa, ab, bb, at, bt = 1 / _OVERHEAD_PRIOR**2, 0.0, 1 / _OVERHEAD_PRIOR**2, 0.0, 0.0
    for run, step in pairs:
        weight = 1 / (hypot(_STEP_NOISE, run.doubt) * run.step_s / scale_s) ** 2
        share, missing = step.compute_s / scale_s, (run.step_s - step.step_time_s) / scale_s
        aa, ab, bb = aa + weight * share * share, ab + weight * share, bb + weight
        at, bt = at + weight * share * missing, bt + weight * missing
    determinant = aa * bb - ab * ab
    factor, by_step = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
    # A library takes time, it gives none: where one part would, it is left out and the other fitted alone.
    if by_step < 0:
        factor, by_step = at / aa, 0.0
    elif factor < 0:
        factor, by_step = 0.0, bt / bb
    return StrategyOverhead(compute_factor=1.0 + max(factor, 0.0), step_s=max(by_step, 0.0) * scale_s)
