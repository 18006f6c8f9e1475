"""What a run's result says when not every rank says ok: the first cause counts, not what followed from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from hpcbench.results.schema import OK, Comparison, Failure, RankResult
from hpcbench.worker.asked import memory_here
from hpcbench.worker.cgroup import oom_kills
from hpcbench.worker.failure import OOM_HINT

STOPPED = frozenset({"timeout", "cancelled", "preempted"})
"""Statuses of ranks that were told to end."""


class Verdict(NamedTuple):
    """The run's status and, unless it is ok, why."""

    status: str
    error: Failure | None


class KnownCause(Protocol):
    """What a rank told the others before it ended (``link.Cause``)."""

    rank: int
    host: str
    status: str
    type: str
    message: str
    hint: str | None
    traceback_tail: str | None


def judge(
    world_size: int,
    ranks: Mapping[int, RankResult],
    *,
    cause: KnownCause | None,
    only_follows: bool,
    launcher: str,
    oom_kills_before: int | None,
) -> Verdict:
    """Decide from the ranks' files, rank 0's among them.

    ``only_follows``: rank 0's own error merely says that another rank is gone. A launcher that lost a rank ends the
    others with a TERM, so under torchrun a TERM together with a rank that left nothing is that rank's failure, not a
    cancellation.
    """
    vanished = [rank for rank in range(world_size) if rank not in ranks]
    if cause is not None and not (cause.status == "cancelled" and vanished and launcher == "torchrun"):
        return Verdict(cause.status, _named(cause, world_size))
    if vanished and killed_for_memory(oom_kills_before):
        return Verdict(
            "oom", lost(vanished, ranks, f"the kernel killed a process of this job for its memory: {memory_here()}")
        )
    if vanished:
        return Verdict("failed", lost(vanished, ranks, "killed, or ended by something outside python"))
    if all(one.status == OK for one in ranks.values()):
        return _of_verification(ranks)
    return _first_failure(ranks, only_follows)


def _of_verification(ranks: Mapping[int, RankResult]) -> Verdict:
    """A run that computes something else than its reference has failed, whatever its figures."""
    found = next((one.verification for one in ranks.values() if one.verification is not None), None)
    if found is None or found.passed:
        return Verdict(OK, None)
    own = found.own_precision
    exact = found.worst_rel is not None and found.worst_rel <= (found.worst_tolerance or 0.0)
    wrong: Comparison = own if own is not None and not own.passed and exact else found
    much = "is missing, or not finite" if wrong.worst_rel is None else f"differs by {wrong.worst_rel:.1e}"
    return Verdict(
        "failed",
        Failure(
            type="VerificationFailed",
            message=f"compared with its reference in {wrong.precision}, the {wrong.worst} {much}; "
            f"allowed: {wrong.worst_tolerance:.1e}",
            hint="this strategy with these options does not train this model as one device does; the figures are "
            "kept, but they are of something else (docs/verification.md)",
        ),
    )


def killed_for_memory(before: int | None) -> bool:
    """Whether the memory group's count of kills has risen since the attempt began."""
    now = oom_kills()
    return before is not None and now is not None and now > before


def _named(cause: KnownCause, world_size: int) -> Failure:
    where = f"rank {cause.rank} on {cause.host}: " if world_size > 1 and cause.status not in STOPPED else ""
    return Failure(type=cause.type, message=where + cause.message, hint=cause.hint, traceback_tail=cause.traceback_tail)


def _first_failure(ranks: Mapping[int, RankResult], only_follows: bool) -> Verdict:
    """Where no rank told a cause: the lowest rank that failed by itself, before those that only followed."""
    failed = [rank for rank in sorted(ranks) if ranks[rank].status != OK]
    if only_follows:
        failed = [rank for rank in failed if rank != 0] or failed
    rank = failed[0]
    error = ranks[rank].error
    if error is None or len(ranks) == 1:
        return Verdict(ranks[rank].status, error)
    return Verdict(
        ranks[rank].status,
        Failure(
            type=error.type,
            message=f"rank {rank} on {ranks[rank].host}: {error.message}",
            hint=error.hint,
            traceback_tail=error.traceback_tail,
        ),
    )


def lost(vanished: list[int], ranks: Mapping[int, RankResult], why: str, log: str = "") -> Failure:
    """The record of ranks that ended without a word; ``log`` stands in where no other rank saw anything."""
    seen = next((rank for rank in sorted(ranks) if ranks[rank].error is not None), None)
    error = ranks[seen].error if seen is not None else None
    message = f"rank{'s' * (len(vanished) > 1)} {listed(vanished)} ended without leaving a file ({why})"
    if error is not None:
        message += f"; rank {seen} saw: {error.message}"
    elif ranks:
        message += f"; ranks that left one: {listed(sorted(ranks))}"
    return Failure(
        type="RankLost",
        message=message,
        hint=OOM_HINT if "memory" in why else "the attempt's err.log may hold more",
        traceback_tail=log or (error.traceback_tail if error else None),
    )


def listed(numbers: list[int]) -> str:
    """``0, 1, 5 and 9 more``."""
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
