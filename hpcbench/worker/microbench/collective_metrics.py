"""Metrics of a run of collectives from the readings of its ranks. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hpcbench.results import timing_statistics
from hpcbench.results.probe_records import ProbeResults
from hpcbench.results.schema import RankResult, RunMetrics
from hpcbench.strategies.traffic import bus_bandwidth

BANDWIDTHS = ("algorithm_bandwidth", "bus_bandwidth")


def merge_probes(ranks: Mapping[int, RankResult]) -> ProbeResults | None:
    """Return what rank 0 measured, and of ``pairs`` every pair; ``None`` if nothing was."""
    records = [one for rank in sorted(ranks) if (probe := ranks[rank].probe) for one in probe.collectives]
    pairs = [one for one in records if one.pair]
    own = ranks[0].probe if 0 in ranks else None
    return ProbeResults(collectives=sorted(pairs, key=lambda one: one.pair)) if pairs else own


def collective_metrics(
    probe: ProbeResults | None, ranks: Mapping[int, RankResult], warnings: list[str]
) -> tuple[RunMetrics, list[float]]:
    """Return the metrics of a run that measures one operation, and the seconds of each reading.

    Of several groups, or pairs, those of the slowest one count. A run of a list of ``messages`` has no metrics.
    """
    peaks = [result.peak_memory_bytes for result in ranks.values() if result.peak_memory_bytes is not None]
    peak_bytes = max(peaks, default=None)
    records = [one for result in ranks.values() if result.probe for one in result.probe.collectives if one.readings_s]
    if probe is None or not records:
        return RunMetrics(peak_memory_bytes=peak_bytes), []
    slowest = max(records, key=lambda one: one.seconds)
    readings_s = slowest.readings_s
    rates = [bus_bandwidth(slowest.operation, slowest.ranks, slowest.payload_bytes, each) for each in readings_s]
    columns = zip(BANDWIDTHS, zip(*rates, strict=True), strict=True)
    metrics = RunMetrics(
        own={name: figures for name, values in columns if (figures := timing_statistics.step_time_statistics(values))},
        **timing_statistics.step_time_metrics(readings_s, warnings),
        timed_s=math.fsum(readings_s), peak_memory_bytes=peak_bytes,
    )  # fmt: skip
    return metrics, readings_s
