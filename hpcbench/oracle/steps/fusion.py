"""Which gradients Horovod's background thread fuses: those that it finds when it looks (Sergeev and Del Balso 2018).

It looks once a cycle, takes what is ready up to the threshold, and passes it on. Between CPUs it carries the data
itself, and what becomes ready meanwhile waits for it; on GPUs NCCL does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.kernels import whole_passes
from hpcbench.oracle.placement import group_of
from hpcbench.parallel.gradients import first_rows, ready_order
from hpcbench.parallel.layers import LayerTable


def fused(
    clock: Clock, spec: RunSpec, table: LayerTable, sizes: Sequence[int], cycle_s: float, threshold_bytes: int
) -> list[list[int]]:
    """Places in the table's ``parameter_tensors`` that go together, in order; ``sizes`` are what is sent of each."""
    group, blocks = group_of(spec, "dp"), clock.machine.device == "cpu"
    order = ready_order(table, spec.precision)
    ready_s = _ready_s(clock, spec, table)

    def passing_s(size: int) -> float:
        return clock.call("all_reduce", size, group).seconds if blocks else 0.0

    return looked(order, [ready_s[place] for place in order], sizes, cycle_s, threshold_bytes, passing_s)


def looked(
    order: Sequence[int],
    ready_s: Sequence[float],
    sizes: Sequence[int],
    cycle_s: float,
    threshold_bytes: int,
    passing_s: Callable[[int], float],
) -> list[list[int]]:
    """``ready_s`` of the places in ``order``, which is the order in which they become ready."""
    found: list[list[int]] = []
    now, next_one = 0.0, 0
    while next_one < len(order):
        late_s = ready_s[next_one] - now
        if late_s > 0:
            now += ceil(late_s / cycle_s) * cycle_s if cycle_s else late_s
        taken, size = [order[next_one]], sizes[order[next_one]]
        for place, ready in zip(order[next_one + 1 :], ready_s[next_one + 1 :], strict=True):
            if ready > now or size + sizes[place] > threshold_bytes:
                break
            taken.append(place)
            size += sizes[place]
        found.append(taken)
        next_one += len(taken)
        now += passing_s(size)
    return found


def _ready_s(clock: Clock, spec: RunSpec, table: LayerTable) -> list[float]:
    """Of every tensor, how long after the begin of the backward pass its gradient is there."""
    passes, ends, now = whole_passes(spec, table), [0.0] * len(table.layers), 0.0
    for row in range(len(passes) - 1, -1, -1):
        now += clock.kernel_s(passes[row].backward)
        ends[row] = now
    return [ends[row] for row in first_rows(table)]
