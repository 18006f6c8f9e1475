"""JSON that somebody else may have written, as our records: whatever is wrong with it is one kind of error."""

from __future__ import annotations

import functools
from typing import TypeVar

import msgspec

from hpcbench.results.migrate import migrated
from hpcbench.results.schema import SCHEMA_VERSION, STATUSES, RunResult

_T = TypeVar("_T")
_LARGEST = 2**63


class BrokenFile(msgspec.ValidationError):
    """A file that is no record of ours; a ``msgspec.MsgspecError`` like all others of its kind."""


def decode(data: bytes, kind: type[_T]) -> _T:
    """``data`` as ``kind``; ``msgspec.MsgspecError`` where it is not."""
    return _guarded(msgspec.json.Decoder(kind), data)


def decode_result(data: bytes, run_id: str) -> RunResult:
    """A result that is about ``run_id`` and that every table can show; earlier schema versions are migrated."""
    result = decode_bulk(data, run_id)
    # Python's integers have no end; arithmetic with floats does.
    for value in (*msgspec.structs.astuple(result.spec), *msgspec.structs.astuple(result.metrics), result.attempt):
        if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            raise BrokenFile(f"it holds an integer beyond {_LARGEST}")
    return result


def decode_bulk(data: bytes, run_id: str) -> RunResult:
    """As ``decode_result``, for a reader who meets integers beyond 64 bits by other means."""
    try:
        result = _guarded(_result_decoder(), data)
    except msgspec.ValidationError:
        older = _migrated(data)
        if older is None:
            raise
        result = older
    if result.schema_version != SCHEMA_VERSION:
        result = _migrated(data) or result
    if result.run_id != run_id:
        raise BrokenFile(f"it is about run {result.run_id[:64]!r}, and lies where that of {run_id!r} should")
    if result.status not in STATUSES:
        raise BrokenFile(f"unknown status {result.status[:64]!r}: {', '.join(STATUSES)} are known")
    return result


def _migrated(data: bytes) -> RunResult | None:
    """A result of another schema version in this one's words; ``None`` where it says that it is of this one."""
    try:
        document = migrated(_guarded(msgspec.json.Decoder(), data))
    except ValueError as error:
        raise BrokenFile(str(error)) from None
    return None if document is None else msgspec.convert(document, RunResult)


@functools.cache
def _result_decoder() -> msgspec.json.Decoder[RunResult]:
    return msgspec.json.Decoder(RunResult)


def _guarded(decoder: msgspec.json.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except RecursionError:
        raise BrokenFile("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BrokenFile(f"it is no UTF-8: {error.reason} at byte {error.start}") from None
