from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcbench.strategies.mesh import dropped_samples, even_ranges, micro_batch_ranges, steps_per_epoch
from tests.sample_ranges import step_sample_ranges


@pytest.mark.parametrize(
    ("total", "parts", "lengths"), [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 3, [1, 1, 0]), (0, 2, [0, 0])]
)
def test_even_ranges_differ_by_at_most_one_element(total: int, parts: int, lengths: list[int]) -> None:
    assert [len(part) for part in even_ranges(total, parts)] == lengths


@pytest.mark.parametrize(
    ("samples", "batch", "replicas", "steps", "dropped"),
    [
        (1500, 32, 2, 47, 0),
        (1500, 64, 2, 24, 0),
        (97, 32, 2, 3, 1),
        (98, 32, 1, 4, 0),
        (99, 32, 2, 3, 3),
        (20, 32, 2, 1, 0),
    ],
)
def test_a_partial_batch_counts_from_one_sample_per_replica(
    samples: int, batch: int, replicas: int, steps: int, dropped: int
) -> None:
    assert steps_per_epoch(samples, batch, replicas) == steps
    assert dropped_samples(samples, batch, replicas) == dropped


@pytest.mark.parametrize(
    ("samples", "batch", "replicas", "steps", "dropped"),
    [(1500, 32, 2, 46, 28), (1500, 64, 2, 23, 28), (1500, 50, 1, 30, 0), (97, 32, 2, 3, 1), (64, 64, 2, 1, 0)],
)
def test_drop_last_leaves_out_every_partial_batch(
    samples: int, batch: int, replicas: int, steps: int, dropped: int
) -> None:
    assert steps_per_epoch(samples, batch, replicas, drop_last=True) == steps
    assert dropped_samples(samples, batch, replicas, drop_last=True) == dropped
    assert step_sample_ranges(steps, samples, batch, replicas, drop_last=True)[0].start == 0, "the next epoch begins"
    last = step_sample_ranges(steps - 1, samples, batch, replicas, drop_last=True)
    assert sum(len(share) for share in last) == batch


def test_last_batch_is_shared_evenly() -> None:
    assert step_sample_ranges(2, 70, 32, 2) == [range(64, 67), range(67, 70)]
    assert step_sample_ranges(3, 70, 32, 2) == [range(16), range(16, 32)]


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 8), st.booleans())
def test_an_epoch_takes_every_sample_once(samples: int, batch: int, replicas: int, drop_last: bool) -> None:
    steps = steps_per_epoch(samples, batch * replicas, replicas, drop_last)
    taken = [
        sample
        for step in range(steps)
        for share in step_sample_ranges(step, samples, batch * replicas, replicas, drop_last)
        for sample in share
    ]
    assert taken == list(range(samples - dropped_samples(samples, batch * replicas, replicas, drop_last)))


@pytest.mark.parametrize(
    ("counts", "micro_batches", "lengths"),
    [
        ([8, 8], 4, [[2, 2, 2, 2], [2, 2, 2, 2]]),
        ([8, 7], 4, [[3, 3, 2], [3, 2, 2]]),
        ([4, 3], 2, [[4], [3]]),
        ([2, 2], 2, [[2], [2]]),
        ([1], 4, [[1]]),
    ],
)
def test_every_replica_has_as_many_micro_batches(
    counts: list[int], micro_batches: int, lengths: list[list[int]]
) -> None:
    shares = [micro_batch_ranges(count, min(counts), 8, micro_batches) for count in counts]
    assert [[len(part) for part in share] for share in shares] == lengths
