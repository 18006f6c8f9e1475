"""A result that is measured anew in another environment goes to the archive; no other ok result gives way."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcbench.errors import StorageError
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import RunResult
from tests.results.planted import ID, result


def keyed(attempt: int, key: str | None, status: str = "ok") -> RunResult:
    return result(attempt, status, provenance={} if key is None else {"environment_key": key})


@pytest.fixture
def tree(tmp_path: Path) -> ClusterTree:
    return ClusterTree(tmp_path / "c")


@pytest.mark.parametrize(
    ("present", "status", "supersedes", "replaced"),
    [
        ("old", "ok", "old", True),
        ("old", "failed", "old", False),
        ("old", "ok", None, False),
        ("older", "ok", "old", False),
        (None, "ok", "old", False),
        (None, "ok", None, False),
    ],
)
def test_a_replaced_result_is_archived(
    tree: ClusterTree, present: str | None, status: str, supersedes: str | None, replaced: bool
) -> None:
    tree.write_result(keyed(1, present))
    before = tree.result_path(ID).read_bytes()
    assert tree.write_result(keyed(2, "new", status), supersedes) is replaced
    archived = tree.root / "archive" / "old" / ID[:2] / f"{ID}.json"
    assert archived.exists() is replaced
    assert (archived if replaced else tree.result_path(ID)).read_bytes() == before
    if replaced:
        stored = tree.read_result(ID)
        assert stored is not None
        assert stored.attempt == 2
        assert list(tree.run_ids()) == [ID], "the archive holds no runs"


def test_the_archive_overwrites_no_result(tree: ClusterTree) -> None:
    for attempt, key in enumerate(("a", "b", "a", "b"), start=1):
        tree.write_result(keyed(attempt, key), "b" if key == "a" else "a")
    names = sorted(str(path.relative_to(tree.root / "archive")) for path in tree.root.glob("archive/*/*/*"))
    assert names == [f"a/{ID[:2]}/{ID}.3.json", f"a/{ID[:2]}/{ID}.json", f"b/{ID[:2]}/{ID}.json"]


@pytest.mark.parametrize("key", ["", "..", "a/b", "/tmp"])
def test_a_key_that_is_no_name_of_a_folder_is_refused(tree: ClusterTree, key: str) -> None:
    tree.write_result(keyed(1, key))
    with pytest.raises(StorageError, match="cannot name a folder"):
        tree.write_result(keyed(2, "new"), key)
    assert tree.read_result(ID) == keyed(1, key)
