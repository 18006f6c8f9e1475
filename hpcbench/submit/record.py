"""``sweeps/<name>.json``: which runs a sweep means on a cluster, so that commands need not find its file again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from hpcbench.fileio import make_folder, read_regular, write_atomic
from hpcbench.results.decode import decode
from hpcbench.results.store import ClusterTree

if TYPE_CHECKING:
    from hpcbench.submit.plan import Plan


class SweepRecord(msgspec.Struct, kw_only=True):
    """The runs that the sweep meant when it was submitted last."""

    sweep: str
    cluster: str
    description: str
    run_ids: list[str]
    dropped: int
    written_unix_s: float


def write_sweep(plan: Plan, tree: ClusterTree) -> None:
    """Record which runs the sweep means now."""
    record = SweepRecord(
        sweep=plan.sweep.name,
        cluster=plan.profile.name,
        description=plan.sweep.description,
        run_ids=list(plan.runs),
        dropped=len(plan.dropped),
        written_unix_s=time.time(),
    )
    path = tree.sweep_path(plan.sweep.name)
    make_folder(path.parent)
    write_atomic(path, msgspec.json.encode(record) + b"\n")


def read_sweep(tree: ClusterTree, name: str) -> SweepRecord | None:
    """The record of a sweep that was submitted or run here; ``None`` where there is none."""
    try:
        return decode(read_regular(tree.sweep_path(name)), SweepRecord)
    except (OSError, msgspec.MsgspecError):
        return None
