"""Samples from files: which ones a replica gets, and what becomes of files that cannot be read."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from hpcbench.errors import WorkerError
from hpcbench.worker.data import feeds
from hpcbench.worker.data.feed import DataFeed, DataSource
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.data.sample_files import decode_image
from hpcbench.worker.data.sample_generator import SampleGenerator
from hpcbench.worker.failure import LOADER_HINT, describe_error
from tests.conftest import absent
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")
SETS: list[tuple[str, int]] = [("cifar10", 16), ("cosmoflow", 8), ("tokens", 16)]


def feed_of(folder: Path | None, dataset: str, size: int | None, replicas: int = 1, **values: Any) -> DataFeed:
    given = {"batch_size": 8, "data": "files", **values}
    spec = make_spec(
        dataset=dataset, input_size=size, strategy="ddp", tasks_per_node=replicas, dp_degree=replicas, **given
    )
    return make_feed(spec, CPU, DataSource(folder, 2))


@pytest.mark.parametrize(("dataset", "size"), SETS)
def test_the_global_batch_does_not_depend_on_the_number_of_replicas(data_folder: Path, dataset: str, size: int) -> None:
    one, four = feed_of(data_folder, dataset, size), feed_of(data_folder, dataset, size, 4, batch_size=2)
    four.prepare(1)
    for step in (0, 1, 5, 3):
        whole = one.batch(step, 0)
        # Batches are read ahead where steps follow each other, and directly else; a second look finds the same.
        shares = [four.batch(step, replica) for replica in range(4) for _ in range(2)][::2]
        assert torch.equal(whole[0], torch.cat([inputs for inputs, _ in shares]))
        assert torch.equal(whole[1], torch.cat([targets for _, targets in shares]))
    one.close()
    four.close()


def test_an_epoch_goes_through_the_pool_again_and_again(data_folder: Path) -> None:
    feed = feed_of(data_folder, "tokens", 16, batch_size=1000)
    assert (feed.samples, feed.distinct_samples) == (1_000_000, 40)
    inputs, _ = feed.batch(0, 0)
    assert len({tuple(row.tolist()) for row in inputs}) == 40
    described = feed.description()
    assert described == {
        "kind": "synthetic", "storage": "files", "epoch_samples": 1_000_000, "distinct_samples": 40,
        "data_folder": str(data_folder), "loader_workers": 2,
    }  # fmt: skip
    feed.close()


def samples_of(feed: DataFeed) -> Any:
    return feed._samples._samples  # type: ignore[attr-defined]


def test_an_image_is_its_pixels_normalised(data_folder: Path) -> None:
    drawn = SampleGenerator("cifar10", 16)
    feed = feed_of(data_folder, "cifar10", 16)
    inputs, target = np.empty((3, 16, 16), np.float32), np.empty(1, np.int64)
    for index in (0, 255, 256, 299):
        samples_of(feed).read(index, inputs, target)
        path = data_folder / "cifar10-16" / f"{index // 256:05d}" / f"{index:08d}.jpg"
        pixels = np.asarray(Image.open(path)).transpose(2, 0, 1)
        assert np.allclose(inputs, (pixels / 255 - 0.5) / 0.25, atol=1e-5)
        original, label = drawn.image(index)
        assert target[0] == label
        assert np.abs(original.transpose(2, 0, 1).astype(int) - pixels).mean() < 30, "what JPEG leaves of it"
    feed.close()


def test_a_volume_is_the_logarithm_of_its_counts(data_folder: Path) -> None:
    feed = feed_of(data_folder, "cosmoflow", 8)
    inputs, target = np.empty((4, 8, 8, 8), np.float32), np.empty(4, np.float32)
    samples_of(feed).read(9, inputs, target)
    counts, values = SampleGenerator("cosmoflow", 8).volume(9)
    assert np.allclose(inputs, np.log1p(counts.astype(np.float32)).transpose(3, 0, 1, 2))
    assert np.array_equal(target, values)
    feed.close()


def test_targets_of_tokens_are_the_next_ones(data_folder: Path) -> None:
    feed = feed_of(data_folder, "tokens", 16)
    inputs, targets = feed.batch(0, 0)
    assert (inputs.dtype, inputs.shape, targets.shape) == (torch.int64, (8, 16), (8, 16))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.max()) < 50_257
    feed.close()


@pytest.mark.parametrize(
    ("dataset", "size", "command"),
    [
        ("cifar10", None, "hpcbench data make cifar10 --folder {}"),
        ("imagenet", 64, "hpcbench data make imagenet --size 64 --folder {}"),
    ],
)
def test_absent_files_are_unsupported_with_the_command_that_makes_them(
    tmp_path: Path, dataset: str, size: int | None, command: str
) -> None:
    with pytest.raises(WorkerError, match="no complete set of samples") as caught:
        feed_of(tmp_path, dataset, size)
    assert (caught.value.status, caught.value.hint) == ("unsupported", command.format(tmp_path))


def test_real_data_without_a_folder_is_unsupported() -> None:
    with pytest.raises(WorkerError, match="needs a data folder") as caught:
        feed_of(None, "cifar10", None)
    assert caught.value.status == "unsupported"


def with_reader(feed: DataFeed, read: Callable[[int], None]) -> None:
    """Have ``read`` called with the index of each sample before the feed's reader gets it."""
    reader = samples_of(feed)
    plain = reader.read

    def read_after(index: int, inputs: Any, target: Any) -> None:
        read(index)
        plain(index, inputs, target)

    reader.read = read_after


def test_a_file_that_a_worker_cannot_read_fails_its_step_with_the_hint(data_folder: Path) -> None:
    feed = feed_of(data_folder, "cifar10", 16)
    broken = int(feed.sample_indices(1, 0)[3]) % 300

    def read(index: int) -> None:
        if index == broken:
            raise WorkerError(f"number {index} is broken", status="unsupported", hint="make it again")

    with_reader(feed, read)
    feed.prepare(0)
    feed.batch(0, 0)
    with pytest.raises(WorkerError, match=f"number {broken} is broken") as caught:
        feed.batch(1, 0)
    assert (caught.value.status, caught.value.hint) == ("unsupported", "make it again")
    assert feed.batch(2, 0)[0].shape == (8, 3, 16, 16), "the workers go on"
    feed.close()


def test_another_error_of_a_worker_keeps_its_type_and_its_place(data_folder: Path) -> None:
    feed = feed_of(data_folder, "cifar10", 16)

    def read(index: int) -> None:
        raise IndexError("no such row")

    with_reader(feed, read)
    feed.prepare(0)
    with pytest.raises(IndexError, match=r"in read_after[\s\S]*no such row"):
        feed.batch(0, 0)
    feed.close()


def test_a_file_system_that_is_stuck_is_given_up(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "BATCH_TIMEOUT_S", 1)
    feed = feed_of(data_folder, "cifar10", 16)
    with_reader(feed, lambda _: time.sleep(0.25))
    feed.prepare(0)
    with pytest.raises(WorkerError, match=r"waited 1 s for a batch of .*cifar10-16"):
        feed.batch(0, 0)
    feed.close()


def test_a_worker_that_is_killed_is_named_with_what_may_have_killed_it(data_folder: Path) -> None:
    feed = feed_of(data_folder, "cifar10", 16)
    with_reader(feed, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    feed.prepare(0)
    with pytest.raises(
        RuntimeError, match=r"DataLoader worker .*(killed by signal: Killed|exited unexpectedly)"
    ) as caught:
        feed.batch(0, 0)
    status, failure = describe_error(caught.value)
    assert (status, failure.hint) == ("failed", LOADER_HINT)
    feed.close()


def test_full_shared_memory_fails_the_step_with_a_hint(data_folder: Path) -> None:
    spaces = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if shutil.which("unshare") is None or subprocess.run([*spaces, "sh", "-c", mount], check=False).returncode:
        absent("root", "only root mounts a small /dev/shm, or who may make user namespaces")
    code = f"""
from pathlib import Path
from tests.worker.test_sample_files import describe_error, feed_of
feed = feed_of(Path({str(data_folder)!r}), "cifar10", 16, batch_size=64)
feed.prepare(0)
try:
    feed.batch(0, 0)
except BaseException as error:
    print(*describe_error(error))
feed.close()
"""
    words = [*spaces, "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, code]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.startswith("failed FailureRecord"), ended.stderr
    assert "/dev/shm full" in ended.stdout


def test_a_signal_to_all_processes_of_a_job_ends_no_worker(data_folder: Path) -> None:
    for _ in range(5):
        feed = feed_of(data_folder, "cifar10", 16)
        feed.prepare(0)
        # Workers that have not begun yet are signalled, too.
        for child in psutil.Process().children():
            child.send_signal(signal.SIGTERM)
        expected = feed.batch(0, 0)
        for child in psutil.Process().children():
            child.send_signal(signal.SIGTERM)
        feed.batch(1, 0)
        assert torch.equal(feed.batch(0, 0)[0], expected[0])
        feed.close()


def test_workers_and_their_reads_ahead_shrink_with_the_size_of_a_batch(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_bytes = 4 * 8 * 3 * 16 * 16
    for limit, expected in ((4, (2, 2)), (3, (2, 1)), (1, (1, 1)), (0, (1, 1))):
        monkeypatch.setattr(feeds, "_MAX_SHARED_BYTES", limit * batch_bytes)
        feed = feed_of(data_folder, "cifar10", 16)
        assert (feed._workers, feed._prefetch_factor) == expected  # type: ignore[attr-defined]


def test_workers_end_with_the_feed(data_folder: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    feed = feed_of(data_folder, "cifar10", 16, batch_size=64)
    feed.prepare(0)
    started = [child for child in psutil.Process().children() if child.pid not in before]
    assert len(started) == 2
    feed.close()
    psutil.wait_procs(started, timeout=30)
    assert not any(child.is_running() for child in started)


@pytest.mark.parametrize(
    ("size", "shape"),
    [((40, 20), (3, 10, 10)), ((20, 40), (1, 10, 10)), ((7, 9), (3, 16, 16)), ((16, 16), (1, 16, 16))],
)
def test_images_are_brought_to_the_exact_size(tmp_path: Path, size: tuple[int, int], shape: tuple[int, ...]) -> None:
    path = tmp_path / "one.png"
    Image.new("RGB", size, (200, 200, 200)).save(path)
    pixels = decode_image(str(path), shape)
    assert pixels.shape == shape
    assert pixels.min() == pixels.max() == 200
