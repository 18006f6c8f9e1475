"""How much slower computation is while an all_reduce is under way, and what it takes to begin one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from hpcbench.config.spec import RunSpec
from hpcbench.results.schema import OverlapProbe
from hpcbench.worker.probes.watches import median
from hpcbench.worker.timers import synchronize

_REPEATS = 7
_SHARE = 0.7
"""Of the all_reduce's time that is computed, so that all of it is under way meanwhile."""


class _Reading(NamedTuple):
    issued_s: float
    computed_s: float
    ended_s: float


def measure_overlap(
    group: dist.ProcessGroup, device: torch.device, spec: RunSpec, payload_bytes: int, budget_s: float
) -> OverlapProbe:
    """Of an all_reduce of ``payload_bytes`` and a convolution that is repeated; the slowest rank's medians."""
    buffer = torch.zeros(payload_bytes // 4, device=device)
    layer = torch.nn.Conv2d(64, 64, 3, padding=1, device=device).requires_grad_(False)
    image = torch.zeros(8, 64, 32, 32, device=device)

    def compute(times: int) -> None:
        for _ in range(times):
            layer(image)

    def slowest(values: list[float]) -> list[float]:
        shared = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
        return [float(one) for one in shared.tolist()]

    def read(times: int, sends: bool) -> list[float]:
        slowest([0.0])
        return slowest(list(_read(lambda: compute(times), group, buffer if sends else None, device)))

    read(1, True)
    once_s, comm_s = read(10, False)[1] / 10, read(0, True)[2]
    times = max(1, int(_SHARE * comm_s / once_s))
    repeats = max(3, min(_REPEATS, int(budget_s / max(3 * comm_s, 1e-6))))
    readings = [(read(times, False), read(0, True), read(times, True)) for _ in range(repeats)]
    alone, sent, both = (_medians([one[kind] for one in readings]) for kind in range(3))
    return OverlapProbe(
        ranks=spec.ranks,
        nodes=spec.nodes,
        payload_bytes=payload_bytes,
        compute_s=alone.computed_s,
        comm_s=sent.ended_s,
        compute_under_comm_s=both.computed_s - both.issued_s,
        both_s=both.ended_s,
        issue_s=sent.issued_s,
        repeats=repeats,
    )


def _medians(readings: list[list[float]]) -> _Reading:
    return _Reading(*(median(values) for values in zip(*readings, strict=True)))


def _read(
    compute: Callable[[], None], group: dist.ProcessGroup, buffer: torch.Tensor | None, device: torch.device
) -> _Reading:
    """Seconds from the beginning: the all_reduce was begun, the computation done, both done."""
    synchronize(device)
    began = time.perf_counter()
    work = dist.all_reduce(buffer, group=group, async_op=True) if buffer is not None else None
    issued_s = time.perf_counter() - began
    compute()
    # The stream that computes, not the library's: its end is that of the computation alone.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    computed_s = time.perf_counter() - began
    if work is not None:
        work.wait()
    synchronize(device)
    return _Reading(issued_s, computed_s, time.perf_counter() - began)
