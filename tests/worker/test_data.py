from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.worker.data import resident_feed
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.data.feeds import make_feed
from hpcbench.workloads.datasets import BATCH_SLOTS
from tests.sample_ranges import step_sample_ranges
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")


def spec_of(dataset: str = "digits", replicas: int = 1, **values: object) -> RunSpec:
    return make_spec(dataset=dataset, strategy="ddp", tasks_per_node=replicas, dp_degree=replicas, **values)


def feed_of(dataset: str = "digits", replicas: int = 1, **values: object) -> DataFeed:
    return make_feed(spec_of(dataset, replicas, **values), CPU)


@pytest.mark.parametrize("replicas", [1, 3, 7])
@pytest.mark.parametrize("batch_size", [4, 64, 200])
def test_counts_are_those_of_the_shares(replicas: int, batch_size: int) -> None:
    feed = feed_of(replicas=replicas, batch_size=batch_size)
    for step in range(2 * feed.steps_per_epoch + 1):
        shares = step_sample_ranges(step, 1500, batch_size * replicas, replicas)
        assert [feed.replica_count(step, replica) for replica in range(replicas)] == [len(share) for share in shares]
        assert feed.global_count(step) == sum(len(share) for share in shares)
        if step % feed.steps_per_epoch in (0, feed.steps_per_epoch - 1):
            assert [len(feed.batch(step, r)[1]) for r in range(replicas)] == [len(share) for share in shares]


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    inputs, labels = resident_feed._load_digits()
    bunch = load_digits()
    assert torch.equal(inputs, torch.from_numpy(bunch.images).unsqueeze(1))
    assert torch.equal(labels, torch.from_numpy(bunch.target))
    assert inputs.is_contiguous()
    assert labels.dtype == torch.int64


def test_a_scikit_learn_without_digits_is_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleSpec("sklearn", None, is_package=True)
    assert package.submodule_search_locations is not None
    package.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr(resident_feed, "find_spec", {"sklearn": package}.get)
    resident_feed._load_digits.cache_clear()
    with pytest.raises(WorkerError, match=rf"this scikit-learn has no {tmp_path}") as caught:
        feed_of()
    assert caught.value.status == "unsupported"


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
    assert torch.equal(small.batch(0, 1)[0], small.batch(BATCH_SLOTS, 1)[0])
    assert not torch.equal(small.batch(0, 1)[0], small.batch(1, 1)[0])
    assert not torch.equal(small.batch(0, 1)[0], small.batch(0, 0)[0])
    assert not torch.equal(small.batch(0, 1)[0], feed_of("cifar10", 2, seed=1).batch(0, 1)[0])
    assert torch.equal(feed_of("cifar10", 2, seed=1).batch(0, 1)[0], feed_of("cifar10", 2, repeat=1).batch(0, 1)[0])


@pytest.mark.parametrize(("dataset", "size"), [("cifar10", 12), ("cosmoflow", 8), ("tokens", 16)])
def test_host_samples_are_those_of_the_device_and_copied_every_step(dataset: str, size: int) -> None:
    device, host = (feed_of(dataset, 2, input_size=size, data=data) for data in ("device", "host"))
    for step in (0, 1, 5):
        for ours, theirs in zip(host.batch(step, 1), device.batch(step, 1), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype == theirs.dtype
    assert host.batch(0, 1)[0].data_ptr() != host.batch(0, 1)[0].data_ptr()
    assert (device.description()["storage"], host.description()["storage"]) == ("device", "host")
    assert host.description()["distinct_samples"] == 2 * BATCH_SLOTS * 8


def test_synthetic_images_follow_the_documented_draw() -> None:
    source = torch.Generator().manual_seed(3)
    patterns = torch.randn(10, 3, 4, 4, generator=source)
    source.manual_seed((3 * 1_000_003 + 1) * 1_000_003)
    labels = torch.randint(10, (8,), generator=source)
    inputs = torch.randn(8, 3, 12, 12, generator=source) + F.interpolate(patterns[labels], size=(12, 12))
    found = feed_of("cifar10", input_size=12, seed=3).batch(1, 0)
    assert torch.equal(found[0], inputs)
    assert torch.equal(found[1], labels)


def test_synthetic_volumes_and_tokens_are_learnable() -> None:
    feed = feed_of("cosmoflow", input_size=8, batch_size=1024)
    inputs, values = feed.batch(0, 0)
    solution = torch.linalg.lstsq(F.adaptive_avg_pool3d(inputs, 4).flatten(1), values).solution
    others, wanted = feed.batch(1, 0)
    found = F.adaptive_avg_pool3d(others, 4).flatten(1) @ solution
    assert (found - wanted).pow(2).mean() < 0.5 * wanted.pow(2).mean()
    tokens, targets = feed_of("tokens", input_size=64, batch_size=32).batch(0, 0)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert (tokens[:, :-31] == tokens[:, 31:]).float().mean() > 0.7, "the phrase comes again"


def test_drop_last_leaves_the_partial_batch_out() -> None:
    kept, dropped = feed_of(batch_size=64), feed_of(batch_size=64, drop_last=True)
    assert (kept.steps_per_epoch, dropped.steps_per_epoch, dropped.dropped) == (24, 23, 28)
    assert [dropped.global_count(step) for step in (22, 23)] == [64, 64]
    assert not torch.equal(dropped.batch(23, 0)[0], kept.batch(23, 0)[0])


def test_synthetic_samples_carry_their_label() -> None:
    """The nearest class mean of one slot names the other slot's samples far better than chance."""
    feed = feed_of("mnist", batch_size=512)
    inputs, labels = feed.batch(0, 0)
    means = torch.stack([inputs[labels == label].mean(dim=0) for label in range(10)]).flatten(1)
    others, names = feed.batch(1, 0)
    right = torch.cdist(others.flatten(1), means).argmin(dim=1) == names
    assert right.float().mean() > 0.9


def test_inputs_have_the_runs_size_type_and_memory_format() -> None:
    inputs, labels = feed_of("cifar10", input_size=40, precision="fp64", channels_last=True).batch(0, 0)
    assert inputs.shape == (8, 3, 40, 40)
    assert (inputs.dtype, labels.dtype) == (torch.float64, torch.int64)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    digits, _ = feed_of("digits", precision="bf16").batch(0, 0)
    assert digits.dtype == torch.float32, "autocast lowers it, not the feed"


def test_a_feed_counts_the_samples_that_it_drops() -> None:
    feed = feed_of(replicas=7, batch_size=71)
    assert (feed.steps_per_epoch, feed.dropped) == (3, 9)
    assert feed.global_count(3) == 497, "the fourth step begins the next epoch"
