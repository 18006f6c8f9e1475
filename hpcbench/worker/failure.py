"""Failures: from an exception to its record, and from the ranks' files to the status of the run.

This module does not import torch: exceptions are recognised by type name and message."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from hpcbench.errors import WorkerError
from hpcbench.fileio import printable_text
from hpcbench.results.schema import STATUS_OK, FailureRecord, RankResult, ReferenceComparison
from hpcbench.worker.measure.host import describe_own_job_memory, oom_kills

_TAIL_CHARACTERS = 4000

OOM_HINT = "a smaller batch_size or more micro_batches need less memory"

_OUT_OF_MEMORY_MESSAGE = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|std::bad_alloc", re.IGNORECASE
)
# What a rank sees of another one's end: never the cause, always a consequence.
_PEER_LOST_MESSAGE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket (closed|timeout)"
    r"|timed out|timeout|no longer reachable|connectFullMesh|failed to (recv|send), got|wait timeout"
    r"|Horovod has been shut down",
    re.IGNORECASE,
)
_NO_COMPILER_MESSAGE = re.compile(r"No working C\+\+ compiler|working triton|Failed to find C compiler", re.IGNORECASE)
_SHARED_GPU_MESSAGE = re.compile(r"Duplicate GPU detected")
"""NCCL's, for two ranks on one GPU or on MIG instances of one (its issue 418)."""
LOADER_HINT = (
    "a process that reads samples ended: killed for the job's memory, or with /dev/shm full, which holds the batches "
    "(df -h /dev/shm on the node; a container may need --shm-size); a smaller batch_size needs less of both"
)
_LOADER_MESSAGE = re.compile(r"DataLoader worker|shared memory|torch_shm|file </torch_")
_PEER_LOST_TYPES = {"DistNetworkError", "DistBackendError", "DistStoreError", "PeerEnded"}
_POSSIBLY_PEER_LOST_TYPES = {"RuntimeError", "OSError", "TimeoutError", "ConnectionError", "ConnectionResetError",
                     "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError",
                     "HorovodInternalError"}  # fmt: skip

_PACKAGE_OF_MODULE = {
    "torch": "torch", "torchvision": "torchvision", "sklearn": "scikit-learn", "numpy": "numpy", "psutil": "psutil",
    "h5py": "h5py", "PIL": "pillow",
}  # fmt: skip


def describe_error(error: BaseException) -> tuple[str, FailureRecord]:
    """The status of a run that ``error`` ended, and the record of it."""
    hint = error.hint if isinstance(error, WorkerError) else None
    status = "failed"
    if isinstance(error, WorkerError):
        status = error.status
    elif is_out_of_memory(error):
        status, hint = "oom", OOM_HINT
    elif isinstance(error, ModuleNotFoundError) and error.name:
        status, hint = "unsupported", install_hint(error.name)
    message = error.message if isinstance(error, WorkerError) else str(error)
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")) and status == "failed":
        hint = "compile = false measures the model as it is written; the traceback holds the compiler's words"
        if _NO_COMPILER_MESSAGE.search(message):
            status = "unsupported"
            hint = "compile = true needs a C++ compiler on the nodes (on GPUs triton too); set CXX to it"
        message = _first_lines(message)
    if _SHARED_GPU_MESSAGE.search(message):
        hint = "NCCL takes one rank per GPU, and MIG instances of one GPU are one: give each rank a GPU of its own"
    if _LOADER_MESSAGE.search(message) and status == "failed":
        hint = hint or LOADER_HINT
    if status == "oom" and "CUDA" not in message:
        # The framework says itself what an accelerator has.
        message = f"{message or type(error).__name__} ({describe_own_job_memory()})"
    text = getattr(error, "log_tail", "") or "".join(traceback.format_exception(error))
    tail = printable_text(text[-_TAIL_CHARACTERS:])
    message = printable_text(message)
    return status, FailureRecord(type=type(error).__name__, message=message, hint=hint, traceback_tail=tail)


def _first_lines(message: str) -> str:
    """Return the first line, with the next where it only announces that."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [message]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def install_hint(module: str) -> str:
    """The command that mends a missing module."""
    name = module.partition(".")[0]
    if name == "fairscale":
        # Its dependencies would change nothing but versions; the release is the one that is tested.
        return "python -m pip install --no-deps fairscale==0.4.13"
    if name == "horovod":
        # It has no wheels, and its source does not build against today's torch as it stands.
        return f"{sys.executable} -m hpcbench.tools.build_horovod (in a checkout: make horovod)"
    return f"python -m pip install {_PACKAGE_OF_MODULE.get(name, name)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or the device had no more memory to give."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_OUT_OF_MEMORY_MESSAGE.search(str(error)))


def is_peer_lost(error: BaseException) -> bool:
    """Whether ``error`` only reports that another rank is gone or late."""
    if isinstance(error, WorkerError) or is_out_of_memory(error):
        return False
    if isinstance(error, RuntimeError | OSError) or type(error).__name__ in _PEER_LOST_TYPES:
        return is_peer_lost_message(type(error).__name__, str(error))
    return False


def is_peer_lost_message(kind: str, message: str) -> bool:
    """Return ``is_peer_lost`` for the recorded type and message of an exception."""
    if _SHARED_GPU_MESSAGE.search(message):
        return False
    return kind in _PEER_LOST_TYPES or (kind in _POSSIBLY_PEER_LOST_TYPES and bool(_PEER_LOST_MESSAGE.search(message)))


STOPPED_STATUSES = frozenset({"timeout", "cancelled", "preempted"})
"""Statuses of ranks that received a signal to end."""


class RunOutcome(NamedTuple):
    """The run's status and, unless it is ok, why."""

    status: str
    error: FailureRecord | None


class FailureCause(msgspec.Struct):
    """The cause for which a launch ends early, announced by the first rank with a failure of its own."""

    rank: int
    host: str
    status: str
    failure: FailureRecord


def decide_outcome(
    world_size: int, ranks: Mapping[int, RankResult], *, cause: FailureCause | None, only_follows: bool, launcher: str,
    oom_kills_before: int | None, log: str = "",
) -> RunOutcome:  # fmt: skip
    """Decide from the ranks' files, rank 0's among them; ``log`` is the end of the launch's err.log.

    ``only_follows``: rank 0's own error only reports that another rank is gone. When torchrun loses a rank, it sends
    SIGTERM to the others. If one rank left no file, a SIGTERM on another one is therefore no cancellation.
    """
    vanished = [rank for rank in range(world_size) if rank not in ranks]
    if cause is not None and not (cause.status == "cancelled" and vanished and launcher == "torchrun"):
        if world_size > 1 and cause.status not in STOPPED_STATUSES:
            return RunOutcome(cause.status, located_failure(cause.failure, cause.rank, cause.host))
        return RunOutcome(cause.status, cause.failure)
    if vanished and was_oom_killed(oom_kills_before):
        why = f"the kernel killed a process of this job for its memory: {describe_own_job_memory()}"
        return RunOutcome("oom", lost_ranks_failure(vanished, ranks, why, log, job_nodes()))
    if vanished:
        why = "killed, or ended by something outside python"
        return RunOutcome("failed", lost_ranks_failure(vanished, ranks, why, log, job_nodes()))
    if all(result.status == STATUS_OK for result in ranks.values()):
        return _verification_outcome(ranks)
    # No rank announced a cause: prefer the lowest rank that failed by itself to those that only followed.
    failed = [rank for rank in sorted(ranks) if ranks[rank].status != STATUS_OK]
    if only_follows:
        failed = [rank for rank in failed if rank != 0] or failed
    first = ranks[failed[0]]
    if first.error is None or len(ranks) == 1:
        return RunOutcome(first.status, first.error)
    return RunOutcome(first.status, located_failure(first.error, first.rank, first.host))


def _verification_outcome(ranks: Mapping[int, RankResult]) -> RunOutcome:
    """A run that computes something else than its reference has failed, whatever its figures."""
    verification = next((result.verification for result in ranks.values() if result.verification is not None), None)
    if verification is None or verification.passed:
        return RunOutcome(STATUS_OK, None)
    own, worst = verification.own_precision, verification.worst_rel
    exact = worst is not None and worst <= (verification.worst_tolerance or 0.0)
    wrong: ReferenceComparison = own if own is not None and not own.passed and exact else verification
    much = "is missing, or not finite" if wrong.worst_rel is None else f"differs by {wrong.worst_rel:.1e}"
    error = FailureRecord(
        type="VerificationFailed",
        message=f"compared with its reference in {wrong.precision}, the {wrong.worst} {much}; "
        f"allowed: {wrong.worst_tolerance:.1e}",
        hint="this strategy with these options does not train this model as one device does; the figures are kept, but "
        "they are of something else (docs/verification.md)",
    )
    return RunOutcome("failed", error)


def was_oom_killed(before: int | None) -> bool:
    """Whether the memory group's count of kills has risen since the attempt began."""
    now = oom_kills()
    return before is not None and now is not None and now > before


def located_failure(failure: FailureRecord, rank: int, host: str) -> FailureRecord:
    """Return ``failure`` with the rank and the host in its message."""
    return msgspec.structs.replace(failure, message=f"rank {rank} on {host}: {failure.message}")


_LAUNCHER_NOISE = re.compile(
    r"^(srun: |slurmstepd|=+$|-+$|\*+$|Root Cause|Failures:|<NO_OTHER_FAILURES>|.*torch[./]distributed[./]elastic|"
    r"(traceback|exitcode|time|host|rank|error_file) *:)"
)
_ERROR_WORDS = re.compile(r"Error\b|Exception\b|error:|Killed|cannot |No such|not found|denied|fault")
_MISSING_MODULE = re.compile(r"No module named '?([\w.]+)'?")


def last_error_line(log: str) -> str:
    """The last line of a log that states an error and is not the launcher's own; else the last line; empty if none."""
    # srun --label puts the rank before each line.
    lines = [re.sub(r"^\d+: ", "", line.strip()) for line in log.splitlines()]
    lines = [line for line in lines if line]
    of_ranks = [line for line in lines if not _LAUNCHER_NOISE.search(line)]
    errors = [line for line in of_ranks if _ERROR_WORDS.search(line)]
    return (errors or of_ranks or lines or [""])[-1]


def job_nodes() -> str | None:
    """The nodes of this job in the scheduler's notation; ``None`` without a scheduler."""
    return os.environ.get("SLURM_JOB_NODELIST")


def missing_torch_failure(log: str, host: str) -> FailureRecord | None:
    """Return the failure of ranks that a launcher could not start because the interpreter has no torch.

    It is equal to that of a rank without a launcher. ``None`` if ``log`` ends with another error.
    """
    match = _MISSING_MODULE.search(last_error_line(log))
    if match is None or match[1].partition(".")[0] != "torch":
        return None
    return FailureRecord(
        type="WorkerError",
        message=f"{sys.executable} on {host} cannot import torch: {match[0]}",
        hint=f"install it into the profile's environment: {install_hint('torch')}",
        traceback_tail=log,
    )


def lost_ranks_failure(
    vanished: list[int], ranks: Mapping[int, RankResult], why: str, log: str = "", nodes: str | None = None
) -> FailureRecord:
    """The record of ranks that ended without a word; ``log`` stands in where no other rank saw anything.

    ``nodes``: of the job, in the scheduler's notation.
    """
    seen = next((rank for rank in sorted(ranks) if ranks[rank].error is not None), None)
    error = ranks[seen].error if seen is not None else None
    message = f"rank{'s' * (len(vanished) > 1)} {join_numbers(vanished)} ended without leaving a file ({why})"
    if error is not None:
        message += f"; rank {seen} saw: {error.message}"
    elif ranks:
        message += f"; ranks that left one: {join_numbers(sorted(ranks))}"
    hint = OOM_HINT if "memory" in why else "the attempt's err.log may hold more"
    if "SIGKILL" in why and "memory" not in why:
        hint = f"killed from outside, perhaps for its memory; {hint}"
    if line := last_error_line(log):
        message += f"; err.log: {line}"
    if nodes:
        message += f"; on {nodes}"
    return FailureRecord(
        type="RankLost",
        message=message,
        hint=hint,
        traceback_tail=log or (error.traceback_tail if error else None),
        nodes=nodes,
    )


def join_numbers(numbers: list[int]) -> str:
    """``0, 1, 5 and 9 more``."""
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
