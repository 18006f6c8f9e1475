"""Intervals of ratios from pairs that were measured one after the other."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

Block = Callable[[], object]
"""Trains for some steps, on every rank."""


def median_interval(values: list[float], resamples: int = 2000) -> tuple[float, float, float]:
    """The median of ``values`` and the 95 % bootstrap interval of it, over pairs."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(resamples))
    return statistics.median(values), medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


class Ratios(NamedTuple):
    """Ratios of one block over another, pair by pair: in elapsed time, and in processor time."""

    wall: list[float]
    cpu: list[float]

    def __str__(self) -> str:
        wall, cpu = ["{:.3f} [{:.3f} {:.3f}]".format(*median_interval(ratios)) for ratios in self]
        return f"{wall}, in processor time {cpu}"


def paired(ours: Block, other: Block, pairs: int) -> Ratios:
    """One block of each per pair, in an order that is drawn: the same on every rank."""
    order, found = random.Random(1), Ratios([], [])
    for _ in range(pairs):
        took = {}
        for block in (ours, other) if order.random() < 0.5 else (other, ours):
            dist.barrier()
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            block()
            took[block] = (time.perf_counter() - wall_s, time.process_time() - cpu_s)
        found.wall.append(took[ours][0] / took[other][0])
        found.cpu.append(took[ours][1] / took[other][1])
    return found


def tell(rows: Sequence[Mapping[str, Any]]) -> NoReturn:
    """Print ``rows`` on rank 0, and end every rank at once: some libraries' threads would keep it from ending."""
    if dist.get_rank() == 0:
        print(json.dumps(list(rows)), flush=True)
    dist.barrier()
    os._exit(0)
