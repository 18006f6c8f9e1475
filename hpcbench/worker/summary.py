"""The result of a run, computed from the files of its ranks. This module does not import torch: ``end`` uses it too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from hpcbench.config.run_spec import RunSpec, RunTask, TaskFileHeader
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.mesh import RankMesh, dropped_samples
from hpcbench.parallel.pipeline.schedule_simulator import ActionSpan, measured_bubble_fraction
from hpcbench.parallel.pipeline.schedules import Action
from hpcbench.parallel.pipeline.steady_state import planned_timeline
from hpcbench.parallel.strategies.pipeline import pipeline_layout
from hpcbench.parallel.traffic import total_payload_bytes
from hpcbench.parallel.workloads import DATASETS
from hpcbench.results.schema import (
    STATUS_OK,
    EvaluationPoint,
    FailureRecord,
    LossSummary,
    PipelineTimeline,
    RankResult,
    RankTimeline,
    RankTraffic,
    RunMetrics,
    RunResult,
    StepPhases,
    TimelineSpan,
)
from hpcbench.results.timing_statistics import (
    count_outliers,
    count_warmup_steps,
    make_steadiness_warnings,
    make_warmup_warning,
    relative_drift,
    step_time_statistics,
)
from hpcbench.worker.failure import join_numbers
from hpcbench.worker.measure.interference import interference_warnings

_Number = TypeVar("_Number", int, float)
_Value = TypeVar("_Value")


class MetricsInput(NamedTuple):
    """``slowest`` holds every timed step's time on its slowest rank; the first ``skipped`` were still warming up."""

    spec: RunSpec
    header: TaskFileHeader
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


def compute_metrics(measured: MetricsInput, warnings: list[str]) -> RunMetrics:
    """All figures; what makes one of them doubtful is appended to ``warnings``."""
    spec, header, ranks, slowest, skipped, samples = measured
    steady, rate = slowest[skipped:], measured.rate()
    times = step_time_statistics(steady)
    warnings += make_steadiness_warnings(steady, times)
    reached = _first_target_evaluation(spec, ranks)
    flops_per_s, mfu = _flops_and_mfu(spec, header, ranks, rate)
    whole = len(ranks) == spec.ranks
    metrics = RunMetrics(
        step_time_s=times,
        samples_per_s=rate,
        epoch_time_s=samples_per_epoch(spec, samples) / rate if rate else None,
        flops_per_s=flops_per_s,
        mfu=mfu,
        peak_memory_bytes=_max_known(result.peak_memory_bytes for result in ranks.values()),
        peak_reserved_bytes=_max_known(result.peak_reserved_bytes for result in ranks.values()),
        time_to_first_step_s=_max_known(result.time_to_first_step_s for result in ranks.values()),
        loss=_global_loss(ranks, warnings) if whole else None,
        accuracy=_first_known(result.accuracy for result in ranks.values()),
        time_to_accuracy_s=reached.train_time_s if reached else None,
        steps_to_accuracy=reached.step if reached else None,
        outlier_steps=count_outliers(steady),
        drift=relative_drift(steady),
        **_total_energy(spec, ranks),
    )
    if spec.rehearse is not None:
        for name in _ABSENT_WHEN_EMULATED:
            setattr(metrics, name, None)
    split = _slowest_phases(ranks)
    for name in _PHASE_FIELDS if split else ():
        setattr(metrics, name, getattr(split, name))
    return metrics


_ABSENT_WHEN_EMULATED = (
    "loss", "accuracy", "flops_per_s", "mfu", "peak_memory_bytes", "peak_reserved_bytes", "energy_j", "energy_source",
)  # fmt: skip
"""What a run that computed nothing has not measured."""


def _max_known(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)


def _first_known(values: Iterable[_Value | None]) -> _Value | None:
    return next((value for value in values if value is not None), None)


_PHASE_FIELDS = tuple(name for name in StepPhases.__struct_fields__ if name != "step_s")


def _slowest_phases(ranks: Mapping[int, RankResult]) -> StepPhases | None:
    """The parts of a step on the slowest rank: of those that were profiled the one that computes longest."""
    profiled = [one.phases for one in ranks.values() if one.phases is not None]
    return max(profiled, key=lambda one: (one.compute_s or 0.0, one.step_s), default=None)


def _first_target_evaluation(spec: RunSpec, ranks: Mapping[int, RankResult]) -> EvaluationPoint | None:
    """The first evaluation at the target."""
    target = spec.target_accuracy
    if target is None:
        return None
    made = (evaluation for rank in sorted(ranks) for evaluation in ranks[rank].evaluations)
    return next((evaluation for evaluation in made if evaluation.accuracy >= target), None)


def _flops_and_mfu(
    spec: RunSpec, header: TaskFileHeader, ranks: Mapping[int, RankResult], rate: float | None
) -> tuple[float | None, float | None]:
    """FLOP/s of all devices, and their share of the devices' peak in the run's precision where the profile knows it."""
    per_sample = _first_known(result.flops_per_sample for result in ranks.values())
    if rate is None or per_sample is None:
        return None, None
    peak = header.peak_flops_per_s.get(spec.precision)
    return per_sample * rate, per_sample * rate / (spec.devices * peak) if peak else None


def _total_energy(spec: RunSpec, ranks: Mapping[int, RankResult]) -> dict[str, Any]:
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


def _global_loss(ranks: Mapping[int, RankResult], warnings: list[str]) -> LossSummary | None:
    """Parts of the ranks add up. A sum with a part that is not finite is absent, and a warning says since when."""
    totals = [
        None if any(part is None for part in parts) else math.fsum(part for part in parts if part is not None)
        for parts in zip(*(one.losses for one in ranks.values()), strict=False)
    ]
    if not totals:
        return None
    if None in totals:
        warnings.append(f"the loss diverged: it is not finite from step {totals.index(None)} on (0 is the first)")
    return LossSummary(first=totals[0], last=totals[-1])


def samples_per_epoch(spec: RunSpec, samples: int | None = None) -> int:
    """Samples that the steps of one epoch take; ``samples`` where files held another number than the set has."""
    samples = samples or DATASETS[spec.dataset].samples
    return samples - dropped_samples(samples, spec.global_batch_size, spec.dp_degree, spec.drop_last)


def pipeline_timeline(spec: RunSpec, ranks: Mapping[int, RankResult]) -> PipelineTimeline | None:
    """The first replica's ranks; ``None`` where the run is no pipeline of one step, or a rank recorded nothing."""
    group = RankMesh.of(spec).group(0, "pp")
    has_timelines = all(rank in ranks and ranks[rank].timeline for rank in group)
    if not has_timelines or not get_strategy(spec.strategy).records_timeline:
        return None
    measured = {
        stage: [
            ActionSpan(Action(span.kind, span.chunk, span.micro_batch), span.begin_s, span.end_s)
            for span in ranks[rank].timeline
        ]
        for stage, rank in enumerate(group)
    }
    planned = planned_timeline(spec.strategy, pipeline_layout(spec), spec.micro_batches, measured)
    begin = min(spans[0].begin for spans in measured.values())
    return PipelineTimeline(
        bubble_fraction=measured_bubble_fraction(list(measured.values())),
        planned_bubble_fraction=planned.bubble_fraction,
        measured_s=max(spans[-1].end for spans in measured.values()) - begin,
        planned_s=planned.end,
        ranks=[
            RankTimeline(
                rank=rank,
                planned=[TimelineSpan(*span.action, span.begin, span.end) for span in planned.ranks[stage]],
                measured=[TimelineSpan(*span.action, span.begin - begin, span.end - begin) for span in measured[stage]],
            )
            for stage, rank in enumerate(group)
        ],
    )


_RANK_FIELDS = (
    "rank", "local_rank", "node_rank", "replica", "host", "pid", "device", "cpu_mask", "status", "steps_done",
    "peak_memory_bytes", "peak_reserved_bytes", "time_to_first_step_s", "phases", "state",
)  # fmt: skip
_RANK_PROVENANCE_KEYS = ("threads", "gpu_model", "gpu_uuid")


def summarize_run(
    header: TaskFileHeader,
    task: RunTask,
    attempt: int,
    ranks: Mapping[int, RankResult],
    status: str,
    error: FailureRecord | None = None,
) -> RunResult:
    """The result of a run from its ranks' files; ranks that left none are named in ``ranks``."""
    spec = task.spec
    slowest = slowest_rank_times_s(ranks)
    provenance = _run_provenance(ranks)
    if header.environment_key is not None:
        provenance["environment_key"] = header.environment_key
    warnings: list[str] = []
    warmup_steps = count_warmup_steps(slowest)
    # Files may hold another number of samples than the data set: the feed has counted them.
    samples = provenance.get("data", {}).get("epoch_samples") or DATASETS[spec.dataset].samples
    measured = MetricsInput(spec, header, ranks, slowest, warmup_steps or 0, samples)
    metrics = compute_metrics(measured, warnings) if ranks else RunMetrics()
    metrics.warmup_found_steps = warmup_steps
    timeline = pipeline_timeline(spec, ranks)
    metrics.bubble_fraction = timeline.bubble_fraction if timeline is not None else None
    if warmup_steps:
        warnings.append(make_warmup_warning(warmup_steps, len(slowest), spec.warmup_steps))
    if slowest and len(ranks) < spec.ranks:
        warnings.append(
            f"step times are those of the ranks that left a file ({join_numbers(sorted(ranks))}), not of all"
        )
    return RunResult(
        run_id=task.run_id,
        config_id=task.config_id,
        attempt=attempt,
        sweep=task.sweep,
        cluster=header.cluster,
        status=status,
        spec=spec,
        metrics=metrics,
        predicted=_first_known(result.predicted for result in ranks.values()),
        ranks=[_rank_entry(rank, ranks.get(rank), measured.skipped) for rank in range(spec.ranks)],
        step_times_s=slowest,
        traffic=_max_rank_traffic(ranks),
        warnings=[
            *warnings,
            *_batch_warnings(spec, len(slowest), samples),
            *interference_warnings(spec, ranks),
            *_rank_warnings(ranks),
        ],
        probe=_first_known(result.probe for result in ranks.values()),
        timeline=timeline,
        verification=_first_known(result.verification for result in ranks.values()),
        provenance=provenance,
        environment_digest=provenance.pop("environment_digest", None),
        error=None if status == STATUS_OK else error,
    )


def slowest_rank_times_s(ranks: Mapping[int, RankResult]) -> list[float]:
    """Of every timed step that all ranks have ended, the longest time that any of them took."""
    return [max(times) for times in zip(*(result.step_times_s for result in ranks.values()), strict=False)]


def _batch_warnings(spec: RunSpec, timed: int, samples: int) -> list[str]:
    batch = spec.global_batch_size
    found = []
    dropped = dropped_samples(samples, batch, spec.dp_degree, spec.drop_last)
    if dropped:
        why = "drop_last" if spec.drop_last else "the last batch would give a replica fewer than 2"
        found.append(f"{dropped} of {samples} samples of an epoch are left out: {why}")
    partial = (samples - dropped) % batch if samples > batch else samples % batch
    steps = -(-(samples - dropped) // batch)
    last_of_epoch = (steps - 1 - spec.warmup_steps) % steps
    if partial and last_of_epoch < timed:
        found.append(f"the last batch of an epoch holds {partial} of {batch} samples; counted as {partial}")
    return found


def _rank_warnings(ranks: Mapping[int, RankResult]) -> list[str]:
    """Every warning once, with the ranks that gave it where not all did."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        for text in ranks[rank].warnings:
            by_text.setdefault(text, []).append(rank)
    return [text if len(who) == len(ranks) else f"{text} (ranks {join_numbers(who)})" for text, who in by_text.items()]


def _run_provenance(ranks: Mapping[int, RankResult]) -> dict[str, Any]:
    """Of the first rank that spoke for its host, or that left any, with every host of the run."""
    left = [ranks[rank].provenance for rank in sorted(ranks) if ranks[rank].provenance]
    fullest = next((one for one in left if "environment_digest" in one), left[0] if left else {})
    hosts = list(dict.fromkeys(ranks[rank].host for rank in sorted(ranks)))
    return {**fullest, "hosts": hosts} if ranks else {}


def _max_rank_traffic(ranks: Mapping[int, RankResult]) -> RankTraffic | None:
    """That of the rank that passes most bytes, the first of equal ones."""
    passed = {rank: total_payload_bytes(ranks[rank].traffic) for rank in sorted(ranks) if ranks[rank].traffic}
    if not passed:
        return None
    rank = max(passed, key=passed.__getitem__)
    return RankTraffic(rank=rank, calls=ranks[rank].traffic)


def _rank_entry(rank: int, result: RankResult | None, skipped: int) -> dict[str, Any]:
    if result is None:
        return {"rank": rank, "left_file": False}
    times = result.step_times_s[skipped:]
    entry = {
        **{name: msgspec.to_builtins(getattr(result, name)) for name in _RANK_FIELDS},
        "step_time_median_s": statistics.median(times) if times else None,
        "error": result.error.message if result.error else None,
        **{key: result.provenance.get(key) for key in _RANK_PROVENANCE_KEYS},
    }
    return {key: value for key, value in entry.items() if value is not None}
