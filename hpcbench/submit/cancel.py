"""Stop runs that are waiting, queued or running. What they measured is kept; submit would run them again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from hpcbench.config.cluster import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.fileio import printable
from hpcbench.results.store import ClusterTree
from hpcbench.submit.executor import LocalScriptJob
from hpcbench.submit.local_queue import drop_runs
from hpcbench.submit.scheduler import slurm_environment
from hpcbench.submit.state import ACTIVE, RunState

_IDS_PER_CALL = 500


def cancel_runs(tree: ClusterTree, states: dict[str, RunState], profile: ClusterProfile) -> list[str]:
    """Cancel those of ``states`` that are active and return their ``run_id``s.

    Raises ``SubmitError`` where scancel is absent or refuses.
    """
    active = {key: state for key, state in states.items() if state.state in ACTIVE}
    if profile.scheduler.kind == "local":
        _cancel_local(tree, active)
    else:
        _scancel((state.job_id for state in active.values() if state.job_id), profile)
    return list(active)


def _cancel_local(tree: ClusterTree, active: dict[str, RunState]) -> None:
    """Runs that have not begun are struck from their queue first, so that none slips through."""
    for name in {state.submission for state in active.values() if state.submission}:
        folder = tree.submissions / name
        drop_runs(folder, [key for key, state in active.items() if state.submission == name])
    for state in active.values():
        if state.job_id and state.submission:
            LocalScriptJob(folder=_jobs(tree, state.submission), job_id=state.job_id).cancel(check=False)


def _jobs(tree: ClusterTree, submission: str) -> Path:
    return tree.submissions / submission / "jobs"


def _scancel(job_ids: Iterable[str], profile: ClusterProfile) -> None:
    wanted = list(dict.fromkeys(job_ids))
    for first in range(0, len(wanted), _IDS_PER_CALL):
        command = ["scancel", *wanted[first : first + _IDS_PER_CALL]]
        try:
            done = subprocess.run(
                command, env=slurm_environment(profile), capture_output=True, text=True, timeout=120, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SubmitError(f"scancel: {error}") from error
        # A job that has ended meanwhile is what was wanted.
        if done.returncode != 0 and "already completing or completed" not in done.stderr:
            raise SubmitError(f"scancel refused: {printable(done.stderr.strip())}")
