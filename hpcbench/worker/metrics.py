"""A run's figures from what its ranks measured. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from hpcbench.config.spec import RunSpec
from hpcbench.config.task import TaskHeader
from hpcbench.parallel.datasets import DATASETS
from hpcbench.parallel.shard import dropped_samples
from hpcbench.results.schema import Evaluation, Loss, Metrics, Phases, RankResult
from hpcbench.results.stats import spread
from hpcbench.results.steady import drift, outliers, steadiness_warnings

_Number = TypeVar("_Number", int, float)


class Measured(NamedTuple):
    """``slowest`` holds every timed step's time on its slowest rank; the first ``skipped`` were still warming up."""

    spec: RunSpec
    header: TaskHeader
    ranks: Mapping[int, RankResult]
    slowest: list[float]
    skipped: int
    samples: int
    """Of one epoch."""

    def rate(self) -> float | None:
        """Samples per second over the steady steps; ``None`` where a rank left no file."""
        steady = self.slowest[self.skipped :]
        if len(self.ranks) < self.spec.ranks or sum(steady) <= 0:
            return None
        return sum(global_step_samples(self.ranks)[self.skipped : len(self.slowest)]) / sum(steady)


def metrics_of(measured: Measured, warnings: list[str]) -> Metrics:
    """All figures; what makes one of them doubtful is appended to ``warnings``."""
    spec, header, ranks, slowest, skipped, samples = measured
    steady, rate = slowest[skipped:], measured.rate()
    times = spread(steady)
    warnings += steadiness_warnings(steady, times)
    reached = _reached(spec, ranks)
    flops_per_s, mfu = _utilisation(spec, header, ranks, rate)
    whole = len(ranks) == spec.ranks
    metrics = Metrics(
        step_time_s=times,
        samples_per_s=rate,
        epoch_time_s=epoch_samples(spec, samples) / rate if rate else None,
        flops_per_s=flops_per_s,
        mfu=mfu,
        peak_memory_bytes=_largest(one.peak_memory_bytes for one in ranks.values()),
        peak_reserved_bytes=_largest(one.peak_reserved_bytes for one in ranks.values()),
        time_to_first_step_s=_largest(one.time_to_first_step_s for one in ranks.values()),
        loss=_loss(ranks, warnings) if whole else None,
        accuracy=next((one.accuracy for one in ranks.values() if one.accuracy is not None), None),
        time_to_accuracy_s=reached.train_time_s if reached else None,
        steps_to_accuracy=reached.step if reached else None,
        outlier_steps=outliers(steady),
        drift=drift(steady),
        **_energy(spec, ranks),
    )
    if spec.rehearse is not None:
        for name in _NOT_REHEARSED:
            setattr(metrics, name, None)
    split = _slowest_split(ranks)
    for name in _PARTS if split else ():
        setattr(metrics, name, getattr(split, name))
    return metrics


_NOT_REHEARSED = (
    "loss", "accuracy", "flops_per_s", "mfu", "peak_memory_bytes", "peak_reserved_bytes", "energy_j", "energy_source",
)  # fmt: skip
"""What a run that computed nothing has not measured."""


def _largest(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)


_PARTS = tuple(name for name in Phases.__struct_fields__ if name != "step_s")


def _slowest_split(ranks: Mapping[int, RankResult]) -> Phases | None:
    """The parts of a step on the slowest rank: of those that were profiled the one that computes longest."""
    profiled = [one.phases for one in ranks.values() if one.phases is not None]
    return max(profiled, key=lambda one: (one.compute_s or 0.0, one.step_s), default=None)


def _reached(spec: RunSpec, ranks: Mapping[int, RankResult]) -> Evaluation | None:
    """The first evaluation at the target."""
    target = spec.target_accuracy
    if target is None:
        return None
    made = (evaluation for rank in sorted(ranks) for evaluation in ranks[rank].evaluations)
    return next((evaluation for evaluation in made if evaluation.accuracy >= target), None)


def _utilisation(
    spec: RunSpec, header: TaskHeader, ranks: Mapping[int, RankResult], rate: float | None
) -> tuple[float | None, float | None]:
    """FLOP/s of all devices, and their share of the devices' peak in the run's precision where the profile knows it."""
    per_sample = next((one.flops_per_sample for one in ranks.values() if one.flops_per_sample is not None), None)
    if rate is None or per_sample is None:
        return None, None
    peak = header.peak_flops_per_s.get(spec.precision)
    return per_sample * rate, per_sample * rate / (spec.devices * peak) if peak else None


def _energy(spec: RunSpec, ranks: Mapping[int, RankResult]) -> dict[str, Any]:
    """The sum over all devices: of every rank, or of every node where a counter is the node's."""
    found = {rank: one for rank, one in ranks.items() if one.energy_j is not None}
    of_nodes = [rank for rank, one in ranks.items() if one.local_rank == 0]
    if len(ranks) < spec.ranks or not found or sorted(found) not in (sorted(ranks), sorted(of_nodes)):
        return {}
    sources = dict.fromkeys(one.energy_source for one in found.values() if one.energy_source)
    total_j = math.fsum(one.energy_j for one in found.values() if one.energy_j is not None)
    return {"energy_j": total_j, "energy_source": "; ".join(sources)}


def global_step_samples(ranks: Mapping[int, RankResult]) -> list[int]:
    """Samples of each timed step over all replicas; the ranks of one replica share theirs and count once."""
    replicas = {one.replica: one.step_samples for one in ranks.values()}
    return [sum(counts) for counts in zip(*replicas.values(), strict=False)]


def _loss(ranks: Mapping[int, RankResult], warnings: list[str]) -> Loss | None:
    """Parts of the ranks add up. A sum with a part that is not finite is absent, and a warning says since when."""
    totals = [
        None if any(part is None for part in parts) else math.fsum(part for part in parts if part is not None)
        for parts in zip(*(one.losses for one in ranks.values()), strict=False)
    ]
    if not totals:
        return None
    if None in totals:
        warnings.append(f"the loss diverged: it is not finite from step {totals.index(None)} on (0 is the first)")
    return Loss(first=totals[0], last=totals[-1])


def epoch_samples(spec: RunSpec, samples: int | None = None) -> int:
    """Samples that the steps of one epoch take; ``samples`` where files held another number than the set has."""
    samples = samples or DATASETS[spec.dataset].samples
    return samples - dropped_samples(samples, spec.global_batch_size, spec.dp_degree, spec.drop_last)
