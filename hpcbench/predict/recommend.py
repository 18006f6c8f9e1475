"""Recommendation of a strategy for a model and a number of nodes: feasible candidates are predicted and ranked.

Two candidates are compared by the ratio of their times. Both share the uncertainty of the machine: where
computation and communication have the same part in both steps it cancels, and the error of the formulas remains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import exp, inf, sqrt
from typing import Any, NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec, config_id, strategy_label
from hpcbench.predict.candidate_points import (
    DeviceAllocation,
    SweepPoint,
    leading_pipeline_points,
    non_pipeline_points,
    other_schedule_points,
    reduced_memory_points,
)
from hpcbench.predict.machine import Machine
from hpcbench.predict.prediction import FORMULA_SPREAD, NotPredicted, Prediction, Predictor, format_need_and_limit
from hpcbench.strategies.catalog import representative
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.workloads.datasets import DATASETS

_NORMAL_90 = 1.645
LEADERS_EXPANDED = 3
"""Pipelines whose degrees are tried with the other schedules."""
FULLY_PREDICTED = 10
"""Number of the best candidates whose prediction interval is computed in full."""
BATCH_SIZE_SEARCHED = 3
"""Number of the best candidates whose largest batch size is searched for."""
OBJECTIVES: dict[str, Callable[[RunSpec, Prediction], float]] = {
    "samples_per_s": lambda _, predicted: 1 / predicted.samples_per_s,
    "step_time_s": lambda _, predicted: predicted.step_time_s,
    "node_hours": lambda spec, predicted: spec.nodes * DATASETS[spec.dataset].samples / predicted.samples_per_s / 3600,
}
"""Quantities by name, each minimised: the time of a sample (s), the time of a step (s), the node-hours of an epoch."""


class Candidate(msgspec.Struct, kw_only=True):
    """A run that fits; ``ratio`` is its objective over the best one's."""

    spec: RunSpec
    predicted: Prediction
    ratio: float = 1.0
    ratio_low: float = 1.0
    """90 % interval of the ratio; where it includes 1, the difference is inconclusive."""
    ratio_high: float = 1.0
    largest_batch_size: int | None = None
    """Largest batch per replica that fits; it is computed for the best candidates alone."""

    @property
    def is_told_apart(self) -> bool:
        """Whether it is significantly slower than the best candidate."""
        return self.ratio_low > 1.0


class InfeasiblePoints(NamedTuple):
    """Points that one limit stops."""

    strategy: str
    kind: str
    """``limit`` (integers or names exclude it), ``memory``, or ``formulas`` (no formula covers it)."""
    reason: str
    points: int


class Recommendation(msgspec.Struct, kw_only=True):
    """The candidates for one number of nodes, the best first."""

    nodes: int
    tasks_per_node: int
    candidates: list[Candidate]
    refused: list[InfeasiblePoints]
    priced: int
    """Number of predicted steps."""


def recommend(
    base: SweepPoint,
    world: DeviceAllocation,
    limits: PartitionLimits,
    predictor: Predictor,
    objective: str = "samples_per_s",
) -> Recommendation:
    """Rank the ways to run a model on a number of devices.

    Args:
        base: Parameters that all candidates share, by name: model, data set, precision, optimizer.
        world: Nodes, ranks per node, and the batch size of a replica or of all replicas.
        limits: The limits of the partition; a point that violates one becomes infeasible.
        predictor: Predictions for the cluster.
        objective: A key of ``OBJECTIVES``.

    Returns:
        The candidates that fit into memory, the best first, with ratios to the best and their 90 % intervals; and the
        infeasible points, counted by strategy and kind of limit. ``candidates`` is empty if nothing fits.

    Raises:
        KeyError: ``objective`` is not a key of ``OBJECTIVES``.
        ConfigError: ``base`` names an unknown model.

    Example:
        >>> from hpcbench.config.cluster_profile import load_cluster
        >>> from hpcbench.predict.forecast import Forecast
        >>> base, world = {"model": "vgg11", "dataset": "cifar10"}, DeviceAllocation(1, 2, {"batch_size": 8})
        >>> forecast = Forecast(load_cluster("abci-v100")[0])
        >>> best, *others = recommend(base, world, PartitionLimits("any"), forecast).candidates
        >>> best.ratio, best.spec.ranks, len(others) > 3
        (1.0, 2, True)
    """
    search = _CandidateSearch(limits, predictor, OBJECTIVES[objective])
    search.add(non_pipeline_points(base, world))
    shares_layers = not search.is_excluded(representative("split_layers"))
    leaders = search.add(leading_pipeline_points(base, world, shared=shares_layers))
    leaders.sort(key=lambda pair: search.value(pair[1]))
    for point, _ in leaders[:LEADERS_EXPANDED]:
        search.add(other_schedule_points(point))
    ranked = sorted(search.candidates, key=search.value)
    for candidate in ranked:
        candidate.ratio = search.value(candidate) / search.value(ranked[0])
        if candidate is not ranked[0]:
            spread = ratio_spread(candidate.predicted, ranked[0].predicted, predictor.machine(candidate.spec))
            candidate.ratio_low = candidate.ratio * exp(-_NORMAL_90 * spread)
            candidate.ratio_high = candidate.ratio * exp(_NORMAL_90 * spread)
    for candidate in ranked[:FULLY_PREDICTED]:
        prediction = predictor.predict(candidate.spec)
        if not isinstance(prediction, NotPredicted):
            candidate.predicted = prediction
    for candidate in ranked[:BATCH_SIZE_SEARCHED]:
        candidate.largest_batch_size = largest_batch_size(candidate.spec, predictor)
    return Recommendation(
        nodes=world.nodes,
        tasks_per_node=world.tasks_per_node,
        candidates=ranked,
        refused=search.refusals(),
        priced=search.priced,
    )


class _CandidateSearch:
    """The candidates so far, and the infeasible points."""

    def __init__(
        self, limits: PartitionLimits, predictor: Predictor, objective: Callable[[RunSpec, Prediction], float]
    ) -> None:
        self._limits, self._predictor, self._objective = limits, predictor, objective
        self._seen: set[str] = set()
        self._refused: dict[tuple[str, str], Counter[str]] = {}
        self.candidates: list[Candidate] = []
        self.priced = 0

    def value(self, candidate: Candidate) -> float:
        """Return the objective: less is better."""
        return self._objective(candidate.spec, candidate.predicted)

    def add(self, points: Iterable[SweepPoint]) -> list[tuple[SweepPoint, Candidate]]:
        """Price the points that can run; one that does not fit is tried with less memory."""
        added = []
        for point in points:
            spec = resolve_point(point, self._limits)
            if isinstance(spec, InfeasiblePoint):
                self._refuse(point["strategy"], "limit", spec.reason)
                continue
            fitting, spec = self._fitting(point, spec)
            if fitting is None or config_id(spec) in self._seen:
                continue
            self._seen.add(config_id(spec))
            prediction = self._predictor.predict(spec)
            self.priced += 1
            if isinstance(prediction, NotPredicted):
                self._refuse(point["strategy"], "formulas", prediction.reason)
                continue
            candidate = Candidate(spec=spec, predicted=prediction)
            self.candidates.append(candidate)
            added.append((fitting, candidate))
        return added

    def _fitting(self, point: SweepPoint, spec: RunSpec) -> tuple[SweepPoint | None, RunSpec]:
        """Return the point, or the first one with less memory that fits, with its run; ``None`` where none fits."""
        fit = self._predictor.memory_fit(spec)
        if isinstance(fit, NotPredicted):
            self._refuse(spec.strategy, "formulas", fit.reason)
            return None, spec
        if fit.is_enough:
            return point, spec
        least = fit
        for smaller in reduced_memory_points(point, spec.batch_size):
            smaller_spec = resolve_point(smaller, self._limits)
            if isinstance(smaller_spec, InfeasiblePoint):
                continue
            fit = self._predictor.memory_fit(smaller_spec)
            if not isinstance(fit, NotPredicted):
                if fit.is_enough:
                    return smaller, smaller_spec
                least = min(least, fit)
        need, limit = format_need_and_limit(least.peak_memory_bytes, least.memory_limit_bytes or 0)
        shortage = f"needs {need} a rank at the least, there is {limit}"
        self._refuse(spec.strategy, "memory", f"{strategy_label(spec)}: {shortage}")
        return None, spec

    def _refuse(self, strategy: str, kind: str, reason: str) -> None:
        self._refused.setdefault((strategy, kind), Counter())[reason] += 1

    def is_excluded(self, strategy: str) -> bool:
        """Return whether integers or names exclude every point of ``strategy`` that was tried."""
        kinds = {kind for key, kind in self._refused if key == strategy}
        return kinds == {"limit"} and all(candidate.spec.strategy != strategy for candidate in self.candidates)

    def refusals(self) -> list[InfeasiblePoints]:
        """Return the infeasible points by strategy and kind of limit, with the first reason of each."""
        return [
            InfeasiblePoints(strategy, kind, next(iter(reasons)), sum(reasons.values()))
            for (strategy, kind), reasons in self._refused.items()
        ]


def ratio_spread(left: Prediction, right: Prediction, machine: Machine) -> float:
    """Return the standard deviation of the logarithm of the two step times' ratio.

    A machine that computes x % slower than thought makes both steps longer by x % of their shares of computation; so
    does its communication. The formulas' own errors are independent. Where measured neighbours move both, what they
    leave undetermined of the two strategies and the scatter of configurations replace all of these.
    """
    (left_compute, left_comm), (right_compute, right_comm) = (
        (each.compute_s / each.step_time_s, each.exposed_comm_s / each.step_time_s) if each.step_time_s else (0.0, 0.0)
        for each in (left, right)
    )
    compute = (left_compute - right_compute) * machine.compute.spread
    comm = (left_comm - right_comm) * machine.comm.spread
    bases = (left.rests_on, right.rests_on)
    if any(basis.kind != "measured neighbours" for basis in bases):
        return sqrt(compute**2 + comm**2 + 2 * FORMULA_SPREAD**2)
    return sqrt(sum(basis.distinct**2 + basis.spread**2 for basis in bases))


def largest_batch_size(spec: RunSpec, predictor: Predictor) -> int | None:
    """Return the largest batch per replica that fits, cut into as many micro-batches; ``None`` without a limit."""
    most = DATASETS[spec.dataset].samples // spec.dp_degree // spec.micro_batches

    def free_bytes(size: int) -> float:
        """Return the bytes that are left with micro-batches of ``size``."""
        fit = predictor.memory_fit(msgspec.structs.replace(spec, batch_size=size * spec.micro_batches))
        if isinstance(fit, NotPredicted) or fit.memory_limit_bytes is None:
            return -inf
        return fit.memory_limit_bytes - fit.peak_memory_bytes

    low = spec.batch_size // spec.micro_batches
    low_free = free_bytes(low)
    if low_free < 0:
        return None
    high, is_bounded = most + 1, False
    # Memory grows in proportion to the batch but for what is there anyway: a line through two sizes is nearly right.
    guess = min(2 * low, most)
    while low < most and high - low > max(1, low // 64):
        guess_free = free_bytes(guess)
        slope = (low_free - guess_free) / (guess - low)
        if guess_free >= 0:
            low, low_free = guess, guess_free
        else:
            high, is_bounded = guess, True
        margin = max(1, low // 64, (high - low) // 8 if is_bounded else 0)
        guess = low + int(low_free / slope) if slope > 0 else most
        guess = max(low + 1, min(max(guess, low + margin), high - margin if is_bounded else most))
    return low * spec.micro_batches


def candidate_sweep_points(candidates: Iterable[Candidate]) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each candidate, as a sweep has them."""
    names = (
        "strategy", "nodes", "tasks_per_node", "batch_size", "micro_batches", "dp_degree", "tp_degree", "sp_degree",
        "pp_degree", "activation_checkpointing", "options",
    )  # fmt: skip
    for candidate in candidates:
        values = msgspec.to_builtins(candidate.spec)
        yield {name: values[name] for name in names if name in values}
