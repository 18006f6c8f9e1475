"""Recommendation of a strategy for a model and a number of nodes: feasible candidates are predicted and ranked.

Two candidates are compared by the ratio of their times. Both share the uncertainty of the machine: where
computation and communication have the same part in both steps it cancels, and the error of the formulas remains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import exp, inf, sqrt
from typing import Any, NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec, config_id, strategy_label
from hpcbench.oracle.candidate_points import (
    DeviceAllocation,
    SweepPoint,
    leading_pipeline_points,
    non_pipeline_points,
    other_schedule_points,
    reduced_memory_points,
)
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.prediction import MemoryFit, NotPredicted, Prediction, Predictor, format_need_and_limit
from hpcbench.parallel.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.parallel.workloads import DATASETS

_NORMAL_90 = 1.645
FORMULA_SPREAD = {"nominal": 0.10, "calibrated": 0.04, "fitted": 0.04}
"""Relative error (one standard deviation) of a strategy's formulas beside the machine's numbers, by their depth: an
assumption, to be replaced by what ``validate`` finds."""
LEADERS_EXPANDED = 3
"""Pipelines whose degrees are tried with the other schedules."""
FULLY_PREDICTED = 10
"""Of so many of the best the interval is worked out in full."""
BATCH_SIZE_SEARCHED = 3
"""Of so many of the best the largest batch is looked for."""
OBJECTIVES: dict[str, Callable[[RunSpec, Prediction], float]] = {
    "samples_per_s": lambda _, found: 1 / found.samples_per_s,
    "step_time_s": lambda _, found: found.step_time_s,
    "node_hours": lambda spec, found: spec.nodes * DATASETS[spec.dataset].samples / found.samples_per_s / 3600,
}
"""What is made least: the time of a sample, of a step, the cost of an epoch."""


class Candidate(msgspec.Struct, kw_only=True):
    """A run that fits; ``ratio`` is its objective over the best one's."""

    spec: RunSpec
    predicted: Prediction
    ratio: float = 1.0
    ratio_low: float = 1.0
    """90 % interval of the ratio; where it includes 1, the two cannot be told apart."""
    ratio_high: float = 1.0
    largest_batch_size: int | None = None
    """Per replica, that still fits; looked for with the best ones alone."""

    @property
    def is_told_apart(self) -> bool:
        """Whether it is slower than the best for all that is known."""
        return self.ratio_low > 1.0


class InfeasiblePoints(NamedTuple):
    """Points that one limit stops."""

    strategy: str
    kind: str
    """``limit`` (integers or names exclude it), ``memory``, or ``formulas`` (nothing can be said of it)."""
    reason: str
    points: int


class Recommendation(msgspec.Struct, kw_only=True):
    """The candidates for one number of nodes, the best first."""

    nodes: int
    tasks_per_node: int
    candidates: list[Candidate]
    refused: list[InfeasiblePoints]
    priced: int
    """Steps that were priced."""


def recommend(
    base: SweepPoint,
    world: DeviceAllocation,
    limits: PartitionLimits,
    answers: Predictor,
    objective: str = "samples_per_s",
) -> Recommendation:
    """Rank what can be done with ``world``. ``base``: model, data set and all else that the candidates share."""
    search = _CandidateSearch(limits, answers, OBJECTIVES[objective])
    search.add(non_pipeline_points(base, world), world)
    leaders = search.add(leading_pipeline_points(base, world, shared=not search.is_excluded("tensor")), world)
    leaders.sort(key=lambda pair: search.value(pair[1]))
    for point, _ in leaders[:LEADERS_EXPANDED]:
        search.add(other_schedule_points(point), world)
    ranked = sorted(search.found, key=search.value)
    for one in ranked:
        _set_ratio(one, ranked[0], search.value, answers.machine(one.spec))
    for one in ranked[:FULLY_PREDICTED]:
        whole = answers.predict(one.spec)
        one.predicted = one.predicted if isinstance(whole, NotPredicted) else whole
    for one in ranked[:BATCH_SIZE_SEARCHED]:
        one.largest_batch_size = largest_batch_size(one.spec, answers)
    return Recommendation(
        nodes=world.nodes,
        tasks_per_node=world.tasks_per_node,
        candidates=ranked,
        refused=search.refusals(),
        priced=search.priced,
    )


class _CandidateSearch:
    """What was found, and what was refused."""

    def __init__(
        self, limits: PartitionLimits, answers: Predictor, objective: Callable[[RunSpec, Prediction], float]
    ) -> None:
        self._limits, self._answers, self._objective = limits, answers, objective
        self._seen: set[str] = set()
        self._refused: dict[tuple[str, str], dict[str, int]] = {}
        self.found: list[Candidate] = []
        self.priced = 0

    def value(self, one: Candidate) -> float:
        """Less is better."""
        return self._objective(one.spec, one.predicted)

    def add(self, points: Iterable[SweepPoint], world: DeviceAllocation) -> list[tuple[SweepPoint, Candidate]]:
        """Price those that can run; one that does not fit is tried with less memory."""
        added = []
        for point in points:
            made = resolve_point(point, self._limits)
            if isinstance(made, InfeasiblePoint):
                self._refuse(point["strategy"], "limit", made.reason)
                continue
            fitting = self._fitting(point, made, world)
            if fitting is None or config_id(fitting[1]) in self._seen:
                continue
            self._seen.add(config_id(fitting[1]))
            found = self._answers.predict(fitting[1], quick=True)
            self.priced += 1
            if isinstance(found, NotPredicted):
                self._refuse(point["strategy"], "formulas", found.reason)
                continue
            candidate = Candidate(spec=fitting[1], predicted=found)
            self.found.append(candidate)
            added.append((fitting[0], candidate))
        return added

    def _fitting(self, point: SweepPoint, spec: RunSpec, world: DeviceAllocation) -> tuple[SweepPoint, RunSpec] | None:
        room = self._answers.memory_fit(spec)
        if isinstance(room, NotPredicted):
            self._refuse(spec.strategy, "formulas", room.reason)
            return None
        if room.is_enough:
            return point, spec
        least = room
        for smaller in reduced_memory_points(point, spec.batch_size):
            made = resolve_point(smaller, self._limits)
            room = NotPredicted("") if isinstance(made, InfeasiblePoint) else self._answers.memory_fit(made)
            if isinstance(made, InfeasiblePoint) or isinstance(room, NotPredicted):
                continue
            if room.is_enough:
                return smaller, made
            least = min(least, room)
        self._refuse(spec.strategy, "memory", f"{strategy_label(spec)}: {_memory_shortage(least)}")
        return None

    def _refuse(self, strategy: str, kind: str, reason: str) -> None:
        reasons = self._refused.setdefault((strategy, kind), {})
        reasons[reason] = reasons.get(reason, 0) + 1

    def is_excluded(self, strategy: str) -> bool:
        """Whether integers or names exclude every point of ``strategy`` that was tried."""
        kinds = {kind for key, kind in self._refused if key == strategy}
        return kinds == {"limit"} and all(one.spec.strategy != strategy for one in self.found)

    def refusals(self) -> list[InfeasiblePoints]:
        """By strategy and kind of limit, with the first reason of each."""
        return [
            InfeasiblePoints(strategy, kind, next(iter(reasons)), sum(reasons.values()))
            for (strategy, kind), reasons in self._refused.items()
        ]


def _memory_shortage(room: MemoryFit) -> str:
    need, limit = format_need_and_limit(room.peak_memory_bytes, room.memory_limit_bytes or 0)
    return f"needs {need} a rank at the least, there is {limit}"


def _set_ratio(one: Candidate, best: Candidate, value: Callable[[Candidate], float], machine: Machine) -> None:
    one.ratio = value(one) / value(best)
    if one is best:
        return
    spread = ratio_spread(one.predicted, best.predicted, machine)
    one.ratio_low, one.ratio_high = one.ratio * exp(-_NORMAL_90 * spread), one.ratio * exp(_NORMAL_90 * spread)


def ratio_spread(one: Prediction, other: Prediction, machine: Machine) -> float:
    """Standard deviation of the logarithm of the two step times' ratio.

    A machine that computes x % slower than thought makes both steps longer by x % of their shares of computation; so
    does its communication. The formulas' own errors are independent.
    """
    compute, comm = (
        _step_fraction(name, one) - _step_fraction(name, other) for name in ("compute_s", "exposed_comm_s")
    )
    own = FORMULA_SPREAD[machine.depth]
    return sqrt((compute * machine.compute.spread) ** 2 + (comm * machine.comm.spread) ** 2 + 2 * own * own)


def _step_fraction(name: str, one: Prediction) -> float:
    seconds: float = getattr(one, name)
    return seconds / one.step_time_s if one.step_time_s else 0.0


def largest_batch_size(spec: RunSpec, answers: Predictor) -> int | None:
    """The largest batch per replica that fits, cut into as many micro-batches; ``None`` where no limit is known."""
    most = DATASETS[spec.dataset].samples // spec.dp_degree // spec.micro_batches

    def room(size: int) -> float:
        """Bytes that are left with micro-batches of ``size``."""
        found = answers.memory_fit(msgspec.structs.replace(spec, batch_size=size * spec.micro_batches))
        if isinstance(found, NotPredicted) or found.memory_limit_bytes is None:
            return -inf
        return found.memory_limit_bytes - found.peak_memory_bytes

    low = spec.batch_size // spec.micro_batches
    left = room(low)
    if left < 0:
        return None
    high, is_proved = most + 1, False
    # Memory grows in proportion to the batch but for what is there anyway: a line through two sizes is nearly right.
    guess = min(2 * low, most)
    while low < most and high - low > max(1, low // 64):
        there = room(guess)
        slope = (left - there) / (guess - low)
        low, left = (guess, there) if there >= 0 else (low, left)
        high, is_proved = (high, is_proved) if there >= 0 else (guess, True)
        margin = max(1, low // 64, (high - low) // 8 if is_proved else 0)
        guess = low + int(left / slope) if slope > 0 else most
        guess = max(low + 1, min(max(guess, low + margin), high - margin if is_proved else most))
    return low * spec.micro_batches


def candidate_sweep_points(candidates: Iterable[Candidate]) -> Iterator[dict[str, Any]]:
    """Of each candidate the parameters that make it, as a sweep says them."""
    names = (
        "strategy", "nodes", "tasks_per_node", "batch_size", "micro_batches", "dp_degree", "tp_degree", "sp_degree",
        "pp_degree", "activation_checkpointing", "options",
    )  # fmt: skip
    for one in candidates:
        given = msgspec.to_builtins(one.spec)
        yield {name: given[name] for name in names if name in given}
