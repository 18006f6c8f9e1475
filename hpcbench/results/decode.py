"""Decoding of result files that others may have written: every defect is one kind of error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpcbench.config.run_spec import run_id
from hpcbench.fileio import UnsafeFileError, read_error, read_regular
from hpcbench.results.schema import SCHEMA_VERSION, STATUSES, RunResult, result_of_document

_T = TypeVar("_T")
_INT64_LIMIT = 2**63
_LAST_DATE_S = 2.0**33
"""A result of the year 2242 has a wrong date."""
_RESULT_DECODER = msgspec.json.Decoder(RunResult)
_DOCUMENT_DECODER = msgspec.json.Decoder(dict[str, Any])


class _Versioned(msgspec.Struct):
    schema_version: Any = SCHEMA_VERSION


_VERSION_DECODER = msgspec.json.Decoder(_Versioned)


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


def why_no_record(path: Path | str, kind: type[object]) -> str:
    """Return the reason why ``read_record`` finds no record in the file ``path``."""
    try:
        decode_record(read_regular(path), kind)
    except OSError as error:
        return str(error.strerror)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return str(error)
    return "it has changed meanwhile"


def decode_result(data: bytes, run_id: str) -> RunResult:
    """Return the result in ``data``, the content of ``result.json``.

    Raises:
        BrokenFileError: it is about another run than ``run_id``, of another schema version, or has an unknown status or
            an integer beyond 64 bits.
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
        if b'"better"' in data:
            result = result_of_document(_decode_guarded(_DOCUMENT_DECODER, data))
        else:
            result = _decode_guarded(_RESULT_DECODER, data)
    except msgspec.ValidationError:
        # Fields of another version may differ: then the version is the reason, and not the first field that does.
        _check_version(_decode_guarded(_VERSION_DECODER, data).schema_version)
        raise
    _check_version(result.schema_version)
    if result.run_id != run_id:
        raise BrokenFileError(f"it is about run {result.run_id[:64]!r}, and lies where that of {run_id!r} should")
    if result.status not in STATUSES:
        raise BrokenFileError(f"unknown status {result.status[:64]!r}: {', '.join(STATUSES)} are known")
    return result


def _check_version(version: Any) -> None:
    if version != SCHEMA_VERSION:
        raise BrokenFileError(f"it has schema_version {version!r:.40}, and this hpcbench reads {SCHEMA_VERSION}")


def _decode_guarded(decoder: msgspec.json.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except RecursionError:
        raise BrokenFileError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BrokenFileError(f"it is not UTF-8: {error.reason} at byte {error.start}") from None


_NEVER_NEGATIVE = (
    "samples_per_s", "timed_s", "epoch_time_s", "compute_s", "comm_s", "exposed_comm_s", "data_s", "flops_per_s", "mfu",
    "peak_memory_bytes", "peak_reserved_bytes", "time_to_first_step_s", "time_to_accuracy_s", "energy_j",
)  # fmt: skip


def date_of(result: RunResult) -> float | None:
    """Return the Unix time (s) that a result states; ``None`` if it states none or one that cannot be."""
    return result.ended_at_s if 0 < (result.ended_at_s or 0) < _LAST_DATE_S else None


def doubts_of(result: RunResult) -> list[str]:
    """Reasons to doubt the figures of a result that a reader finds, as warnings: its writer did not see them."""
    doubts = []
    metrics = result.metrics
    figures: dict[str, float | None] = {name: getattr(metrics, name) for name in _NEVER_NEGATIVE}
    if metrics.step_time_s is not None:
        figures["step_time_s"] = min(msgspec.structs.astuple(metrics.step_time_s))
    if negative := [name for name, value in figures.items() if value is not None and value < 0]:
        doubts.append(f"an impossible result: negative {', '.join(negative)}")
    if (named := run_id(result.spec)) != result.run_id:
        doubts.append(f"the spec is not the one of the run_id: it is that of run {named}, changed after the run")
    return doubts
