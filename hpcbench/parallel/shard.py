"""Who takes which part: 1-D ranges of samples. Pure integers."""

from __future__ import annotations

MIN_SHARE = 2
"""BatchNorm needs two values per channel, and a share of one sample can leave it a single one."""


def even_ranges(total: int, parts: int) -> list[range]:
    """``total`` things over ``parts`` takers, the first ``total % parts`` of them one more.

    >>> even_ranges(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    small, extra = divmod(total, parts)
    ranges = []
    start = 0
    for part in range(parts):
        stop = start + small + (part < extra)
        ranges.append(range(start, stop))
        start = stop
    return ranges


def steps_per_epoch(samples: int, global_batch_size: int, replicas: int, drop_last: bool = False) -> int:
    """Steps that one pass over ``samples`` takes.

    The last batch may be partial; it is left out with ``drop_last``, and where it would give a replica fewer than
    ``MIN_SHARE`` samples. An epoch has one step even where the whole data set is smaller than that.
    """
    whole, rest = divmod(samples, global_batch_size)
    return max(1, whole + (not drop_last and rest >= MIN_SHARE * replicas))


def dropped_samples(samples: int, global_batch_size: int, replicas: int, drop_last: bool = False) -> int:
    """Samples of an epoch that no step takes, see ``steps_per_epoch``."""
    rest = samples % global_batch_size
    return rest if samples > global_batch_size and (drop_last or rest < MIN_SHARE * replicas) else 0


def step_shares(step: int, samples: int, global_batch_size: int, replicas: int, drop_last: bool = False) -> list[range]:
    """Per replica, the positions within the epoch's order that step number ``step`` (from 0, any epoch) takes.

    A partial batch is shared evenly; its true size is the sum of the ranges' lengths.
    """
    position = step % steps_per_epoch(samples, global_batch_size, replicas, drop_last)
    first = position * global_batch_size
    count = min(global_batch_size, samples - first)
    return [range(first + part.start, first + part.stop) for part in even_ranges(count, replicas)]


def micro_shares(count: int, smallest: int, batch_size: int, micro_batches: int) -> list[range]:
    """How a replica's ``count`` samples of one step are cut into micro-batches.

    Whole batches are cut as the run says; partial ones into as many parts as leave each ``MIN_SHARE`` samples.
    ``smallest`` is the share of the replica with the fewest: all are cut into as many parts, because sharded
    strategies communicate in each, and a rank with one more would wait in it for ever.
    """
    parts = micro_batches if smallest >= batch_size else max(1, min(micro_batches, smallest // MIN_SHARE))
    return even_ranges(count, parts)
