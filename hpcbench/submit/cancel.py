"""Stop runs that are waiting, queued or running. What they measured is kept; submit would run them again."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Collection, Iterable, Mapping

import psutil

from hpcbench.config.cluster import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.fileio import printable
from hpcbench.results.store import ClusterTree
from hpcbench.submit.executor import LocalScriptJob
from hpcbench.submit.journal import drop_runs
from hpcbench.submit.scheduler import slurm_environment
from hpcbench.submit.state import ACTIVE, RunState
from hpcbench.submit.tickets import Ticket, find_tickets

_IDS_PER_CALL = 500


def cancel_runs(tree: ClusterTree, states: Mapping[str, RunState], profile: ClusterProfile) -> list[str]:
    """Cancel those of ``states`` that are active and return their ``run_id``s.

    They are struck from their submissions first, so that none is sent or begun meanwhile; then jobs that carry
    nothing else are cancelled, and of jobs that carry more only the run that is under way is stopped.
    Raises ``SubmitError`` where scancel is absent or refuses.
    """
    active = {key for key, state in states.items() if state.state in ACTIVE}
    for folder, run_ids in _by_folder(find_tickets(tree, active)).items():
        drop_runs(tree.submissions / folder, run_ids)
    # Some may have been sent since they were looked at.
    tickets = {key: ticket for key, ticket in find_tickets(tree, active).items() if ticket.job_id}
    whole = {ticket.job_id: ticket for ticket in tickets.values() if ticket.job_id and _is_whole(ticket, active)}
    parts = {
        key: ticket for key, ticket in tickets.items() if ticket.job_id not in whole and states[key].state == "running"
    }
    if profile.scheduler.kind == "local":
        _cancel_local(whole.values(), parts.values())
    else:
        _scancel([], whole, profile)
        # Only the steps of a job are told: its script goes on with the next run.
        _scancel(["--signal=TERM"], [ticket.job_id for ticket in parts.values() if ticket.job_id], profile)
    return sorted(active)


def _by_folder(tickets: Mapping[str, Ticket]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, ticket in tickets.items():
        found.setdefault(ticket.folder.name, []).append(key)
    return found


def _is_whole(ticket: Ticket, active: Collection[str]) -> bool:
    """Whether the job carries only runs that are to be cancelled; those behind it that have ended do not count."""
    first = ticket.index - ticket.index % ticket.array.pack
    rest = ticket.array.run_ids[first : first + ticket.array.pack]
    return all(run_id in active for run_id in rest) or ticket.array.pack == 1


def _cancel_local(whole: Iterable[Ticket], parts: Iterable[Ticket]) -> None:
    for ticket in whole:
        assert ticket.job_id is not None
        LocalScriptJob(folder=ticket.folder / "jobs", job_id=ticket.job_id).cancel(check=False)
    for ticket in parts:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(int(ticket.job_id or 0)).children(recursive=True):
                words = process.cmdline()
                if "hpcbench.worker" in words and _value(words, "--index") == str(ticket.index):
                    process.terminate()


def _value(words: list[str], option: str) -> str | None:
    return words[words.index(option) + 1] if option in words[:-1] else None


def _scancel(options: list[str], job_ids: Iterable[str], profile: ClusterProfile) -> None:
    wanted = list(dict.fromkeys(job_ids))
    for first in range(0, len(wanted), _IDS_PER_CALL):
        command = ["scancel", *options, *wanted[first : first + _IDS_PER_CALL]]
        try:
            done = subprocess.run(
                command, env=slurm_environment(profile), capture_output=True, text=True, timeout=120, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SubmitError(f"scancel: {error}") from error
        # A job that has ended meanwhile is what was wanted.
        if done.returncode != 0 and "already completing or completed" not in done.stderr:
            raise SubmitError(f"scancel refused: {printable(done.stderr.strip())}")
