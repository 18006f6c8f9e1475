"""The sets' own files: real small ones of every format, and those that are broken, cut short or hostile."""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from hpcbench.errors import WorkerError
from hpcbench.worker.data.feed import DataFeed, DataSource
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.data.resident_feed import read_cifar_batch, read_idx
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")


def feed_of(folder: Path, dataset: str, replicas: int = 1, **values: Any) -> DataFeed:
    given = {"batch_size": 4, "data": "real", **values}
    spec = make_spec(dataset=dataset, strategy="ddp", tasks_per_node=replicas, dp_degree=replicas, **given)
    return make_feed(spec, CPU, DataSource(folder, 2))


def idx(array: Any) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + bytes(array.tobytes())


def write_mnist(folder: Path, packed: bool = False) -> Any:
    root = folder / "MNIST" / "raw"
    root.mkdir(parents=True)
    source = np.random.default_rng(0)
    images = source.integers(256, size=(30, 28, 28), dtype=np.uint8)
    for part, first, last in (("train", 0, 20), ("t10k", 20, 30)):
        for name, array in (
            (f"{part}-images-idx3-ubyte", images[first:last]),
            (f"{part}-labels-idx1-ubyte", (np.arange(first, last) % 10).astype(np.uint8)),
        ):
            data = idx(array)
            path = root / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(data) if packed else data)
    return images


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_files_are_read_normalised_and_shuffled(tmp_path: Path, packed: bool) -> None:
    images = write_mnist(tmp_path, packed)
    feed = feed_of(tmp_path, "mnist", replicas=2)
    assert (feed.samples, feed.steps_per_epoch) == (20, 3)
    seen = [feed.batch(step, replica) for step in range(3) for replica in range(2)]
    inputs, labels = torch.cat([x for x, _ in seen]), torch.cat([y for _, y in seen])
    order = torch.argsort(inputs.sum((1, 2, 3)))
    expected = torch.from_numpy((images[:20] / 255 - 0.1307) / 0.3081).float().unsqueeze(1)
    same = torch.argsort(expected.sum((1, 2, 3)))
    assert torch.allclose(inputs[order], expected[same], atol=1e-5)
    assert torch.equal(labels[order], torch.arange(20)[same] % 10)
    held = feed.held_out()
    assert held is not None
    assert torch.equal(torch.cat([labels for _, labels in held]), torch.arange(20, 30) % 10)
    assert feed.description() == {
        "kind": "real", "storage": "device", "epoch_samples": 20, "distinct_samples": 20, "data_folder": str(tmp_path)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is not an idx file of bytes: it begins with nothing"),
        (b"\x89PNG and so on", "is not an idx file of bytes"),
        (bytes([0, 0, 8, 3, 0, 0]), "is cut short"),
        (idx(np.zeros((3, 4, 4), np.uint8))[:-5], "has 59 bytes, but its header speaks of 64"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1), "its header speaks of 79228162"),
    ],
)
def test_invalid_idx_files_are_refused(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "images"
    path.write_bytes(data)
    with pytest.raises(WorkerError, match=text):
        read_idx(path)


def test_a_packed_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(os.urandom(1000))[:500])
    with pytest.raises(WorkerError, match=r"cannot read .*images\.gz"):
        read_idx(path)


def test_a_packed_file_without_end_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcbench.worker.data.resident_feed._MAX_FILE_BYTES", 1000)
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(bytes(1_000_000)))
    with pytest.raises(WorkerError, match="larger than 1000 bytes"):
        read_idx(path)


def write_cifar(folder: Path) -> None:
    root = folder / "cifar-10-batches-py"
    root.mkdir()
    for number, name in enumerate([*(f"data_batch_{one}" for one in range(1, 6)), "test_batch"]):
        held = {
            b"batch_label": b"one of six",
            b"data": np.full((4, 3072), number, np.uint8),
            b"labels": [number] * 4,
            b"filenames": [b"a.png"] * 4,
        }
        (root / name).write_bytes(pickle.dumps(held, protocol=3))


def test_cifar10_files_are_read_normalised_with_held_out_samples(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    feed = feed_of(tmp_path, "cifar10", batch_size=20)
    inputs, labels = feed.batch(0, 0)
    assert inputs.shape == (20, 3, 32, 32)
    assert torch.equal(torch.sort(labels).values, torch.arange(20) // 4)
    expected = (labels.float() / 255 - 0.4914) / 0.2470
    assert torch.allclose(inputs[:, 0, 5, 5], expected)
    held = feed.held_out()
    assert held is not None
    assert torch.cat([labels for _, labels in held]).tolist() == [5] * 4


PYTHON_2 = (
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
    b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
    b"K\x00tb\x89T\x00\x0c\x00\x00" + b"\x07" * 3072 + b"tbU\x06labels]q\x08K\x03au."
)
"""As Python 2 wrote the set's own files: numpy's names of then, strings of bytes."""


def test_a_cifar_batch_of_python_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(PYTHON_2)
    pixels, labels = read_cifar_batch(path)
    assert pixels.shape == (1, 3, 32, 32)
    assert set(pixels.flatten().tolist()) == {7}
    assert labels.tolist() == [3]


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path, protocol: int) -> None:
    mark, path = tmp_path / "ran", tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": Malicious(mark), "labels": []}, protocol=protocol))
    with pytest.raises(WorkerError, match=r"data_batch_1 is .*it asks for posix\.mkdir, which no batch does"):
        read_cifar_batch(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ([], "no rows of 3,072 bytes"),
        ({b"data": np.zeros((2, 100), np.uint8)}, "no rows of 3,072 bytes"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "does not hold 2 labels from 0 to 9"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 10]}, "does not hold 2 labels from 0 to 9"),
        ({b"data": np.zeros((2, 3072), np.uint8)}, "does not hold 2 labels from 0 to 9"),
    ],
)
def test_invalid_cifar_batches_are_refused(tmp_path: Path, held: Any, text: str) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(held, protocol=3))
    with pytest.raises(WorkerError, match=text):
        read_cifar_batch(path)


def test_a_truncated_cifar_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(PYTHON_2[:500])
    with pytest.raises(WorkerError, match="is not a batch of CIFAR-10"):
        read_cifar_batch(path)


def write_imagenet(folder: Path) -> None:
    for part, count in (("train", 6), ("val", 3)):
        for label, name in enumerate(("n01", "n02")):
            root = folder / "imagenet" / part / name
            root.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (50 + number, 40), (100 * label, 50, 50)).save(root / f"{name}_{number}.JPEG")
    (folder / "imagenet" / "train" / "n01" / "notes.txt").write_text("not an image")


def test_imagenet_files_are_read_once_per_epoch(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    one, two = (
        feed_of(tmp_path, "imagenet", input_size=32),
        feed_of(tmp_path, "imagenet", 2, input_size=32, batch_size=2),
    )
    two.prepare(0)
    assert (one.samples, one.steps_per_epoch) == (12, 3)
    for step in range(4):
        inputs, labels = one.batch(step, 0)
        shares = [two.batch(step, replica) for replica in range(2)]
        assert torch.equal(inputs, torch.cat([x for x, _ in shares]))
        assert torch.equal(labels, torch.cat([y for _, y in shares]))
        reds = inputs[:, 0, 16, 16] * 0.229 + 0.485
        assert torch.allclose(reds, labels * 100 / 255, atol=0.03)
    held = one.held_out()
    assert held is not None
    assert torch.cat([labels for _, labels in held]).tolist() == [0, 0, 0, 1, 1, 1]
    assert one.description()["kind"] == "real"
    one.close()
    two.close()


def test_imagenet_without_val_has_nothing_to_evaluate_with(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    for path in sorted((tmp_path / "imagenet" / "val").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    feed = feed_of(tmp_path, "imagenet", input_size=32)
    assert feed.held_out() is None
    feed.close()


def test_a_broken_image_ends_the_step_that_needs_it_by_name(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    path = tmp_path / "imagenet" / "train" / "n02" / "n02_3.JPEG"
    path.write_bytes(path.read_bytes()[:400])
    feed = feed_of(tmp_path, "imagenet", input_size=32, batch_size=12)
    with pytest.raises(WorkerError, match=r"cannot read the image .*n02_3\.JPEG"):
        feed.batch(0, 0)
    feed.close()


def write_universes(folder: Path, extent: int = 8, chunks: bool = False) -> Any:
    root = folder / "cosmoflow" / "train" / "21688988"
    root.mkdir(parents=True)
    full = np.arange(2 * extent**3 * 4, dtype=np.int16).reshape(2, extent, extent, extent, 4)
    for number in range(2):
        with h5py.File(root / f"univ_{number}.hdf5", "w") as file:
            kept = {"chunks": (2, 2, 2, 4), "compression": "gzip"} if chunks else {}
            file.create_dataset("full", data=full[number], **kept)
            file["unitPar"] = np.full(4, number, np.float32)
    return full


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize(("size", "samples"), [(4, 16), (8, 2)])
def test_universes_are_cut_into_cubes(tmp_path: Path, size: int, samples: int, chunks: bool) -> None:
    full = write_universes(tmp_path, chunks=chunks)
    feed = feed_of(tmp_path, "cosmoflow", input_size=size, batch_size=samples)
    assert feed.samples == samples
    inputs, values = feed.batch(0, 0)
    whole = torch.from_numpy(np.log1p(full.astype(np.float32)))
    for cube, value in zip(inputs, values, strict=True):
        of_file = whole[int(value[0])].permute(3, 0, 1, 2)
        regions = [
            of_file[:, a : a + size, b : b + size, c : c + size]
            for a in range(0, 8, size) for b in range(0, 8, size) for c in range(0, 8, size)
        ]  # fmt: skip
        assert sum(torch.allclose(cube, region) for region in regions) == 1
    assert len({tuple(cube.flatten().tolist()) for cube in inputs}) == samples
    assert feed.held_out() is None
    feed.close()


def test_a_volume_that_is_no_hdf5_is_named(tmp_path: Path) -> None:
    write_universes(tmp_path)
    root = tmp_path / "cosmoflow" / "train" / "21688988"
    (root / "univ_1.hdf5").write_bytes(b"no HDF5")
    feed = feed_of(tmp_path, "cosmoflow", input_size=8, batch_size=2)
    with pytest.raises(WorkerError, match=r"cannot read the volume .*univ_1\.hdf5"):
        feed.batch(0, 0)
    feed.close()
    with h5py.File(root / "univ_1.hdf5", "w") as file:
        file["full"], file["unitPar"] = np.zeros((8, 8, 8, 3), np.int16), np.zeros(4)
    feed = feed_of(tmp_path, "cosmoflow", input_size=8, batch_size=2)
    with pytest.raises(WorkerError, match=r"univ_1\.hdf5 holds a volume of 8 x 8 x 8 x 3"):
        feed.batch(0, 0)
    feed.close()
    with pytest.raises(WorkerError, match="too small for samples of 16"):
        feed_of(tmp_path, "cosmoflow", input_size=16, batch_size=1)


def test_token_files_give_inputs_and_shifted_targets(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens" / "train.bin")
    feed = feed_of(tmp_path, "tokens", input_size=10, batch_size=9)
    assert feed.samples == 9, "the tenth has no last target"
    inputs, targets = feed.batch(0, 0)
    assert torch.equal(torch.sort(inputs.flatten()).values, torch.arange(90))
    assert torch.equal(inputs + 1, targets)
    feed.close()


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"", "has 0 bytes"), (b"abc", "has 3 bytes"), (bytes(20), "holds 10 tokens, too few"),
     (b"\xff\xff" * 200, "holds token 65535")],
)  # fmt: skip
def test_invalid_token_files_are_refused(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "train.bin").write_bytes(data)
    with pytest.raises(WorkerError, match=text), contextlib.closing(feed_of(tmp_path, "tokens", input_size=10)) as feed:
        feed.batch(0, 0)


@pytest.mark.parametrize("dataset", ["mnist", "cifar10", "imagenet", "cosmoflow", "tokens"])
def test_absent_files_are_unsupported_with_folder_and_layout(tmp_path: Path, dataset: str) -> None:
    with pytest.raises(WorkerError, match=f"of {dataset} in {tmp_path}") as caught:
        feed_of(tmp_path, dataset)
    assert caught.value.status == "unsupported"
    assert f"expected below {tmp_path}: " in str(caught.value.hint)


def test_more_at_once_than_there_is_in_the_files_is_unsupported(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    with pytest.raises(WorkerError, match="global batch 64 is more than the 20 samples of mnist") as caught:
        feed_of(tmp_path, "mnist", batch_size=64)
    assert caught.value.status == "unsupported"
