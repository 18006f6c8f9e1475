"""Nodes of published GPU machines by vendors' figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GpuNode:
    """One node: rates in units a second, of one GPU.

    ``nvlink_bytes_s`` and ``nic_bytes_s`` are one direction. ``memory_gib`` is the memory that a process can reserve.
    """

    name: str
    gpus: int
    peak_flops: float
    memory_bytes_s: float
    memory_gib: float
    multiprocessors: int
    nvlink_bytes_s: float
    nic_bytes_s: float


@dataclass(frozen=True, kw_only=True)
class CollectiveRates:
    """Bus rates in bytes a second of collectives over all GPUs of a job."""

    all_reduce: float
    all_gather: float
    reduce_scatter: float


def nominal_rates(node: GpuNode, gpus: int) -> CollectiveRates:
    """Return rates for a job that did not measure its own."""
    rate = node.nvlink_bytes_s * 0.58
    if gpus > node.gpus:
        rate = min(rate, node.nic_bytes_s * node.gpus / 2)
    return CollectiveRates(all_reduce=rate, all_gather=rate, reduce_scatter=rate)
