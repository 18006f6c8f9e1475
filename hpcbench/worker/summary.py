"""From what the ranks measured to the run's result. No torch: ``end`` uses it where the ranks have died."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.config.task import Task, TaskHeader
from hpcbench.parallel.datasets import DATASETS
from hpcbench.parallel.shard import dropped_samples
from hpcbench.parallel.traffic import total_bytes
from hpcbench.results.schema import OK, Failure, Metrics, RankResult, RankTraffic, RunResult
from hpcbench.results.steady import warmup_found, warmup_warning
from hpcbench.worker.guards import guard_warnings
from hpcbench.worker.metrics import Measured, metrics_of
from hpcbench.worker.timelines import timeline_of
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
    found = warmup_found(slowest)
    samples = _found_samples(provenance) or DATASETS[spec.dataset].samples
    measured = Measured(spec, header, ranks, slowest, found or 0, samples)
    metrics = metrics_of(measured, notes) if ranks else Metrics()
    metrics.warmup_found_steps = found
    timeline = timeline_of(spec, ranks)
    metrics.bubble_fraction = timeline.bubble_fraction if timeline is not None else None
    if found:
        notes.append(warmup_warning(found, len(slowest), spec.warmup_steps))
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
        predicted=next((one.predicted for one in ranks.values() if one.predicted is not None), None),
        ranks=[_rank_entry(rank, ranks.get(rank), measured.skipped) for rank in range(spec.ranks)],
        step_times_s=slowest,
        traffic=_most_traffic(ranks),
        warnings=[
            *notes,
            *_batch_warnings(spec, len(slowest), samples),
            *guard_warnings(spec, ranks),
            *_rank_warnings(ranks),
        ],
        probe=next((one.probe for one in ranks.values() if one.probe is not None), None),
        timeline=timeline,
        verification=next((one.verification for one in ranks.values() if one.verification is not None), None),
        provenance=provenance,
        environment_digest=provenance.pop("environment_digest", None),
        error=None if status == OK else error,
    )


def slowest_rank_times_s(ranks: Mapping[int, RankResult]) -> list[float]:
    """Of every timed step that all ranks have ended, the longest time that any of them took."""
    return [max(times) for times in zip(*(result.step_times_s for result in ranks.values()), strict=False)]


def _found_samples(provenance: Mapping[str, Any]) -> int | None:
    """What the feed counted, where the run came as far as that."""
    data = provenance.get("data")
    found = data.get("epoch_samples") if isinstance(data, dict) else None
    return found if isinstance(found, int) else None


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
    return [text if len(who) == len(ranks) else f"{text} (ranks {listed(who)})" for text, who in by_text.items()]


def _run_provenance(ranks: Mapping[int, RankResult]) -> dict[str, Any]:
    """Of the first rank that spoke for its host, or that left any, with every host of the run."""
    left = [ranks[rank].provenance for rank in sorted(ranks) if ranks[rank].provenance]
    fullest = next((one for one in left if "environment_digest" in one), left[0] if left else {})
    hosts = list(dict.fromkeys(ranks[rank].host for rank in sorted(ranks)))
    return {**fullest, "hosts": hosts} if ranks else {}


def _most_traffic(ranks: Mapping[int, RankResult]) -> RankTraffic | None:
    """That of the rank that passes most bytes, the first of equal ones."""
    passed = {rank: total_bytes(ranks[rank].traffic) for rank in sorted(ranks) if ranks[rank].traffic}
    if not passed:
        return None
    rank = max(passed, key=passed.__getitem__)
    return RankTraffic(rank=rank, calls=ranks[rank].traffic)


def _rank_entry(rank: int, result: RankResult | None, skipped: int) -> dict[str, Any]:
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
        "step_time_median_s": statistics.median(times) if (times := result.step_times_s[skipped:]) else None,
        "peak_memory_bytes": result.peak_memory_bytes,
        "peak_reserved_bytes": result.peak_reserved_bytes,
        "time_to_first_step_s": result.time_to_first_step_s,
        "phases": msgspec.to_builtins(result.phases) if result.phases else None,
        "state": result.state,
        "error": result.error.message if result.error else None,
        **{key: result.provenance.get(key) for key in _FROM_PROVENANCE},
    }
    return {key: value for key, value in entry.items() if value is not None}
