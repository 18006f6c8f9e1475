"""Making samples: what is left by a maker that was killed, by two at once, and by one that lacks a package."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from hpcbench.errors import ConfigError, StorageError
from hpcbench.results.data_folder import MANIFEST_NAME, SampleManifest, list_datasets, read_sample_manifest
from hpcbench.worker.data.make_samples import make_samples
from tests.worker.test_start_environment import run_blocked

SAMPLES = 1024
SIZE = 8


def maker(folder: Path, workers: int = 2) -> subprocess.Popen[str]:
    words = ["data", "make", "mnist", "--folder", str(folder), "--size", str(SIZE), "--samples", str(SAMPLES)]
    command = [sys.executable, "-m", "hpcbench.worker", *words, "--workers", str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but what a maker that died was writing."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".tmp")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    assert list(make_samples(folder, "mnist", SIZE, SAMPLES, 1)) == [0, 256, 512, 768, 1024]
    return contents(folder)


def test_a_killed_maker_leaves_no_process_and_the_next_resumes(tmp_path: Path, whole: dict[str, bytes]) -> None:
    process = maker(tmp_path)
    assert process.stdout is not None
    done = 0
    while done == 0:
        done = json.loads(process.stdout.readline())["done"]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # Its children hold the pipe until they end.
    process.stdout.read()
    (found,) = list_datasets(tmp_path)
    assert not found.complete
    assert found.samples is not None
    assert done <= found.samples
    first = {path: data for path, data in contents(tmp_path).items() if path.endswith("done.json")}
    stamps = {path: (tmp_path / path).stat().st_mtime_ns for path in first}
    if found.samples == SAMPLES:
        # All of it was there but the manifest: the next has only that to write.
        assert not (tmp_path / f"mnist-{SIZE}" / MANIFEST_NAME).exists()
    assert next(make_samples(tmp_path, "mnist", SIZE, SAMPLES, 1)) == found.samples
    assert list(make_samples(tmp_path, "mnist", SIZE, SAMPLES, 1))[-1] == SAMPLES
    assert contents(tmp_path) == whole
    assert {path: (tmp_path / path).stat().st_mtime_ns for path in first} == stamps, "what was whole was left alone"


@pytest.mark.parametrize("lines", [1, 2])
def test_an_interrupted_sample_maker_ends_without_a_message(tmp_path: Path, lines: int) -> None:
    """Interrupted while its processes start, and while they make samples."""
    process = maker(tmp_path)
    assert process.stdout is not None
    for _ in range(lines):
        json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    assert (process.returncode, messages) == (130, "")


def test_two_makers_at_once_make_one_set(tmp_path: Path, whole: dict[str, bytes]) -> None:
    makers = [maker(tmp_path), maker(tmp_path)]
    for one in makers:
        _, said = one.communicate(timeout=120)
        assert one.returncode == 0, said
    assert contents(tmp_path) == whole
    assert list(tmp_path.rglob("*.tmp")) == []


def test_samples_of_other_parameters_are_not_mixed(tmp_path: Path) -> None:
    list(make_samples(tmp_path, "tokens", SIZE, 10, 1))
    path = tmp_path / f"tokens-{SIZE}" / MANIFEST_NAME
    manifest = read_sample_manifest(path.parent)
    assert manifest is not None
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, parameters="other")))
    with pytest.raises(ConfigError, match="would not make"):
        list(make_samples(tmp_path, "tokens", SIZE, 10, 1))
    path.write_bytes(b"{}")
    with pytest.raises(StorageError, match="is not a manifest"):
        list(make_samples(tmp_path, "tokens", SIZE, 10, 1))


def test_a_full_disk_is_detected_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage())
    with pytest.raises(StorageError, match="1000 free"):
        list(make_samples(tmp_path, "cosmoflow", 64, 10, 1))


class _Usage:
    free = 1000


def test_old_remains_of_a_killed_maker_go_and_young_ones_stay(tmp_path: Path) -> None:
    folder = tmp_path / f"mnist-{SIZE}" / "00000"
    folder.mkdir(parents=True)
    old, young = folder / ".a.jpg.00.tmp", folder / ".b.jpg.00.tmp"
    old.touch()
    young.touch()
    os.utime(old, (time.time() - 10_000, time.time() - 10_000))
    list(make_samples(tmp_path, "mnist", SIZE, 3, 1))
    assert (old.exists(), young.exists()) == (False, True)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def test_the_maker_needs_no_torch_and_nothing_of_the_login_node(folder: str) -> None:
    words = ["data", "make", "tokens", "--size", "8", "--samples", "4", "--workers", "1", "--folder", folder]
    done = run_blocked(
        ["torch", "click", "pydantic", "submitit", "jinja2", "polars", "rich", "tomli", "PIL", "h5py"], *words
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"done": 4, "samples": 4}
    manifest = read_sample_manifest(Path(folder) / "tokens-8")
    assert isinstance(manifest, SampleManifest)
    assert manifest.samples == 4


@pytest.mark.parametrize(("dataset", "package", "name"), [("mnist", "PIL", "pillow"), ("cosmoflow", "h5py", "h5py")])
def test_a_package_that_is_missing_is_named(folder: str, dataset: str, package: str, name: str) -> None:
    done = run_blocked([package], "data", "make", dataset, "--size", "8", "--samples", "2", "--folder", folder)
    assert done.returncode == 2
    assert f"pip install {name}" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(Path(folder).iterdir()) == [], "nothing is left behind"
