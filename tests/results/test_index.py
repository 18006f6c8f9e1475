"""The index says what the files say, whatever happened to them since it was written."""

from __future__ import annotations

import io
import os
import random
import threading
from pathlib import Path
from typing import Any

import polars
import pytest
from polars.testing import assert_frame_equal

from benchmarks.results_tree import result, specs, write_results
from hpcbench import fileio
from hpcbench.errors import StorageError
from hpcbench.results import frame, index
from hpcbench.results.frame import FILE_COLUMNS, collected_frame
from hpcbench.results.results_tree import ClusterTree, collect_results
from hpcbench.results.schema import RunResult

OLD_NS = 10**18


@pytest.fixture
def tree(tmp_path: Path) -> ClusterTree:
    tree = ClusterTree(tmp_path / "c")
    write_results(tree.root, 60)
    age(tree)
    return tree


def age(tree: ClusterTree) -> None:
    """Set older modification times, one for each folder."""
    for number, folder in enumerate(sorted((tree.root / "runs").iterdir())):
        os.utime(folder, ns=(OLD_NS, OLD_NS + number))


def plain(frame: polars.DataFrame) -> polars.DataFrame:
    """Without what is the file's: these results have no date of their own."""
    return frame.drop(*FILE_COLUMNS, "ended_at_s").sort("run_id")


def check(tree: ClusterTree) -> polars.DataFrame:
    """The index against a plain reading of every file."""
    found = index.read_indexed_results(tree)
    assert_frame_equal(plain(found), plain(collected_frame(collect_results(tree))))
    return found


def files_read(tree: ClusterTree, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of result files that reading the index opens."""
    opened: list[str] = []
    original = fileio.read_regular_with_stat

    def counted(path: Any, *rest: Any) -> Any:
        opened.append(str(path))
        return original(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(frame, "read_regular_with_stat", counted)
        index.read_indexed_results(tree)
    return len(opened)


def made(number: int, seed: int = 0) -> RunResult:
    return next(result(spec, random.Random(seed)) for spec in specs(number))


def path_of(tree: ClusterTree, run_id: str) -> Path:
    return tree.root / "runs" / run_id[:2] / run_id / "result.json"


def test_an_unchanged_tree_is_not_read_again(tree: ClusterTree, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files_read(tree, monkeypatch) == 60
    assert files_read(tree, monkeypatch) == 0
    check(tree)


def test_some_columns_are_those_of_the_whole(tree: ClusterTree) -> None:
    whole = index.read_indexed_results(tree)
    some = ["spec.nodes", "metrics.samples_per_s", "run_id"]
    assert_frame_equal(index.read_indexed_results(tree, some), whole.select(some))


def test_only_a_new_result_is_read_beside_the_index(tree: ClusterTree, monkeypatch: pytest.MonkeyPatch) -> None:
    index.read_indexed_results(tree)
    assert tree.write_result(made(7))
    assert files_read(tree, monkeypatch) == 1
    assert made(7).run_id in check(tree)["run_id"]


def test_a_folder_that_is_still_young_is_looked_at_again(tree: ClusterTree) -> None:
    tree.write_result(made(7))
    folder = path_of(tree, made(7).run_id).parents[1]
    state = folder.stat()
    index.read_indexed_results(tree)
    run_id = made(7).run_id
    path_of(tree, run_id).unlink()
    path_of(tree, run_id).parent.rmdir()
    # The clock of the file system may not have moved on between the two.
    os.utime(folder, ns=(state.st_mtime_ns, state.st_mtime_ns))
    assert run_id not in check(tree)["run_id"]


def test_a_retry_and_a_removed_run_are_noticed(tree: ClusterTree) -> None:
    first = made(7)
    first.status = "oom"
    tree.write_result(first)
    age(tree)
    assert check(tree).filter(polars.col("status") == "oom")["run_id"].to_list() == [first.run_id]
    first.status, first.attempt = "ok", 2
    tree.write_result(first)
    # Whoever died between the rename and the touch leaves the folder as it was.
    age(tree)
    assert check(tree).filter(polars.col("run_id") == first.run_id)["attempt"].to_list() == [2]
    victim = path_of(tree, check(tree)["run_id"][5]).parent
    (victim / "result.json").unlink()
    victim.rmdir()
    assert victim.name not in check(tree)["run_id"]


def test_a_half_copied_file_is_a_row_with_a_reason_until_it_is_whole(tree: ClusterTree) -> None:
    run_id = index.read_indexed_results(tree)["run_id"][3]
    path = path_of(tree, run_id)
    whole = path.read_bytes()
    path.write_bytes(whole[:700])
    path.parents[1].touch()
    (row,) = check(tree).filter(polars.col("run_id") == run_id).to_dicts()
    assert row["status"] == "broken"
    assert row["error.message"].startswith("result.json is broken: Input data was truncated")
    age(tree)
    check(tree)
    path.write_bytes(whole)
    assert "broken" not in check(tree)["status"]


def test_a_result_that_arrives_without_a_touch_is_noticed(tree: ClusterTree) -> None:
    run_id = made(9).run_id
    path_of(tree, run_id).parent.mkdir(parents=True)
    age(tree)
    check(tree)
    write = path_of(tree, run_id)
    tree.write_result(made(9))
    age(tree)
    assert write.exists()
    assert run_id in check(tree)["run_id"]


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "other version"])
def test_an_unreadable_result_is_a_row_with_a_reason(tree: ClusterTree, what: str) -> None:
    run_id = index.read_indexed_results(tree)["run_id"][3]
    path = path_of(tree, run_id)
    text = path.read_text()
    path.unlink()
    if what == "link":
        path.symlink_to("/etc/hostname")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.write_text(text.replace('"schema_version": 1', '"schema_version": 99'))
    path.parents[1].touch()
    (row,) = index.read_indexed_results(tree).filter(polars.col("run_id") == run_id).to_dicts()
    assert row["status"] == "broken"
    assert row["error.message"]
    assert len(index.read_indexed_results(tree)) == 60


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "link", "foreign parquet", "other columns"])
def test_a_damaged_index_is_rebuilt(tree: ClusterTree, damage: str) -> None:
    index.read_indexed_results(tree)
    path = tree.root / index.INDEX_FILE_NAME
    data = path.read_bytes()
    path.unlink()
    if damage == "link":
        elsewhere = tree.root.parent / "elsewhere"
        elsewhere.write_bytes(data)
        path.symlink_to(elsewhere)
    elif damage == "foreign parquet":
        polars.DataFrame({"a": [1]}).write_parquet(path)
    elif damage == "other columns":
        head = polars.read_parquet_metadata(io.BytesIO(data))["hpcbench"]
        polars.DataFrame({"run_id": ["x"]}).write_parquet(path, metadata={"hpcbench": head})
    else:
        path.write_bytes({"cut": data[: len(data) // 2], "text": b"PAR1 not PAR1", "empty": b""}[damage])
    check(tree)
    assert not path.is_symlink()


def test_a_tree_that_cannot_be_written_has_its_index_in_the_users_cache(
    tree: ClusterTree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def refusing(path: Path, data: bytes) -> None:
        if path.parent == tree.root:
            raise StorageError("read-only")
        fileio.write_atomic(path, data)

    monkeypatch.setattr(index, "write_atomic", refusing)
    assert files_read(tree, monkeypatch) == 60
    assert files_read(tree, monkeypatch) == 0
    assert not (tree.root / index.INDEX_FILE_NAME).exists()
    assert len(list((tmp_path / "cache" / "hpcbench" / "index").iterdir())) == 1


def test_many_readers_beside_a_writer_see_whole_results(tree: ClusterTree) -> None:
    counts: list[list[int]] = [[], []]
    problems: list[str] = []
    done = threading.Event()

    def reader(seen: list[int]) -> None:
        while not done.is_set():
            frame = index.read_indexed_results(tree)
            seen.append(len(frame))
            problems.extend(frame.filter(polars.col("status") == "broken")["run_id"])

    readers = [threading.Thread(target=reader, args=(seen,)) for seen in counts]
    for thread in readers:
        thread.start()
    for number in range(20):
        tree.write_result(made(100 + number))
    done.set()
    for thread in readers:
        thread.join()
    assert problems == []
    assert all(seen == sorted(seen) for seen in counts)
    assert len(check(tree)) == 80
    assert [path.name for path in tree.root.iterdir() if path.name.startswith(".")] == [index.INDEX_FILE_NAME]
