"""The prediction for one run: step time with its interval, the parts of the step, peak memory and bottleneck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import exp, hypot, log
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import CostModel, StepBreakdown, combined_relative_spread
from hpcbench.predict.machine import Machine
from hpcbench.predict.measured_factors import PRIOR_SPREAD, LearnedFactor, Neighbour
from hpcbench.predict.peak_memory import MemoryBreakdown
from hpcbench.predict.strategy_cost import count_operators, resolve_cost
from hpcbench.results.timing_statistics import OPERATOR_S
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.units import format_bytes

NORMAL_90 = 1.645
"""Quantile of the standard normal distribution: 90 % lie within its two sides."""
FORMULA_SPREAD = 0.10
"""Standard deviation of the logarithm of measured over predicted step times of distributed runs where the machine's
numbers have no error: the error of a strategy's formulas (``docs/decisions/0029-statistics-of-predictions.md``)."""


class PredictionInterval(msgspec.Struct, frozen=True, kw_only=True):
    """The interval that contains the step time with a probability of 90 %, given the machine's uncertainties."""

    low: float
    high: float


MEASURED_FOR_SWEEP: Final = "calibrated for this sweep"
BasisKind = Literal["profile", "published runs", "calibrated", "calibrated for this sweep", "measured neighbours"]
"""The profile's numbers alone; a decoder's step learned from published runs; a calibration's; measured times of all
layers and messages of the run itself; any of these, moved by measured configurations."""


class PredictionBasis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The evidence of a prediction."""

    kind: BasisKind
    base: BasisKind | None = None
    """Kind of the prediction that measured neighbours moved."""
    factor: float = 1.0
    """Factor on the prediction by the machine's numbers alone."""
    undetermined: float = 1.0
    """Share of the factor's prior variance that the measurements leave."""
    distinct: float = 0.0
    """Standard deviation of the part of the factor's logarithm that two strategies do not share."""
    spread: float = 0.0
    """Standard deviation of the logarithm of a launch, apart from the factor."""
    counts: dict[str, int] = {}
    """Number of measured configurations by what they share with the run, the nearest first."""
    neighbours: list[Neighbour] = []
    """The nearest of them."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds of one steady step, split as measured results are, and bytes of the rank that holds most."""

    step_time_s: float
    interval: PredictionInterval
    compute_s: float
    comm_s: float
    exposed_comm_s: float
    bubble_fraction: float
    straggler_s: float
    samples_per_s: float
    peak_memory_bytes: int
    memory: MemoryBreakdown
    bound_by: str
    """``compute``, ``latency``, ``bandwidth``, ``bubble``, ``host`` where the device waits for operators to
    be launched, or ``memory`` where the run does not fit."""
    fits: bool | None
    """``None`` where the device's memory is unknown."""
    memory_limit_bytes: int | None = None
    depth: str
    """``nominal`` or ``calibrated``."""
    source: str
    rests_on: PredictionBasis

    def scaled(self, factor: float, **changes: Any) -> Prediction:
        """Return a copy with all times multiplied by ``factor``, and ``changes``."""
        times = {name: getattr(self, name) * factor for name in _TIMES}
        return msgspec.structs.replace(self, **times, samples_per_s=self.samples_per_s / factor, **changes)


CostModelFactory = Callable[[Machine, RunSpec], CostModel]
"""Constructor of the cost model of a run on a machine."""


def predict(
    spec: RunSpec,
    table: LayerTable,
    machine: Machine,
    clock_of: CostModelFactory = CostModel,
    memory: MemoryBreakdown | None = None,
) -> Prediction:
    """Predict one run.

    Args:
        table: of the run's model, data set, input size and options.
        clock_of: prices the run where it is another library's.
        memory: the result of ``peak_rank_memory``, where it is known already.
    """
    cost_model = clock_of(machine, spec)
    step, host_wait_s = wait_for_host(resolve_cost(spec.strategy).step(spec, table, cost_model), spec, table, machine)
    memory = memory or peak_rank_memory(spec, table, machine.device)
    peak = memory.total_bytes + round(machine.base_bytes)
    fits = None if machine.memory_bytes is None else peak <= machine.memory_bytes
    compute_spread, comm_spread = cost_model.spreads()
    computation_s = step.compute_s - host_wait_s
    parts = [(computation_s, compute_spread), (step.exposed_comm_s, comm_spread), (host_wait_s, _LAUNCH_SPREAD)]
    spread = hypot(combined_relative_spread(parts, step.step_time_s), FORMULA_SPREAD * (spec.devices > 1))
    return Prediction(
        step_time_s=step.step_time_s,
        interval=PredictionInterval(
            low=step.step_time_s * exp(-NORMAL_90 * spread), high=step.step_time_s * exp(NORMAL_90 * spread)
        ),
        compute_s=step.compute_s,
        comm_s=step.comm_s,
        exposed_comm_s=step.exposed_comm_s,
        bubble_fraction=step.bubble_s / step.step_time_s if step.step_time_s else 0.0,
        straggler_s=step.straggler_s,
        samples_per_s=spec.global_batch_size / step.step_time_s if step.step_time_s else 0.0,
        peak_memory_bytes=peak,
        memory=memory,
        bound_by="memory" if fits is False else "host" if host_wait_s else bottleneck(step),
        fits=fits,
        memory_limit_bytes=None if machine.memory_bytes is None else round(machine.memory_bytes),
        depth=machine.depth,
        source=machine.source,
        rests_on=PredictionBasis(kind=_basis_kind(cost_model)),
    )


_LAUNCH_SPREAD = 0.35
"""Relative uncertainty of the time in which a host launches an operator."""


def wait_for_host(
    step: StepBreakdown, spec: RunSpec, table: LayerTable, machine: Machine
) -> tuple[StepBreakdown, float]:
    """Return the step with the seconds for which an accelerator waits for its host, and these seconds.

    The host launches operators in a stream of its own, ahead of the device: without waits for values a step takes as
    long as the longer stream. The wait is a part of the computation, as clocks on the device measure it.
    """
    if machine.device == "cpu" or spec.compile:
        return step, 0.0
    host_s = count_operators(spec, table) * OPERATOR_S
    wait_s = max(host_s - step.step_time_s, 0.0)
    return step._replace(step_time_s=step.step_time_s + wait_s, compute_s=step.compute_s + wait_s), wait_s


BASIS_TEXTS: Mapping[BasisKind, str] = {
    "profile": "from the profile", "published runs": "from published runs", "calibrated": "from the calibration",
    MEASURED_FOR_SWEEP: "from the calibration for this sweep", "measured neighbours": "from measured neighbours",
}  # fmt: skip


def count_bases(bases: Iterable[PredictionBasis]) -> str:
    """``4 from the calibration for this sweep, 2 from the calibration; 3 of them adjusted by measured neighbours``."""
    listed = list(bases)
    kinds = Counter(basis.base or basis.kind for basis in listed)
    moved = sum(bool(basis.counts) for basis in listed)
    text = ", ".join(f"{count} {BASIS_TEXTS[kind]}" for kind, count in kinds.most_common())
    return f"{text}; {moved} of them adjusted by measured neighbours" if moved else text


def _basis_kind(cost_model: CostModel) -> BasisKind:
    if cost_model.is_measured:
        return MEASURED_FOR_SWEEP
    return "profile" if cost_model.machine.depth == "nominal" else "calibrated"


def correct_prediction(prediction: Prediction, learned: LearnedFactor) -> Prediction:
    """Return ``prediction`` moved by measured configurations: all times by one factor.

    The interval is that of the factor's posterior and of the configurations' own scatter. It is never wider than
    before, except where that scatter alone is.
    """
    return prediction.scaled(
        learned.factor,
        interval=correct_interval(prediction.step_time_s, prediction.interval, learned),
        rests_on=neighbour_basis(learned, prediction.rests_on.kind),
    )


def neighbour_basis(learned: LearnedFactor, base: BasisKind | None) -> PredictionBasis:
    """Return the evidence of a prediction of kind ``base`` that measured configurations moved."""
    return PredictionBasis(
        kind="measured neighbours", base=base, factor=learned.factor, undetermined=learned.undetermined,
        distinct=learned.distinct, spread=learned.spread, counts=learned.counts, neighbours=learned.neighbours,
    )  # fmt: skip


def correct_interval(step_time_s: float, interval: PredictionInterval, learned: LearnedFactor) -> PredictionInterval:
    """Return the interval of a prediction that measured configurations moved; both arguments are those before."""
    spread = hypot(learned.undetermined**0.5 * PRIOR_SPREAD, learned.spread)

    def side(bound_s: float) -> float:
        before = abs(log(bound_s / step_time_s)) / NORMAL_90 if step_time_s and bound_s else 0.0
        return min(spread, max(before, learned.spread))

    middle_s = step_time_s * learned.factor
    return PredictionInterval(
        low=middle_s * exp(-NORMAL_90 * side(interval.low)), high=middle_s * exp(NORMAL_90 * side(interval.high))
    )


_TIMES = ("step_time_s", "compute_s", "comm_s", "exposed_comm_s", "straggler_s")
"""Fields of a prediction in seconds."""


def peak_rank_memory(spec: RunSpec, table: LayerTable, device: str = "cuda") -> MemoryBreakdown:
    """Return the memory of the device with the highest peak. Devices that one rank drives are one on a ``cpu``."""
    cost = resolve_cost(spec.strategy)
    if device == "cpu" and spec.devices_per_task > 1:
        devices = [cost.memory(spec, table, place) for place in range(spec.devices_per_task)]
        fields = MemoryBreakdown.__struct_fields__
        peak = MemoryBreakdown(**{name: sum(getattr(each, name) for each in devices) for name in fields})
    else:
        ranks = (cost.memory(spec, table, rank).on(device) for rank in cost.ranks_that_differ(spec))
        peak = max(ranks, key=lambda memory: memory.total_bytes)
    return peak.on(device)


def bottleneck(step: StepBreakdown) -> str:
    """Return the part that takes most of the step."""
    parts = {
        "compute": step.compute_s + step.straggler_s,
        "latency": step.latency_s,
        "bandwidth": step.exposed_comm_s - step.latency_s,
        "bubble": step.bubble_s,
    }
    return max(parts, key=lambda name: parts[name])


class NotPredicted(NamedTuple):
    """The reason why a run has no prediction."""

    reason: str


class MemoryFit(NamedTuple):
    """The peak memory of a run, and the memory of its device."""

    peak_memory_bytes: int
    memory_limit_bytes: int | None
    """``None`` where it is unknown."""

    @property
    def is_enough(self) -> bool:
        """Whether the run fits, as far as is known."""
        return self.memory_limit_bytes is None or self.peak_memory_bytes <= self.memory_limit_bytes


def format_need_and_limit(need_bytes: int, limit_bytes: int) -> tuple[str, str]:
    """Return both as text, in MiB where they would be equal otherwise."""
    texts = format_bytes(need_bytes), format_bytes(limit_bytes)
    return texts if texts[0] != texts[1] else (f"{need_bytes / 2**20:.0f} MiB", f"{limit_bytes / 2**20:.0f} MiB")


class Predictor(Protocol):
    """The protocol of predictions for the runs of one cluster, by which ``recommend`` ranks candidates.

    ``hpcbench.predict.forecast.Forecast`` implements it. All methods take a resolved run. The first two raise nothing:
    a run without a prediction gets ``NotPredicted`` with the reason.
    """

    def predict(self, spec: RunSpec) -> Prediction | NotPredicted:
        """Return step time (s), its parts and its 90 % interval, and peak memory (bytes)."""

    def memory_fit(self, spec: RunSpec) -> MemoryFit | NotPredicted:
        """Return peak memory and memory limit of a rank (bytes), without computing a step time."""

    def machine(self, spec: RunSpec) -> Machine:
        """Return the machine that prices the run.

        Raises:
            HpcbenchError: The profile or the calibration of the run's partition cannot be read.
        """
