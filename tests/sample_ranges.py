"""The samples that each replica takes in a step, by their definition: what feeds are compared with."""

from __future__ import annotations

from hpcbench.strategies.mesh import even_ranges, steps_per_epoch


def step_sample_ranges(
    step: int, samples: int, global_batch_size: int, replicas: int, drop_last: bool = False
) -> list[range]:
    """Per replica, the positions within the epoch's order that step number ``step`` (from 0, any epoch) takes.

    A partial batch is shared evenly; its true size is the sum of the ranges' lengths.
    """
    position = step % steps_per_epoch(samples, global_batch_size, replicas, drop_last)
    first = position * global_batch_size
    count = min(global_batch_size, samples - first)
    return [range(first + part.start, first + part.stop) for part in even_ranges(count, replicas)]
