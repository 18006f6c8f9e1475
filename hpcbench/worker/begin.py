"""``begin``: claim an attempt before the ranks start. Runs in the batch script, so it stays quick: no torch."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import msgspec

from hpcbench.config.task import read_task
from hpcbench.results.schema import OK
from hpcbench.results.store import ClusterTree
from hpcbench.worker.launch import NOTHING_TO_DO, claim


def begin(tasks: Path, index: int, time_limit_s: float | None = None) -> int:
    """Print the absolute folder of a new attempt and return 0.

    Returns ``NOTHING_TO_DO`` and prints nothing on stdout where the run has an ok result already.
    """
    header, task = read_task(tasks, index)
    tree = ClusterTree(Path(header.tree))
    if has_ok_result(tree, task.run_id):
        print(f"hpcbench: {task.run_id} has an ok result already: nothing to do", file=sys.stderr)  # noqa: T201
        return NOTHING_TO_DO
    attempt = claim(tasks, index, header, task, secrets.token_hex(8), time_limit_s)
    print(attempt.folder.absolute())  # noqa: T201 - the batch script reads this line
    return 0


def has_ok_result(tree: ClusterTree, run_id: str) -> bool:
    """Whether the run is done; a broken result is none."""
    try:
        result = tree.read_result(run_id)
    except msgspec.MsgspecError:
        return False
    return result is not None and result.status == OK
