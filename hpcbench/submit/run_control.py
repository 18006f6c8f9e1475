"""Cancellation of runs, and waiting for their end.

Cancelled runs keep their measurements; ``submit`` runs them again."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import psutil

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.fileio import printable_text
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.journal import drop_runs
from hpcbench.submit.run_state import ACTIVE_STATES, RunState, SubmittedRun, find_submitted_runs
from hpcbench.submit.sbatch import LocalScriptJob
from hpcbench.submit.slurm_queue import slurm_environment
from hpcbench.submit.submit import send_unsent
from hpcbench.submit.watcher import SweepWatcher

_SCANCEL_IDS_PER_CALL = 500


def cancel_runs(tree: ClusterTree, states: Mapping[str, RunState], profile: ClusterProfile) -> list[str]:
    """Cancel those of ``states`` that are active and return their ``run_id``s.

    They are struck from their submissions first, so that none is sent or begun meanwhile; then jobs that carry
    nothing else are cancelled, and of jobs that carry more only the run that is under way is stopped.
    Raises ``SubmitError`` where scancel is absent or refuses.
    """
    active = {key for key, state in states.items() if state.state in ACTIVE_STATES}
    for folder, run_ids in _group_by_submission(find_submitted_runs(tree, active)).items():
        drop_runs(tree.submissions / folder, run_ids)
    # Some may have been sent since they were looked at.
    tickets = {key: ticket for key, ticket in find_submitted_runs(tree, active).items() if ticket.job_id}
    whole = {
        ticket.job_id: ticket for ticket in tickets.values() if ticket.job_id and _cancels_whole_job(ticket, active)
    }
    parts = {
        key: ticket for key, ticket in tickets.items() if ticket.job_id not in whole and states[key].state == "running"
    }
    if profile.scheduler.kind == "local":
        _cancel_local_jobs(whole.values(), parts.values())
    else:
        _run_scancel([], whole, profile)
        # Only the steps of a job are told: its script goes on with the next run.
        _run_scancel(["--signal=TERM"], [ticket.job_id for ticket in parts.values() if ticket.job_id], profile)
    return sorted(active)


def _group_by_submission(tickets: Mapping[str, SubmittedRun]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, ticket in tickets.items():
        found.setdefault(ticket.folder.name, []).append(key)
    return found


def _cancels_whole_job(ticket: SubmittedRun, active: Collection[str]) -> bool:
    """Whether the job carries only runs that are to be cancelled; those behind it that have ended do not count."""
    first = ticket.index - ticket.index % ticket.array.pack
    rest = ticket.array.run_ids[first : first + ticket.array.pack]
    return all(run_id in active for run_id in rest) or ticket.array.pack == 1


def _cancel_local_jobs(whole: Iterable[SubmittedRun], parts: Iterable[SubmittedRun]) -> None:
    for ticket in whole:
        assert ticket.job_id is not None
        LocalScriptJob(folder=ticket.folder / "jobs", job_id=ticket.job_id).cancel(check=False)
    for ticket in parts:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(int(ticket.job_id or 0)).children(recursive=True):
                words = process.cmdline()
                if "hpcbench.worker" in words and _option_value(words, "--index") == str(ticket.index):
                    process.terminate()


def _option_value(words: list[str], option: str) -> str | None:
    return words[words.index(option) + 1] if option in words[:-1] else None


def _run_scancel(options: list[str], job_ids: Iterable[str], profile: ClusterProfile) -> None:
    wanted = list(dict.fromkeys(job_ids))
    for first in range(0, len(wanted), _SCANCEL_IDS_PER_CALL):
        command = ["scancel", *options, *wanted[first : first + _SCANCEL_IDS_PER_CALL]]
        try:
            done = subprocess.run(
                command, env=slurm_environment(profile), capture_output=True, text=True, timeout=120, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SubmitError(f"scancel: {error}") from error
        # A job that has ended meanwhile is what was wanted.
        if done.returncode != 0 and "already completing or completed" not in done.stderr:
            raise SubmitError(f"scancel refused: {printable_text(done.stderr.strip())}")


SCHEDULER_POLL_S = {"local": 1.0, "slurm": 10.0}
_RESULT_POLL_S = 0.5
_PAUSE_FACTOR = 9.0
_MAX_PAUSE_S = 120.0


def poll_pause_s(every_s: float, took_s: float) -> float:
    """The pause after a look that took ``took_s``: a file system or scheduler that is slow is asked less often.

    Looks take at most a tenth of the time, as long as that means no pause of more than two minutes.
    """
    return max(every_s, min(_PAUSE_FACTOR * took_s, _MAX_PAUSE_S))


def wait_for_runs(
    watcher: SweepWatcher, profile: ClusterProfile, tell: Callable[[dict[str, RunState]], None]
) -> dict[str, RunState]:
    """Block until no run is waiting, pending or running; ``tell`` is called with every new look.

    Results are looked for often, because that costs little; the scheduler is asked rarely. What a submission could not
    send yet is offered again whenever the scheduler is asked. Raises ``SubmitError`` where that is refused.
    """
    began_s = time.monotonic()
    states = watcher.ask()
    asked_s, looked_s = time.monotonic(), 0.0
    ask_again_s = asked_s + poll_pause_s(SCHEDULER_POLL_S[profile.scheduler.kind], asked_s - began_s)
    tell(states)
    while any(state.state in ACTIVE_STATES for state in states.values()):
        time.sleep(poll_pause_s(_RESULT_POLL_S, looked_s))
        began_s = time.monotonic()
        if began_s >= ask_again_s:
            if any(state.state == "waiting" for state in states.values()):
                refused = send_unsent(watcher.tree, list(states), profile).refused
                if refused:
                    raise refused[0]
            states = watcher.ask()
            asked_s = time.monotonic()
            ask_again_s = asked_s + poll_pause_s(SCHEDULER_POLL_S[profile.scheduler.kind], asked_s - began_s)
        else:
            states = watcher.look(states)
            looked_s = time.monotonic() - began_s
        tell(states)
    return states
