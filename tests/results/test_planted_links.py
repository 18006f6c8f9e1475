"""Links and other things that somebody else put into a shared tree: named, never followed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcbench.errors import ConfigError, StorageError
from hpcbench.fileio import UnsafeFileError, join_without_links, read_regular, read_tail
from hpcbench.results.attempts import Attempt, attempt_numbers, begin_attempt, latest_attempt
from hpcbench.results.results_tree import ClusterTree, ResultsTree, collect_results
from hpcbench.results.schema import RankResult
from tests.results.planted import ID, result

RUN = f"runs/{ID[:2]}/{ID}"


def begin(tree: ClusterTree) -> Attempt:
    return begin_attempt(tree.run_folder(ID), launch="l", host="h", started_unix_s=1.0)


def write_rank(tree: ClusterTree) -> None:
    Attempt(tree.run_folder(ID), 1).write_rank(
        RankResult(rank=0, local_rank=0, node_rank=0, host="h", pid=1, device="cpu")
    )


@pytest.fixture
def tree(tmp_path: Path) -> ClusterTree:
    """A run with an attempt and a result."""
    tree = ClusterTree(tmp_path / "results" / "c")
    begin(tree)
    write_rank(tree)
    tree.write_result(result())
    return tree


def move_away(tree: ClusterTree, name: str) -> Path:
    """Move a part of the tree out of it and leave a link behind; returns where it is now."""
    outside = tree.root.parents[1] / "outside"
    place = tree.root / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        shutil.move(place, outside)
    else:
        outside.mkdir()
    place.symlink_to(outside)
    return outside


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("linked", "write"),
    [
        ("runs", lambda tree: tree.write_result(result(2))),
        (RUN, lambda tree: tree.write_result(result(2))),
        (f"{RUN}/result.json", lambda tree: tree.write_result(result(2))),
        ("runs", begin),
        (RUN, begin),
        (f"{RUN}/attempts", begin),
        (RUN, write_rank),
        (f"{RUN}/attempts", write_rank),
        (f"{RUN}/attempts/1", write_rank),
        ("sweeps", lambda tree: tree.sweep_path("s")),
        ("sweeps/s.json", lambda tree: tree.sweep_path("s")),
        ("submissions", lambda tree: tree.submissions),
    ],
)
def test_writing_through_a_link_is_refused(
    tree: ClusterTree, linked: str, write: Callable[[ClusterTree], None]
) -> None:
    outside = move_away(tree, linked)
    before = files(tree.root.parents[1])
    with pytest.raises(StorageError, match="is a link: none is followed") as caught:
        write(tree)
    assert str(tree.root / linked) in caught.value.message
    assert caught.value.exit_code == 3
    assert files(tree.root.parents[1]) == before
    assert outside.exists()


@pytest.mark.parametrize("linked", ["runs", f"runs/{ID[:2]}", RUN, f"{RUN}/result.json"])
def test_a_result_behind_a_link_is_a_row_with_the_reason(tree: ClusterTree, linked: str) -> None:
    move_away(tree, linked)
    for entries in (list(collect_results(ClusterTree(tree.root))), list(collect_results(ClusterTree(tree.root), [ID]))):
        (entry,) = entries
        assert entry.result is None
        assert str(tree.root / linked) in entry.problem
        assert "link" in entry.problem


def test_attempts_behind_links_are_not_read(tree: ClusterTree) -> None:
    move_away(tree, f"{RUN}/attempts/1")
    assert attempt_numbers(tree.run_folder(ID)) == []
    assert latest_attempt(tree.run_folder(ID)) is None
    with pytest.raises(StorageError, match="attempts/1 is a link"):
        begin(tree)


def test_files_behind_links_are_not_read(tree: ClusterTree, tmp_path: Path) -> None:
    folder = tree.run_folder(ID) / "attempts" / "1"
    for name in ("attempt.json", "rank-0.json"):
        shutil.move(folder / name, tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    (tmp_path / "secret").write_text("secret")
    (folder / "err.log").symlink_to(tmp_path / "secret")
    attempt = Attempt(tree.run_folder(ID), 1)
    assert (attempt.read_start(), attempt.read_ranks(), read_tail(folder / "err.log")) == (None, {}, "")
    for name in ("attempt.json", "rank-0.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    assert (attempt.read_start(), attempt.read_ranks()) == (None, {}), "reading a pipe does not block"


def test_the_tree_as_a_whole_may_be_a_link(tree: ClusterTree, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(tree.root.parent)
    through = ResultsTree(tmp_path / "linked").cluster("c")
    assert [entry.result for entry in collect_results(through)] == [result()]
    assert begin(through).number == 2


def test_a_cluster_behind_a_link_or_path_is_refused(tree: ClusterTree, tmp_path: Path) -> None:
    (tree.root.parent / "other").symlink_to(tree.root)
    results = ResultsTree(tree.root.parent)
    assert results.clusters() == ["c"]
    with pytest.raises(StorageError, match="other is a link"):
        results.cluster("other")
    for name in ("..", "../c", "c/runs", ""):
        with pytest.raises(ConfigError, match="is not a name of a cluster"):
            results.cluster(name)


@pytest.mark.parametrize("name", ["../x", "", ".x", "a/b", "x" * 65, "a\n"])
def test_only_names_of_sweeps_become_paths(tree: ClusterTree, name: str) -> None:
    with pytest.raises(StorageError, match="is not a name of a sweep"):
        tree.sweep_path(name)


@pytest.mark.parametrize("part", ["..", ".", "", "a/b", "/etc"])
def test_only_names_are_parts_of_a_path(tmp_path: Path, part: str) -> None:
    with pytest.raises(StorageError, match="is not a name of a file"):
        join_without_links(tmp_path, "a", part)


def test_only_plain_files_of_a_sensible_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_regular(path, 100) == b"x" * 100
    with pytest.raises(UnsafeFileError, match="it has 100 bytes, more than 99 are not read"):
        read_regular(path, 99)
    (tmp_path / "link").symlink_to(path)
    others = {tmp_path / "link": "is a link", tmp_path: "not a plain file", Path("/dev/zero"): "not a plain"}
    for other, reason in others.items():
        with pytest.raises(UnsafeFileError, match=reason):
            read_regular(other)
    assert read_regular(Path("/proc/self/status")).startswith(b"Name:")


def test_foreign_files_among_attempts_are_skipped(tree: ClusterTree) -> None:
    attempts = tree.run_folder(ID) / "attempts"
    (attempts / "2").write_text("a file")
    (attempts / "3").symlink_to("nowhere")
    (attempts / "\u0664").mkdir()
    with pytest.raises(StorageError, match="3 is a link"):
        begin(tree)
    (attempts / "3").unlink()
    assert begin(tree).number == 3
