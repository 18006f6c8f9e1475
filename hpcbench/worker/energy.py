"""Power and energy of a run, from the counters of its ranks. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpcbench.config.run_spec import RunSpec
from hpcbench.results import schema
from hpcbench.units import format_percent
from hpcbench.workloads.datasets import DATASETS, sample_shape

_ENERGY_INCLUDES = {
    "nvml": "the run's GPUs, without processors, memory and network",
    "amdsmi": "the run's GPUs, without processors, memory and network",
    "amdsmi package": "packages of two GPUs each, both dies, also one that the run does not use",
    "rapl package": "the processors of whole nodes, with all that runs there",
    "rapl package + dram": "the processors and the memory of whole nodes, with all that runs there",
    "pm_counters cpu": "the processors of whole nodes, with all that runs there",
    "pm_counters node": "whole nodes, with all that runs there",
}


def energy_metrics(spec: RunSpec, ranks: Mapping[int, schema.RankResult]) -> dict[str, Any]:
    """Return power and energy of the run; none of a run that lacks a rank."""
    if len(ranks) < spec.ranks:
        return {}
    levels = [level for result in ranks.values() for level in result.device_power.values()]
    idle_w = _sum_counters(ranks, {rank: _by_counter(result, "idle_power_w") for rank, result in ranks.items()})
    caps_w = [level.power_cap_w for level in levels if level.power_cap_w is not None]
    values = {"idle_power_w": idle_w, "power_cap_w": min(caps_w, default=None)}
    return {**values, **_total_energy(spec, ranks)}


def _total_energy(spec: RunSpec, ranks: Mapping[int, schema.RankResult]) -> dict[str, Any]:
    """Sum the energy over all devices: of every rank, or of every node where a counter is the node's."""
    counted = {rank: result.energy_j for rank, result in ranks.items() if result.energy_j is not None}
    first_of_nodes = {rank for rank, result in ranks.items() if result.local_rank == 0}
    if not counted or counted.keys() not in (ranks.keys(), first_of_nodes):
        return {}
    sources = dict.fromkeys(source for rank in counted if (source := ranks[rank].energy_source))
    parts = {
        rank: _by_counter(ranks[rank], "energy_j") or {f"rank {rank}": energy_j} for rank, energy_j in counted.items()
    }
    energy_j, source = _sum_counters(ranks, parts), "; ".join(sources)
    if energy_j is None:
        return {}
    # The counters run from the first timed step, those that still warmed up included.
    samples = sum(global_step_samples(ranks))
    per_sample_j = energy_j / samples if samples else None
    tokens = tokens_per_sample(spec)
    return {
        "energy_j": energy_j,
        "energy_per_sample_j": per_sample_j,
        "energy_per_token_j": per_sample_j / tokens if per_sample_j is not None and tokens else None,
        "energy_source": source,
        "energy_includes": _ENERGY_INCLUDES.get(source.partition(",")[0]),
    }


def command_energy(metrics: schema.RunMetrics, ranks: Mapping[int, schema.RankResult]) -> None:
    """Set the energy of a command's sample and token: the mean power while steps were timed, over their rates."""
    powers = {rank: of for rank, result in ranks.items() if (of := _by_counter(result, "steps_power_w"))}
    steps_w = _sum_counters(ranks, powers)
    if steps_w is not None and metrics.energy_j is not None:
        metrics.energy_per_sample_j = steps_w / metrics.samples_per_s if metrics.samples_per_s else None
        metrics.energy_per_token_j = steps_w / metrics.tokens_per_s if metrics.tokens_per_s else None


def _by_counter(result: schema.RankResult, field: str) -> dict[str, float | None]:
    return {counter: getattr(level, field) for counter, level in result.device_power.items()}


def _sum_counters(
    ranks: Mapping[int, schema.RankResult], parts: Mapping[int, Mapping[str, float | None]]
) -> float | None:
    """Sum what counters read, each once: ranks on the two devices of a package read the same one.

    Args:
        ranks: the ranks with their hosts.
        parts: the readings by rank and counter.

    Returns:
        The sum; ``None`` if there is nothing to add, or a reading is absent.
    """
    readings: dict[tuple[str, str], float] = {}
    for rank, by_counter in parts.items():
        if not by_counter or None in by_counter.values():
            return None
        for counter, value in by_counter.items():
            key = (ranks[rank].host, counter)
            readings[key] = max(value or 0.0, readings.get(key, 0.0))
    return math.fsum(readings.values()) if readings else None


def global_step_samples(ranks: Mapping[int, schema.RankResult]) -> list[int]:
    """Samples of each timed step over all replicas; the ranks of one replica share theirs and count once."""
    replicas = {result.replica: result.step_samples for result in ranks.values()}
    return [sum(counts) for counts in zip(*replicas.values(), strict=False)]


def tokens_per_sample(spec: RunSpec) -> int | None:
    """Return the length of a sample of a data set of tokens; ``None`` for any other."""
    dataset = DATASETS.get(spec.dataset)
    is_text = dataset is not None and dataset.kind == "tokens"
    return sample_shape(spec.dataset, spec.input_size)[-1] if is_text else None


_GPU_COUNTERS = ("nvml", "amdsmi", "amdsmi package")
_GPU_UPDATE_S = 0.1
"""Seconds between updates of a GPU's energy counter: 0.02 to 0.1 (manual of PETSc's PetscLogGpuEnergyMeter; Zeus)."""
_MAX_ENERGY_ERROR = 0.05


def energy_warnings(ranks: Mapping[int, schema.RankResult]) -> list[str]:
    """Warn where late updates of a GPU's counter may be more than 5 % of the energy. It is read around evaluations."""
    errors = [
        (_GPU_UPDATE_S * max(1, len(result.evaluations)) / result.watched.wall_s, result.watched.wall_s)
        for result in ranks.values()
        if result.energy_source in _GPU_COUNTERS and result.watched is not None and result.watched.wall_s > 0
    ]
    error, wall_s = max(errors, default=(0.0, 0.0))
    if error <= _MAX_ENERGY_ERROR:
        return []
    return [
        f"the energy is coarse: GPUs update its counter about every {_GPU_UPDATE_S:g} s, and the timed steps took "
        f"{wall_s:.2f} s, so it may be off by {format_percent(error)}"
    ]
