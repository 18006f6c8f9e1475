from __future__ import annotations

import pytest
import torch

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.shard import step_shares
from hpcbench.worker.data.feed import Feed, make_feed
from hpcbench.worker.data.synthetic import SLOTS
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")


def spec_of(dataset: str = "digits", replicas: int = 1, **values: object) -> RunSpec:
    return make_spec(dataset=dataset, strategy="ddp", tasks_per_node=replicas, dp_degree=replicas, **values)


def feed_of(dataset: str = "digits", replicas: int = 1, **values: object) -> Feed:
    return make_feed(spec_of(dataset, replicas, **values), CPU)


@pytest.mark.parametrize("replicas", [1, 3, 7])
@pytest.mark.parametrize("batch_size", [4, 64, 200])
def test_counts_are_those_of_the_shares(replicas: int, batch_size: int) -> None:
    feed = feed_of(replicas=replicas, batch_size=batch_size)
    for step in range(2 * feed.steps_per_epoch + 1):
        shares = step_shares(step, 1500, batch_size * replicas, replicas)
        assert [feed.count(step, replica) for replica in range(replicas)] == [len(share) for share in shares]
        assert feed.global_count(step) == sum(len(share) for share in shares)
        if step % feed.steps_per_epoch in (0, feed.steps_per_epoch - 1):
            assert [len(feed.batch(step, r)[1]) for r in range(replicas)] == [len(share) for share in shares]


def test_an_epoch_of_digits_takes_every_sample_once_and_the_next_in_another_order() -> None:
    feed = feed_of(replicas=3, batch_size=64)

    def epoch(number: int) -> torch.Tensor:
        steps = range(number * feed.steps_per_epoch, (number + 1) * feed.steps_per_epoch)
        return torch.cat([feed.batch(step, replica)[0] for step in steps for replica in range(3)])

    first, second = epoch(0), epoch(1)
    assert len(first) == len(second) == 1500
    assert torch.equal(torch.sort(first.flatten(1).sum(1)).values, torch.sort(second.flatten(1).sum(1)).values)
    assert not torch.equal(first, second)
    assert torch.equal(first, epoch(0)), "the order is the epoch's, not the history's"


def test_the_global_batch_of_digits_does_not_depend_on_the_number_of_replicas() -> None:
    one, four = feed_of(batch_size=16), feed_of(replicas=4, batch_size=4)
    shares = [four.batch(5, replica) for replica in range(4)]
    assert torch.equal(one.batch(5, 0)[0], torch.cat([inputs for inputs, _ in shares]))
    assert torch.equal(one.batch(5, 0)[1], torch.cat([labels for _, labels in shares]))


def test_held_out_digits_are_never_trained_on() -> None:
    feed = feed_of(batch_size=60)
    held = feed.held_out()
    assert held is not None
    inputs = torch.cat([batch for batch, _ in held])
    assert len(inputs) == 297
    trained = torch.cat([feed.batch(step, 0)[0] for step in range(feed.steps_per_epoch)])
    both = torch.cat([trained, inputs]).flatten(1)
    assert len({tuple(row.tolist()) for row in both}) == 1797
    assert trained.mean().abs() < 1e-6
    assert (trained.std() - 1).abs() < 1e-4


def test_synthetic_samples_are_those_of_seed_slot_and_replica() -> None:
    small, large = feed_of("cifar10", 2), feed_of("cifar10", 4)
    assert torch.equal(small.batch(0, 1)[0], large.batch(0, 1)[0])
    assert torch.equal(small.batch(0, 1)[0], small.batch(SLOTS, 1)[0])
    assert not torch.equal(small.batch(0, 1)[0], small.batch(1, 1)[0])
    assert not torch.equal(small.batch(0, 1)[0], small.batch(0, 0)[0])
    assert not torch.equal(small.batch(0, 1)[0], feed_of("cifar10", 2, seed=1).batch(0, 1)[0])
    assert torch.equal(feed_of("cifar10", 2, seed=1).batch(0, 1)[0], feed_of("cifar10", 2, repeat=1).batch(0, 1)[0])


def test_synthetic_memory_does_not_grow_with_the_world() -> None:
    feed = feed_of("cifar10", 64)
    feed.prepare(5)
    assert len(feed._slots) == SLOTS  # type: ignore[attr-defined]


def test_synthetic_samples_carry_their_label() -> None:
    """The nearest class mean of one slot names the other slot's samples far better than chance."""
    feed = feed_of("mnist", batch_size=512)
    inputs, labels = feed.batch(0, 0)
    means = torch.stack([inputs[labels == label].mean(dim=0) for label in range(10)]).flatten(1)
    others, names = feed.batch(1, 0)
    right = torch.cdist(others.flatten(1), means).argmin(dim=1) == names
    assert right.float().mean() > 0.9


def test_a_partial_batch_is_a_true_beginning() -> None:
    feed = feed_of("cifar10", batch_size=49_990)
    assert feed.steps_per_epoch == 2
    assert feed.count(1, 0) == 10


def test_input_size_type_and_memory_format() -> None:
    inputs, labels = feed_of("cifar10", input_size=40, precision="fp64", channels_last=True).batch(0, 0)
    assert inputs.shape == (8, 3, 40, 40)
    assert (inputs.dtype, labels.dtype) == (torch.float64, torch.int64)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    digits, _ = feed_of("digits", precision="bf16").batch(0, 0)
    assert digits.dtype == torch.float32, "autocast lowers it, not the feed"


def test_dropped_samples_are_known() -> None:
    feed = feed_of(replicas=7, batch_size=71)
    assert (feed.steps_per_epoch, feed.dropped) == (3, 9)
    assert feed.global_count(3) == 497, "the fourth step begins the next epoch"
