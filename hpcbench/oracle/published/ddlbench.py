"""DDLBench's models of time (Jansen, MSc thesis, UvA, VU and SURFsara 2020, chapters 5 and 6; Jansen et al., SC20).

The thesis has no formulas of memory. Equation numbers are the thesis's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Link(NamedTuple):
    """Between neighbours in the ring or in the pipeline."""

    latency_s: float
    bandwidth_bytes_per_s: float


def horovod_step_s(
    sequential_s: float, links: Sequence[Link], gradient_bytes: float, fusion_threshold_bytes: float
) -> float:
    """Equation 5.1: one batch on as many workers as the ring has links, all but the last fused all_reduce hidden.

    ``sequential_s`` is one device's time for the whole batch.
    """
    workers = len(links)
    last_bytes = min(gradient_bytes, fusion_threshold_bytes)
    hop_s = max(link.latency_s + last_bytes / (workers * link.bandwidth_bytes_per_s) for link in links)
    return sequential_s / workers + 2 * (workers - 1) * hop_s


def gpipe_compute_s(sequential_s: float, workers: int, micro_batches: int) -> float:
    """Equation 6.1. ``sequential_s`` is measured at the micro-batch size; stages are taken to be equal."""
    return sequential_s * (workers + micro_batches - 1) / (workers * micro_batches)


def gpipe_comm_s(transfers_s: Sequence[float], micro_batches: int) -> float:
    """Equation 6.2, with ``transfers_s[j]`` the time of one micro-batch from stage j to the next, both directions.

    While the pipeline fills, the slowest link so far counts, then the slowest of all, then that of what is left. Pipes
    of one or two stages have no such phases.
    """
    links = len(transfers_s)
    if links == 0:
        return 0.0
    filling_s = sum(max(transfers_s[: i + 1]) for i in range(links - 1))
    draining_s = sum(max(transfers_s[i:]) for i in range(1, links))
    return 2 * (filling_s + (micro_batches - (links - 1)) * max(transfers_s) + draining_s)
