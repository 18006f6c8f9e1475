from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from hpcbench.errors import ConfigError, StorageError
from hpcbench.fileio import make_folder
from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree, ResultsTree, collect_results
from hpcbench.results.schema import RankResult, RunResult
from tests.results.planted import ID, result


@pytest.fixture
def tree(tmp_path: Path) -> ClusterTree:
    return ClusterTree(tmp_path / "c")


def test_a_result_is_read_back_as_written(tree: ClusterTree) -> None:
    assert tree.write_result(result())
    assert tree.read_result(ID) == result()
    document = msgspec.json.decode(tree.result_path(ID).read_bytes())
    assert document["schema_version"] == 1
    assert document["metrics"] == {"samples_per_s": 1.5}
    assert tree.result_path(ID).relative_to(tree.root) == Path("runs", ID[:2], ID, "result.json")


def test_existing_runs_are_the_folders_that_are_there(tree: ClusterTree) -> None:
    assert tree.existing_runs() == set()
    tree.write_result(result())
    begin_attempt(tree.run_folder("ff" + ID[2:]), launch="l", host="h", started_unix_s=0.0)
    (tree.root / "runs" / "ff" / "no run").mkdir()
    assert tree.existing_runs() == {ID, "ff" + ID[2:]} == set(tree.run_ids())


@pytest.mark.parametrize(
    ("present", "later", "kept"),
    [
        (result(1, "failed"), result(2, "ok"), "ok"),
        (result(1, "ok"), result(2, "failed"), "ok"),
        (result(1, "ok"), result(2, "ok"), "ok"),
        (result(2, "timeout"), result(1, "cancelled"), "timeout"),
    ],
)
def test_a_later_attempt_replaces_only_a_result_not_ok(
    tree: ClusterTree, present: RunResult, later: RunResult, kept: str
) -> None:
    tree.write_result(present)
    replaced = tree.write_result(later)
    stored = tree.read_result(ID)
    assert stored is not None
    assert stored.status == kept
    assert replaced == (present.status != "ok" and later.attempt > present.attempt)


def test_a_broken_result_is_replaced(tree: ClusterTree) -> None:
    tree.result_path(ID).parent.mkdir(parents=True)
    tree.result_path(ID).write_text("{half")
    assert [entry.problem[:21] for entry in collect_results(tree)] == ["result.json is broken"]
    assert tree.write_result(result(1, "failed"))
    assert [entry.result for entry in collect_results(tree)] == [result(1, "failed")]


def test_a_lock_of_a_dead_writer_does_not_hold_up_the_next(tree: ClusterTree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.result_path(ID).parent.mkdir(parents=True)
    (tree.result_path(ID).parent / ".result.lock").touch()
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr("hpcbench.results.results_tree.time.monotonic", lambda: next(clock))
    assert tree.write_result(result())
    assert sorted(os.listdir(tree.run_folder(ID))) == ["result.json"]


@pytest.mark.parametrize("name", ["", "../../etc", "ABCDEF0123456789", "0" * 15, "0" * 17])
def test_only_ids_become_paths(tree: ClusterTree, name: str) -> None:
    with pytest.raises(StorageError, match="is not a run_id"):
        tree.run_folder(name)


def test_valid_rank_files_of_an_attempt_are_read(tree: ClusterTree) -> None:
    attempt = begin_attempt(tree.run_folder(ID), launch="l", host="h", started_unix_s=1.0)
    one = RankResult(rank=1, local_rank=1, node_rank=0, host="h", pid=1, device="cpu", losses=[1.0, None])
    attempt.write_rank(one)
    (attempt.folder / "rank-0.json").write_text("{half")
    assert attempt.read_ranks() == {1: one}


def test_collect_passes_over_runs_without_a_result_and_names_links(tree: ClusterTree, tmp_path: Path) -> None:
    tree.write_result(result())
    tree.run_folder("0" * 16).mkdir(parents=True)
    (tree.root / "runs" / "aa").symlink_to(tmp_path)
    assert [entry.run_id for entry in collect_results(tree)] == ["runs/aa", ID]
    assert ResultsTree(tmp_path).clusters() == ["c"]


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("file", "file is a file, no results tree\n  name a results tree, a folder with CLUSTER/runs: --results"),
        ("other", "other is no results tree: it has 'hosts', and no CLUSTER/runs\n  name a results tree"),
        ("results/local", "results/local is the folder of one cluster\n  name the results tree .*/results$"),
    ],
)
def test_what_is_no_results_tree_is_refused(tmp_path: Path, place: str, problem: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "other" / "local").mkdir(parents=True)
    (tmp_path / "other" / "hosts").touch()
    (tmp_path / "results" / "local" / "runs").mkdir(parents=True)
    with pytest.raises(ConfigError, match=problem):
        ResultsTree(tmp_path / place).clusters()


def test_an_absent_and_an_empty_folder_may_become_a_results_tree(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".gitkeep").touch()
    (tmp_path / "results" / "local" / "sweeps").mkdir(parents=True)
    found = [ResultsTree(tmp_path / name).clusters() for name in ("absent", "empty", "results")]
    assert found == [[], [], ["local"]]


def test_a_file_above_a_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file is a file: name a folder, or move it away"):
        make_folder(tmp_path / "file" / "local" / "runs")
