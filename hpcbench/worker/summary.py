"""The result of a run, computed from the files of its ranks. This module does not import torch: ``end`` uses it too."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hpcbench.config.command import Command
from hpcbench.config.run_spec import RunSpec, RunTask, TaskFileHeader
from hpcbench.results import schema, timing_statistics
from hpcbench.strategies.catalog import COLLECTIVES, get_strategy
from hpcbench.strategies.mesh import RankMesh, dropped_samples
from hpcbench.strategies.pipeline.entry import pipeline_layout
from hpcbench.strategies.pipeline.schedule_simulator import ActionSpan, measured_bubble_fraction, planned_timeline
from hpcbench.strategies.pipeline.schedules import Action
from hpcbench.strategies.traffic import total_payload_bytes
from hpcbench.units import format_seconds
from hpcbench.worker.command.metrics import command_metrics
from hpcbench.worker.energy import (
    command_energy,
    energy_metrics,
    energy_warnings,
    global_step_samples,
    tokens_per_sample,
)
from hpcbench.worker.failure import join_numbers
from hpcbench.worker.measure.interference import interference_warnings
from hpcbench.worker.microbench.collective_metrics import BANDWIDTHS, collective_metrics, merge_probes
from hpcbench.workloads.datasets import DATASETS

_PHASE_FIELDS = tuple(name for name in schema.StepPhases.__struct_fields__ if name != "step_s")


def compute_metrics(
    spec: RunSpec, header: TaskFileHeader, ranks: Mapping[int, schema.RankResult], slowest: list[float], skipped: int,
    samples: int | None, warnings: list[str],
) -> schema.RunMetrics:  # fmt: skip
    """Compute all figures; what makes one of them doubtful is appended to ``warnings``.

    Args:
        slowest: Seconds of every timed step on its slowest rank; the first ``skipped`` were still warming up.
        samples: Samples of one epoch, where they were counted or the data set states them.
    """
    steady, is_whole = slowest[skipped:], len(ranks) == spec.ranks
    step_times = timing_statistics.step_time_metrics(steady, warnings)
    rate = flops_per_s = None
    intervals_s = timing_statistics.timed_intervals_s(ranks, skipped)
    timed_s = max(intervals_s.values(), default=0.0) if is_whole else 0.0
    if timed_s > 0:
        rate = sum(global_step_samples(ranks)[skipped : len(slowest)]) / timed_s
    flops_per_sample, peak = (
        _first_known(ranks, "flops_per_sample"),
        header.peak_flops_per_s.get(spec.compute_precision),
    )
    recomputed = _first_known(ranks, "recomputed_flops_per_sample")
    if rate is not None and flops_per_sample is not None:
        flops_per_s = flops_per_sample * rate
    mfu = flops_per_s / (spec.devices * peak) if flops_per_s is not None and peak else None
    is_recomputation_known = mfu is not None and flops_per_sample and recomputed is not None
    evaluations = [evaluation for rank in sorted(ranks) for evaluation in ranks[rank].evaluations]
    target = spec.target_accuracy
    reached = next((point for point in evaluations if target is not None and point.accuracy >= target), None)
    metrics = schema.RunMetrics(
        **step_times,
        samples_per_s=rate,
        timed_s=timed_s or None,
        **_token_rates(spec, rate),
        epoch_time_s=samples_per_epoch(spec, samples) / rate if rate else None,
        flops_per_s=flops_per_s,
        mfu=mfu,
        hfu=mfu * (1 + recomputed / flops_per_sample) if is_recomputation_known else None,
        loss=_global_loss(ranks, warnings) if is_whole else None,
        accuracy=_first_known(ranks, "accuracy"),
        time_to_accuracy_s=reached.train_time_s if reached else None,
        time_to_accuracy_with_evaluation_s=reached.wall_s if reached else None,
        steps_to_accuracy=reached.step if reached else None,
        **timing_statistics.straggler_statistics(ranks if is_whole else {}, skipped),
        **_step_phases(spec, ranks),
        **energy_metrics(spec, ranks),
    )
    for name in ("peak_memory_bytes", "steady_peak_memory_bytes", "peak_reserved_bytes", "time_to_first_step_s"):
        setattr(metrics, name, max(_known(ranks, name), default=None))
    return metrics


def _step_phases(spec: RunSpec, ranks: Mapping[int, schema.RankResult]) -> dict[str, Any]:
    """Parts of a profiled step on the rank that computes longest, and what all ranks' communication consists of."""
    profiled = {rank: ranks[rank].phases for rank in sorted(ranks)}
    phases_of = {rank: phases for rank, phases in profiled.items() if phases is not None}
    if not phases_of:
        return {}
    longest = max(phases_of, key=lambda rank: (phases_of[rank].compute_s or 0.0, phases_of[rank].step_s))
    values = {"phases_rank": longest, **{name: getattr(phases_of[longest], name) for name in _PHASE_FIELDS}}
    comm_s = [phases.comm_s for phases in phases_of.values() if phases.comm_s is not None]
    if spec.pp_degree == 1 and len(comm_s) == spec.ranks:
        values |= {"wire_s": min(comm_s), "wait_s": statistics.fmean(comm_s) - min(comm_s)}
    return values


def _token_rates(spec: RunSpec, samples_per_s: float | None) -> dict[str, Any]:
    """Return the tokens per second of all devices and of one, where samples are sequences."""
    tokens = tokens_per_sample(spec)
    if samples_per_s is None or tokens is None:
        return {}
    tokens_per_s = samples_per_s * tokens
    return {"tokens_per_s": tokens_per_s, "tokens_per_s_per_device": tokens_per_s / spec.devices}


def _known(ranks: Mapping[int, schema.RankResult], field: str) -> list[Any]:
    """Return the values of ``field`` of the ranks that have one."""
    return [value for result in ranks.values() if (value := getattr(result, field)) is not None]


def _first_known(ranks: Mapping[int, schema.RankResult], field: str) -> Any:
    return next(iter(_known(ranks, field)), None)


def _global_loss(ranks: Mapping[int, schema.RankResult], warnings: list[str]) -> schema.LossSummary | None:
    """Sum the ranks' parts. A sum with a part that is not finite is absent; a warning names the first such step."""
    parts_by_step: Iterable[tuple[Any, ...]] = zip(*(result.losses for result in ranks.values()), strict=False)
    totals = [None if None in parts else math.fsum(parts) for parts in parts_by_step]
    if not totals:
        return None
    if None in totals:
        warnings.append(f"the loss diverged: it is not finite from step {totals.index(None)} on (0 is the first)")
    return schema.LossSummary(first=totals[0], last=totals[-1])


def samples_per_epoch(spec: RunSpec, samples: int | None = None) -> int:
    """Samples that the steps of one epoch take; ``samples`` where files held another number than the set has."""
    samples = samples or DATASETS[spec.dataset].samples
    return samples - dropped_samples(samples, spec.global_batch_size, spec.dp_degree, spec.drop_last)


def pipeline_timeline(spec: RunSpec, ranks: Mapping[int, schema.RankResult]) -> schema.PipelineTimeline | None:
    """The first replica's ranks; ``None`` where the run is not a pipeline of one step, or a rank recorded nothing."""
    group = RankMesh.of(spec).group(0, "pp")
    has_timelines = all(rank in ranks and ranks[rank].timeline for rank in group)
    if not has_timelines or not get_strategy(spec.strategy).pipeline.records_timeline:
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
    timelines = [
        schema.RankTimeline(
            rank=rank,
            planned=[schema.TimelineSpan(*span.action, span.begin, span.end) for span in planned.ranks[stage]],
            measured=[
                schema.TimelineSpan(*span.action, span.begin - begin, span.end - begin) for span in measured[stage]
            ],
        )
        for stage, rank in enumerate(group)
    ]
    return schema.PipelineTimeline(
        bubble_fraction=measured_bubble_fraction(list(measured.values())),
        planned_bubble_fraction=planned.bubble_fraction,
        measured_s=max(spans[-1].end for spans in measured.values()) - begin,
        planned_s=planned.end,
        ranks=timelines,
    )


_RANK_FIELDS = (
    "rank", "local_rank", "node_rank", "replica", "host", "pid", "device", "cpu_mask", "status", "steps_done",
    "peak_memory_bytes", "steady_peak_memory_bytes", "peak_reserved_bytes", "time_to_first_step_s", "phases",
    "host_syncs", "state", "device_power",
)  # fmt: skip
_RANK_PROVENANCE_KEYS = ("threads", "gpu_model", "gpu_uuid")


def summarize_run(
    header: TaskFileHeader, task: RunTask, attempt: int, ranks: Mapping[int, schema.RankResult], status: str,
    error: schema.FailureRecord | None = None,
) -> schema.RunResult:  # fmt: skip
    """The result of a run from its ranks' files; ranks that left none are named in ``ranks``."""
    provenance = _run_provenance(ranks)
    if header.environment_key is not None:
        provenance["environment_key"] = header.environment_key
    result = schema.RunResult(
        run_id=task.run_id,
        config_id=task.config_id,
        attempt=attempt,
        sweep=task.sweep,
        cluster=header.cluster,
        status=status,
        ended_at_s=time.time(),
        spec=task.spec,
        metrics=schema.RunMetrics(),
        provenance=provenance,
        environment_digest=provenance.pop("environment_digest", None),
        error=None if status == schema.STATUS_OK else error,
    )
    if header.ranks_per_device > 1 and task.spec.devices > 1 and task.spec.workload != "command":
        result.untimed = f"up to {header.ranks_per_device} ranks share a device"
        ranks = {rank: _without_times(one) for rank, one in ranks.items()}
    add_figures = _add_training if task.spec.workload == "training" else _add_other_workload
    add_figures(result, header, ranks)
    result.warnings += _rank_warnings(ranks)
    return result


def _add_training(result: schema.RunResult, header: TaskFileHeader, ranks: Mapping[int, schema.RankResult]) -> None:
    spec, warnings = result.spec, result.warnings
    slowest = timing_statistics.slowest_rank_times_s(ranks)
    warmup_steps = timing_statistics.count_warmup_steps(slowest)
    # Files may hold another number of samples than the data set: the feed has counted them.
    samples = result.provenance.get("data", {}).get("epoch_samples")
    if samples is None and spec.dataset in DATASETS:
        samples = DATASETS[spec.dataset].samples
    skipped = warmup_steps or 0
    if ranks:
        result.metrics = compute_metrics(spec, header, ranks, slowest, skipped, samples, warnings)
    result.metrics.warmup_found_steps = warmup_steps
    intervals_s = timing_statistics.timed_intervals_s(ranks, skipped)
    result.timeline = pipeline_timeline(spec, ranks)
    result.metrics.bubble_fraction = result.timeline.bubble_fraction if result.timeline is not None else None
    if warmup_steps:
        warnings.append(timing_statistics.make_warmup_warning(warmup_steps, len(slowest), spec.warmup_steps))
    if slowest and len(ranks) < spec.ranks:
        present = join_numbers(sorted(ranks))
        warnings.append(f"step times are those of the ranks that left a file ({present}), not of all")
    warnings += _batch_warnings(spec, len(slowest), samples) if samples else []
    warnings += [*interference_warnings(spec, ranks), *energy_warnings(ranks), *_launch_warnings(ranks)]
    result.ranks = [_rank_entry(rank, ranks.get(rank), skipped, intervals_s.get(rank)) for rank in range(spec.ranks)]
    result.step_times_s = slowest
    result.traffic = _max_rank_traffic(ranks)
    for name in ("predicted", "probe", "verification"):
        setattr(result, name, _first_known(ranks, name))


def _add_other_workload(
    result: schema.RunResult, header: TaskFileHeader, ranks: Mapping[int, schema.RankResult]
) -> None:
    spec, warnings = result.spec, result.warnings
    if spec.workload == COLLECTIVES:
        result.probe = merge_probes(ranks)
        result.units, result.better = dict.fromkeys(BANDWIDTHS, "bytes/s"), dict.fromkeys(BANDWIDTHS, "higher")
        result.metrics, result.step_times_s = collective_metrics(result.probe, ranks, warnings)
    else:
        command, peaks = msgspec.convert(header.command, Command), header.peak_flops_per_s
        result.provenance["command"] = {"argv": command.argv, "launch": command.launch}
        result.units = {one.name: one.unit for one in command.metrics}
        result.better = {one.name: one.better for one in command.metrics}
        result.metrics, result.step_times_s = command_metrics(spec, command, peaks, ranks, warnings)
    for name, value in energy_metrics(spec, ranks).items():
        setattr(result.metrics, name, value)
    command_energy(result.metrics, ranks)
    result.ranks = [_rank_entry(rank, ranks.get(rank), 0, None) for rank in range(spec.ranks)]
    warnings += interference_warnings(spec, ranks)


def _without_times(result: schema.RankResult) -> schema.RankResult:
    return msgspec.structs.replace(
        result, step_times_s=[], time_to_first_step_s=None, phases=None, host_syncs=None, timeline=[], watched=None,
        energy_j=None, device_power={}, evaluations=[], probe=None, predicted=None,
    )  # fmt: skip


def _launch_warnings(ranks: Mapping[int, schema.RankResult]) -> list[str]:
    """Warn where a rank's host takes longer to launch a step's work than its device takes for it."""
    slow = {}
    for rank, result in ranks.items():
        phases, launches = result.phases, (result.host_syncs.launches or 0) if result.host_syncs is not None else 0
        if phases is None or phases.compute_s is None:
            continue
        device_s = phases.compute_s + (phases.exposed_comm_s or 0.0)
        if launches * timing_statistics.LAUNCH_S > device_s:
            slow[rank] = (launches, device_s)
    if not slow:
        return []
    rank = max(slow, key=lambda number: slow[number][0] / slow[number][1])
    launches, device_s = slow[rank]
    return [
        f"launch-bound steps: rank {rank} starts {launches:,} kernels and copies a step, about "
        f"{format_seconds(launches * timing_statistics.LAUNCH_S)} of its host's time, and its device works for "
        f"{format_seconds(device_s)}; so for {len(slow)} of {len(ranks)} ranks"
    ]


def _batch_warnings(spec: RunSpec, timed: int, samples: int) -> list[str]:
    batch = spec.global_batch_size
    warnings = []
    dropped = dropped_samples(samples, batch, spec.dp_degree, spec.drop_last)
    if dropped:
        why = "drop_last" if spec.drop_last else "the last batch would give a replica fewer than 2"
        warnings.append(f"{dropped} of {samples} samples of an epoch are left out: {why}")
    partial = (samples - dropped) % batch if samples > batch else samples % batch
    steps = -(-(samples - dropped) // batch)
    if partial and (steps - 1 - spec.warmup_steps) % steps < timed:
        warnings.append(f"the last batch of an epoch holds {partial} of {batch} samples; counted as {partial}")
    return warnings


def _rank_warnings(ranks: Mapping[int, schema.RankResult]) -> list[str]:
    """Every warning once, with the ranks that gave it where not all did."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        for text in ranks[rank].warnings:
            by_text.setdefault(text, []).append(rank)
    return [text if len(who) == len(ranks) else f"{text} (ranks {join_numbers(who)})" for text, who in by_text.items()]


def _run_provenance(ranks: Mapping[int, schema.RankResult]) -> dict[str, Any]:
    """Return the provenance of the first rank that reports its host, or has any, with every host of the run."""
    present = [ranks[rank].provenance for rank in sorted(ranks) if ranks[rank].provenance]
    fullest = next((facts for facts in present if "environment_digest" in facts), present[0] if present else {})
    hosts = list(dict.fromkeys(ranks[rank].host for rank in sorted(ranks)))
    return {**fullest, "hosts": hosts} if ranks else {}


def _max_rank_traffic(ranks: Mapping[int, schema.RankResult]) -> schema.RankTraffic | None:
    """Return the traffic of the rank that passes most bytes, the first of equal ones."""
    recorded = [rank for rank in sorted(ranks) if ranks[rank].traffic]
    if not recorded:
        return None
    rank = max(recorded, key=lambda rank: total_payload_bytes(ranks[rank].traffic))
    return schema.RankTraffic(rank=rank, calls=ranks[rank].traffic)


def _rank_entry(rank: int, result: schema.RankResult | None, skipped: int, timed_s: float | None) -> dict[str, Any]:
    if result is None:
        return {"rank": rank, "left_file": False}
    times = result.step_times_s[skipped:]
    entry = {
        **{name: msgspec.to_builtins(getattr(result, name)) for name in _RANK_FIELDS},
        "step_time_median_s": statistics.median(times) if times else None,
        "timed_s": timed_s,
        "error": result.error.message if result.error else None,
        **{key: result.provenance.get(key) for key in _RANK_PROVENANCE_KEYS},
    }
    return {key: value for key, value in entry.items() if value is not None}
