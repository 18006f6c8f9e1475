"""Samples that lie on the host or in files are copied to a device from pinned memory, and no step waits for a copy."""

from __future__ import annotations

from pathlib import Path

import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.data.feed import Batch, DataFeed, DataSource
from hpcbench.worker.data.feeds import FileFeed, SyntheticFeed, make_feed
from hpcbench.worker.data.make_samples import make_samples
from tests.cuda.cases import gpu_run
from tests.cuda.stub import WAITS, count_calls

DEVICE = torch.device("cuda", 2)
COPIES = ("cudaMemcpyAsync",)
SIZE, SAMPLES = 32, 64


def batch_without_wait(feed: DataFeed, step: int) -> Batch:
    """Return a batch whose two tensors were copied, without a wait of the host."""
    before = count_calls([*WAITS, *COPIES])
    inputs, targets = feed.batch(step, 0)
    after = count_calls([*WAITS, *COPIES])
    assert {name: after[name] - before[name] for name in after} == {**dict.fromkeys(WAITS, 0), COPIES[0]: 2}
    assert inputs.device == targets.device == DEVICE
    return inputs, targets


def test_pinned_memory_is_told_from_other_memory() -> None:
    tensor = torch.arange(100.0)
    pinned = tensor.pin_memory()
    assert (tensor.is_pinned(), pinned.is_pinned()) == (False, True)
    assert torch.equal(tensor, pinned)


def test_samples_of_the_host() -> None:
    feed = make_feed(gpu_run("single", "cnn", 1, data="host"), DEVICE)
    assert isinstance(feed, SyntheticFeed)
    feed.prepare(0)
    held = [tensor for batch in feed._slots.values() for tensor in batch]
    assert held
    assert all(tensor.is_pinned() for tensor in held)
    for step in range(3):
        batch_without_wait(feed, step)


def test_samples_in_files(tmp_path: Path) -> None:
    spec = gpu_run("single", "cnn", 1, data="files")
    assert list(make_samples(tmp_path, spec.dataset, SIZE, SAMPLES, workers=1))[-1] == SAMPLES
    feed = make_feed(spec, DEVICE, DataSource(tmp_path, 1))
    assert isinstance(feed, FileFeed)
    try:
        feed.prepare(0)
        assert feed._batches is not None
        read = next(feed._batches)
        assert all(tensor.is_pinned() for tensor in read)
        feed.prepare(0)
        for step in range(3):
            inputs, _ = batch_without_wait(feed, step)
            assert inputs.shape == (spec.batch_size, 3, SIZE, SIZE)
    finally:
        feed.close()


def test_a_new_epoch_of_a_resident_set_begins_without_a_wait() -> None:
    """The permutation of an epoch is copied where the epoch begins, within a timed step."""
    spec = RunSpec(model="resnet18", dataset="digits", strategy="single", batch_size=64)
    feed = make_feed(spec, DEVICE)
    feed.prepare(0)
    for epoch in (1, 2):
        before = count_calls([*WAITS, *COPIES])
        order = feed.epoch_order(epoch)
        after = count_calls([*WAITS, *COPIES])
        assert {name: after[name] - before[name] for name in after} == {**dict.fromkeys(WAITS, 0), COPIES[0]: 1}
        assert order.device == DEVICE
