"""A results tree that is moved while a run is under way."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcbench.errors import StorageError
from hpcbench.worker.distributed.rank_environment import RankInfo
from hpcbench.worker.finalize import RunContext, write_run_result
from tests.worker.helpers import make_header, make_rank, make_spec, make_task, start_attempt, tree_of

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
