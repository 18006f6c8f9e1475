"""A watcher reads what has changed, all of it, and nothing else."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from pathlib import Path

import pytest

from benchmarks.results_tree import result, specs
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import FailureRecord, RunResult
from hpcbench.submit.watcher import IncrementalClusterTree

RUNS = 300


class Counting(IncrementalClusterTree):
    """Notes which results are read."""

    def __init__(self, root: Path) -> None:
        self.now_s = 0.0
        self.reads: list[str] = []
        super().__init__(root, lambda: self.now_s)

    def read_result(self, run_id: str) -> RunResult | None:
        self.reads.append(run_id)
        return super().read_result(run_id)

    def look(self, run_ids: list[str], after_s: float = 10.0) -> list[str]:
        """Return the files read for ``run_ids``, after a comparison with a fresh reader."""
        self.now_s += after_s
        self.reads.clear()
        found = self.summaries(run_ids)
        reads, self.reads = self.reads, []
        assert found == ClusterTree(self.root).summaries(run_ids)
        return sorted(reads)


@pytest.fixture
def planted(tmp_path: Path) -> list[RunResult]:
    """Two thirds are there; every tenth of them failed."""
    source = random.Random(0)
    results = [result(spec, source) for spec in itertools.islice(specs(), RUNS)]
    for number, one in enumerate(results):
        one.status, one.error = "ok", None
        if number % 10 == 9:
            one.status, one.error = "failed", FailureRecord(type="RuntimeError", message="why")
    tree = ClusterTree(tmp_path / "c")
    for one in results[: RUNS * 2 // 3]:
        tree.write_result(one)
    return results


@pytest.fixture
def ids(planted: list[RunResult]) -> list[str]:
    return [one.run_id for one in planted]


@pytest.fixture
def quiet(tmp_path: Path, ids: list[str]) -> Counting:
    """A tree that was looked at until nothing in it is read again."""
    tree = Counting(tmp_path / "c")
    for _ in range(3):
        tree.look(ids)
    return tree


def test_a_quiet_tree_is_read_once(tmp_path: Path, planted: list[RunResult], ids: list[str]) -> None:
    tree = Counting(tmp_path / "c")
    there = planted[: RUNS * 2 // 3]
    assert tree.look(ids) == sorted(one.run_id for one in there)
    # What is not ok could have been replaced at the same modification time: it is read once more, later.
    assert tree.look(ids) == sorted(one.run_id for one in there if one.status != "ok")
    assert tree.look(ids) == []


def test_only_changed_folders_are_read_again(quiet: Counting, planted: list[RunResult], ids: list[str]) -> None:
    new, again = planted[-1], planted[9]
    quiet.write_result(new)
    again.status, again.error, again.attempt = "ok", None, again.attempt + 1
    quiet.write_result(again)
    reads = quiet.look(ids)
    assert {new.run_id, again.run_id} <= set(reads)
    prefixes = {new.run_id[:2], again.run_id[:2]}
    assert {run_id[:2] for run_id in reads} == prefixes
    assert quiet.summaries(ids)[again.run_id] == ClusterTree(quiet.root).summary(again.run_id)


def test_two_changes_with_equal_modification_times_are_both_read(
    tmp_path: Path, planted: list[RunResult], ids: list[str]
) -> None:
    tree = Counting(tmp_path / "c")
    tree.look(ids)
    folder = tree.root / "runs" / planted[-1].run_id[:2]
    folder.mkdir(exist_ok=True)
    at = folder.stat().st_mtime_ns
    tree.look(ids, after_s=0.5)
    tree.write_result(planted[-1])
    os.utime(folder, ns=(at, at))
    assert planted[-1].run_id in tree.look(ids, after_s=0.5)


def test_a_change_first_met_by_another_query_is_read(quiet: Counting, planted: list[RunResult], ids: list[str]) -> None:
    again = planted[9]
    again.status, again.error, again.attempt = "ok", None, again.attempt + 1
    quiet.write_result(again)
    others = [one.run_id for one in planted[RUNS * 2 // 3 :]]
    for _ in range(3):
        quiet.look(others)
    reads = quiet.look(ids)
    assert again.run_id in reads
    assert {run_id[:2] for run_id in reads} == {again.run_id[:2]}


def test_newly_requested_runs_are_read_in_an_unchanged_tree(tmp_path: Path, planted: list[RunResult]) -> None:
    tree = Counting(tmp_path / "c")
    for _ in range(3):
        tree.look([planted[0].run_id])
    assert tree.look([planted[0].run_id, planted[1].run_id]) == [planted[1].run_id]


def test_a_single_run_is_always_read_and_a_removed_result_disappears(
    quiet: Counting, planted: list[RunResult], ids: list[str]
) -> None:
    failed = planted[9].run_id
    shutil.rmtree(quiet.run_folder(failed))
    assert quiet.summary(failed) is None
    assert failed not in quiet.summaries(ids)
