"""From what the ranks measured to the run's result. No torch: ``end`` uses it where the ranks have died."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from hpcbench.config.spec import RunSpec
from hpcbench.config.task import Task, TaskHeader
from hpcbench.parallel.datasets import DATASETS
from hpcbench.parallel.shard import dropped_samples
from hpcbench.results.schema import OK, Failure, Loss, Metrics, RankResult, RunResult
from hpcbench.results.stats import spread
from hpcbench.worker.verdict import listed

_FROM_PROVENANCE = ("threads", "gpu_model", "gpu_uuid")


def summarise(
    header: TaskHeader,
    task: Task,
    attempt: int,
    ranks: Mapping[int, RankResult],
    status: str,
    error: Failure | None = None,
) -> RunResult:
    """The result of a run from its ranks' files; ranks that left none are named in ``ranks``."""
    spec = task.spec
    slowest = slowest_rank_times_s(ranks)
    provenance = _run_provenance(ranks)
    if header.environment_key is not None:
        provenance["environment_key"] = header.environment_key
    notes: list[str] = []
    metrics = _metrics(spec, ranks, slowest, notes) if ranks else Metrics()
    if slowest and len(ranks) < spec.ranks:
        notes.append(f"step times are those of the ranks that left a file ({listed(sorted(ranks))}), not of all")
    return RunResult(
        run_id=task.run_id,
        config_id=task.config_id,
        attempt=attempt,
        sweep=task.sweep,
        cluster=header.cluster,
        status=status,
        spec=spec,
        metrics=metrics,
        ranks=[_rank_entry(rank, ranks.get(rank)) for rank in range(spec.ranks)],
        step_times_s=slowest,
        warnings=[*notes, *_batch_warnings(spec, len(slowest)), *_rank_warnings(ranks)],
        verification=next((one.verification for one in ranks.values() if one.verification is not None), None),
        provenance=provenance,
        environment_digest=provenance.pop("environment_digest", None),
        error=None if status == OK else error,
    )


def slowest_rank_times_s(ranks: Mapping[int, RankResult]) -> list[float]:
    """Of every timed step that all ranks have ended, the longest time that any of them took."""
    return [max(times) for times in zip(*(result.step_times_s for result in ranks.values()), strict=False)]


def epoch_samples(spec: RunSpec) -> int:
    """Samples that the steps of one epoch take."""
    samples = DATASETS[spec.dataset].samples
    return samples - dropped_samples(samples, spec.global_batch_size, spec.dp_degree)


def _metrics(spec: RunSpec, ranks: Mapping[int, RankResult], slowest: list[float], warnings: list[str]) -> Metrics:
    peaks = [one.peak_memory_bytes for one in ranks.values() if one.peak_memory_bytes is not None]
    reserved = [one.peak_reserved_bytes for one in ranks.values() if one.peak_reserved_bytes is not None]
    firsts = [one.time_to_first_step_s for one in ranks.values() if one.time_to_first_step_s is not None]
    accuracies = [one.accuracy for one in ranks.values() if one.accuracy is not None]
    rate = None
    if len(ranks) == spec.ranks and sum(slowest) > 0:
        rate = sum(global_step_samples(ranks)[: len(slowest)]) / sum(slowest)
    return Metrics(
        step_time_s=spread(slowest),
        samples_per_s=rate,
        epoch_time_s=epoch_samples(spec) / rate if rate else None,
        peak_memory_bytes=max(peaks, default=None),
        peak_reserved_bytes=max(reserved, default=None),
        time_to_first_step_s=max(firsts, default=None),
        loss=_loss(ranks, warnings) if len(ranks) == spec.ranks else None,
        accuracy=accuracies[0] if accuracies else None,
    )


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


def _batch_warnings(spec: RunSpec, timed: int) -> list[str]:
    samples, batch, replicas = DATASETS[spec.dataset].samples, spec.global_batch_size, spec.dp_degree
    found = []
    dropped = dropped_samples(samples, batch, replicas)
    if dropped:
        found.append(
            f"{dropped} of {samples} samples of an epoch are left out: the last batch would give a replica fewer than 2"
        )
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
    return [text if len(who) == len(ranks) else f"{text} (ranks {listed(who)})" for text, who in by_text.items()]


def _run_provenance(ranks: Mapping[int, RankResult]) -> dict[str, Any]:
    """Rank 0's, or the first that left one, with every host of the run."""
    fullest = next((ranks[rank].provenance for rank in sorted(ranks) if ranks[rank].provenance), {})
    hosts = list(dict.fromkeys(ranks[rank].host for rank in sorted(ranks)))
    return {**fullest, "hosts": hosts} if ranks else {}


def _rank_entry(rank: int, result: RankResult | None) -> dict[str, Any]:
    if result is None:
        return {"rank": rank, "left_file": False}
    entry: dict[str, Any] = {
        "rank": rank,
        "local_rank": result.local_rank,
        "node_rank": result.node_rank,
        "replica": result.replica,
        "host": result.host,
        "pid": result.pid,
        "device": result.device,
        "cpu_mask": result.cpu_mask,
        "status": result.status,
        "steps_done": result.steps_done,
        "step_time_median_s": statistics.median(result.step_times_s) if result.step_times_s else None,
        "peak_memory_bytes": result.peak_memory_bytes,
        "peak_reserved_bytes": result.peak_reserved_bytes,
        "time_to_first_step_s": result.time_to_first_step_s,
        "error": result.error.message if result.error else None,
        **{key: result.provenance.get(key) for key in _FROM_PROVENANCE},
    }
    return {key: value for key, value in entry.items() if value is not None}
