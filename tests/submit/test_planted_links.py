"""Links that somebody put into a shared tree: submit refuses to write through them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcbench.errors import StorageError
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.lock import exclusive_lock
from hpcbench.submit.plan import SweepPlan
from hpcbench.submit.submission_record import list_submissions
from hpcbench.submit.submit import submit


@pytest.mark.parametrize("linked", ["submissions", "submissions/.lock", "sweeps", "sweeps/small.json"])
def test_submit_writes_through_no_link(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, tmp_path: Path, linked: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    place = cluster_tree.root / linked
    place.parent.mkdir(parents=True)
    place.symlink_to(outside)
    with pytest.raises(StorageError, match="is a link: none is followed") as caught:
        submit(plan, cluster_tree)
    assert (str(place) in caught.value.message, caught.value.exit_code) == (True, 3)
    assert list(outside.iterdir()) == []
    assert not (fake_slurm / "calls").exists()


def test_a_submission_behind_a_link_is_none_and_its_number_is_taken(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    cluster_tree.submissions.mkdir(parents=True)
    (cluster_tree.submissions / "small-0001").symlink_to(tmp_path / "outside")
    assert list_submissions(cluster_tree) == []
    submitted = submit(plan, cluster_tree)
    assert submitted.folder == cluster_tree.submissions / "small-0002"
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"owner": "\xff"}'], ids=["empty", "nested", "no text"])
def test_a_broken_lock_is_named_and_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    path = tmp_path / ".lock"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"waited 0 s for another submit"), exclusive_lock(path, wait_s=0):
        raise AssertionError
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr("hpcbench.submit.lock.time.monotonic", lambda: next(clock))
    with exclusive_lock(path, wait_s=100):
        assert path.read_bytes() != content
    assert not path.exists()
