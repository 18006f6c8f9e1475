"""Decoding of result files that others may have written.

Earlier schema versions are migrated, later ones are refused, and every defect is one kind of error. Figures of an
earlier definition are recognised, and recomputed from the files of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpcbench.config.run_spec import run_id
from hpcbench.fileio import UnsafeFileError, read_error, read_regular
from hpcbench.results.schema import SCHEMA_VERSION, STATUSES, RankResult, RunResult

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Functions that turn a decoded document of version n, the key, into one of version n + 1. Whoever raises
``SCHEMA_VERSION`` adds one."""


def migrate_document(document: Any) -> dict[str, Any] | None:
    """``document`` in this version; ``None`` where it has it already. ``ValueError`` where that is impossible."""
    version = document.get("schema_version", SCHEMA_VERSION) if isinstance(document, dict) else SCHEMA_VERSION
    if version == SCHEMA_VERSION:
        return None
    if type(version) is not int or version > SCHEMA_VERSION:
        raise ValueError(
            f"schema_version {version!r:.40}; this hpcbench reads up to {SCHEMA_VERSION}: read it with a newer one"
        )
    while version < SCHEMA_VERSION:
        if version not in MIGRATIONS:
            raise ValueError(f"schema_version {version}, from which nothing leads to {SCHEMA_VERSION}")
        document = MIGRATIONS[version](document)
        version += 1
    return {**document, "schema_version": SCHEMA_VERSION}


_T = TypeVar("_T")
_INT64_LIMIT = 2**63
_RESULT_DECODER = msgspec.json.Decoder(RunResult)


class BrokenFileError(msgspec.ValidationError):
    """A file that is no record of ours; a ``msgspec.MsgspecError`` like all others of its kind."""


def decode_record(data: bytes, kind: type[_T]) -> _T:
    """``data`` as ``kind``; ``msgspec.MsgspecError`` where it is not."""
    return _decode_guarded(msgspec.json.Decoder(kind), data)


def read_record(path: Path | str, kind: type[_T]) -> _T | None:
    """The file ``path`` as ``kind``; ``None`` if it is absent, a link or a pipe, or no such record.

    Raises ``StorageError`` if the file system does not let it be read: that is no sign that it is absent.
    """
    try:
        return decode_record(read_regular(path), kind)
    except (FileNotFoundError, NotADirectoryError, UnsafeFileError, msgspec.MsgspecError):
        return None
    except OSError as error:
        raise read_error(error, Path(path)) from error


def decode_result(data: bytes, run_id: str) -> RunResult:
    """Return the result in ``data``, the content of ``result.json``; earlier schema versions are migrated.

    Raises:
        BrokenFileError: it is about another run than ``run_id``, or has an unknown status or an integer beyond 64 bits.
        msgspec.MsgspecError: it is no result (``BrokenFileError`` is a subclass).
    """
    result = decode_result_unbounded(data, run_id)
    # Python's integers have no end; arithmetic with floats does.
    for value in (*msgspec.structs.astuple(result.spec), *msgspec.structs.astuple(result.metrics), result.attempt):
        if isinstance(value, int) and not -_INT64_LIMIT <= value < _INT64_LIMIT:
            raise BrokenFileError(f"it holds an integer beyond {_INT64_LIMIT}")
    return result


def decode_result_unbounded(data: bytes, run_id: str) -> RunResult:
    """Return the result as ``decode_result`` does, also with integers beyond 64 bits; raises the same other errors."""
    try:
        result = _decode_guarded(_RESULT_DECODER, data)
    except msgspec.ValidationError:
        older = _migrate_result(data)
        if older is None:
            raise
        result = older
    if result.schema_version != SCHEMA_VERSION:
        result = _migrate_result(data) or result
    if result.run_id != run_id:
        raise BrokenFileError(f"it is about run {result.run_id[:64]!r}, and lies where that of {run_id!r} should")
    if result.status not in STATUSES:
        raise BrokenFileError(f"unknown status {result.status[:64]!r}: {', '.join(STATUSES)} are known")
    return result


def _migrate_result(data: bytes) -> RunResult | None:
    """A result of another schema version converted to this one; ``None`` where it already has this version."""
    try:
        document = migrate_document(_decode_guarded(msgspec.json.Decoder(), data))
    except ValueError as error:
        raise BrokenFileError(str(error)) from None
    return None if document is None else msgspec.convert(document, RunResult)


def _decode_guarded(decoder: msgspec.json.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except RecursionError:
        raise BrokenFileError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BrokenFileError(f"it is no UTF-8: {error.reason} at byte {error.start}") from None


OLD_RATE_WARNING = (
    "samples/s by the earlier definition, over the sum of the slowest ranks' steps, which is too low: "
    "run `hpcbench results upgrade`"
)


def has_old_rate(result: RunResult) -> bool:
    """Whether the rates of a run with several ranks are over the sum of the slowest ranks' steps."""
    metrics = result.metrics
    # Of a single rank both definitions are one; without step times the figures are not a worker's.
    is_measured = metrics.samples_per_s is not None and len(result.ranks) > 1 and bool(result.step_times_s)
    return is_measured and metrics.timed_s is None


def upgrade_rates(result: RunResult, ranks: Mapping[int, RankResult]) -> bool:
    """Set the rates of ``result`` over the longest rank's timed interval, in place; whether that was possible.

    ``ranks`` are the files of the attempt that counts. They must be those that the result was computed from: one for
    each rank, with the result's own ``step_times_s``.
    """
    # Imported here: commands that only read results need no statistics.
    from hpcbench.results.timing_statistics import slowest_rank_times_s, straggler_statistics, timed_intervals_s

    metrics, skipped = result.metrics, result.metrics.warmup_found_steps or 0
    if len(ranks) != len(result.ranks) or slowest_rank_times_s(ranks) != result.step_times_s:
        return False
    intervals_s = timed_intervals_s(ranks, skipped)
    timed_s = max(intervals_s.values(), default=0.0)
    if timed_s <= 0 or not metrics.samples_per_s:
        return False
    factor = math.fsum(result.step_times_s[skipped:]) / timed_s
    for name, figure in {"timed_s": timed_s, **straggler_statistics(ranks, skipped)}.items():
        setattr(metrics, name, figure)
    for name in ("samples_per_s", "flops_per_s", "mfu"):
        value = getattr(metrics, name)
        setattr(metrics, name, None if value is None else value * factor)
    if metrics.epoch_time_s is not None:
        metrics.epoch_time_s /= factor
    for entry in result.ranks:
        if entry.get("rank") in intervals_s:
            entry["timed_s"] = intervals_s[entry["rank"]]
    return True


_NEVER_NEGATIVE = (
    "samples_per_s", "timed_s", "epoch_time_s", "compute_s", "comm_s", "exposed_comm_s", "data_s", "flops_per_s", "mfu",
    "peak_memory_bytes", "peak_reserved_bytes", "time_to_first_step_s", "time_to_accuracy_s", "energy_j",
)  # fmt: skip


def doubts_of(result: RunResult) -> list[str]:
    """Reasons to doubt the figures of a result that a reader finds, as warnings: its writer did not see them."""
    doubts = [OLD_RATE_WARNING] if has_old_rate(result) else []
    metrics = result.metrics
    figures: dict[str, float | None] = {name: getattr(metrics, name) for name in _NEVER_NEGATIVE}
    if metrics.step_time_s is not None:
        figures["step_time_s"] = min(msgspec.structs.astuple(metrics.step_time_s))
    if negative := [name for name, value in figures.items() if value is not None and value < 0]:
        doubts.append(f"an impossible result: negative {', '.join(negative)}")
    if (named := run_id(result.spec)) != result.run_id:
        # An anonymous bundle replaces names within parameters, too.
        doubts.append(f"the spec is not the one of the run_id: it is that of run {named}, changed after the run")
    return doubts
