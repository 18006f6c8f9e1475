"""A results tree that is moved, full or read-only when a run ends."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.run_spec import run_id
from hpcbench.errors import EXIT_SYSTEM_REFUSED, StorageError
from hpcbench.fileio import write_error
from hpcbench.results.results_tree import ClusterTree
from hpcbench.worker.distributed.rank_environment import RankInfo
from hpcbench.worker.end import end
from hpcbench.worker.finalize import RunContext, write_run_result
from tests.worker.helpers import make_header, make_rank, make_spec, make_task, start_attempt, tree_of, write_tasks

SPEC = make_spec()


def test_a_rank_does_not_make_a_moved_tree_anew(tmp_path: Path) -> None:
    attempt = start_attempt(tmp_path, SPEC)
    info = RankInfo(rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, launcher="lone", launch="l1")
    context = RunContext(make_header(tmp_path), make_task(SPEC), attempt, info, {})
    root = tree_of(tmp_path).root
    root.rename(tmp_path / "moved")
    with pytest.raises(StorageError, match="is gone"):
        write_run_result(context, None, make_rank(), None, 0.0)
    assert not root.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.EDQUOT])
def test_a_measured_result_waits_for_a_file_system_that_refuses(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = start_attempt(tmp_path, SPEC, deadline_unix_s=time.time() + 300)
    info = RankInfo(rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, launcher="lone", launch="l1")
    context = RunContext(make_header(tmp_path), make_task(SPEC), attempt, info, {})
    left, write = [3], ClusterTree.write_result

    def refuse(*arguments: Any) -> bool:
        left[0] -= 1
        if left[0] >= 0:
            raise write_error(OSError(code, os.strerror(code)), attempt.folder)
        return write(*arguments)

    monkeypatch.setattr(ClusterTree, "write_result", refuse)
    monkeypatch.setattr("hpcbench.fileio.time.sleep", lambda _: None)
    assert write_run_result(context, None, make_rank(), None, 0.0) == "ok"
    assert tree_of(tmp_path).read_result(run_id(SPEC)) is not None


def test_the_end_of_a_run_names_the_file_system_that_refused(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    attempt = start_attempt(tmp_path, SPEC)
    (attempt.folder / "err.log").write_text(
        "hpcbench: cannot write /results/r.json: No space left on device, for 600 s\n"
    )
    assert end(tasks, 0, 1, EXIT_SYSTEM_REFUSED, "") == 0
    result = tree_of(tmp_path).read_result(run_id(SPEC))
    assert result is not None
    assert result.error is not None
    assert "the file system refused the ranks' files (exit code 3)" in result.error.message
    assert "No space left on device" in result.error.message


def test_the_end_of_a_run_finds_what_all_ranks_have_measured(tmp_path: Path) -> None:
    """Rank 0 left its file, and was killed before it wrote the result."""
    tasks = write_tasks(tmp_path, SPEC)
    start_attempt(tmp_path, SPEC).write_rank(make_rank())
    assert end(tasks, 0, 1, 137, "") == 0
    result = tree_of(tmp_path).read_result(run_id(SPEC))
    assert result is not None
    assert (result.status, result.attempt) == ("ok", 1)
