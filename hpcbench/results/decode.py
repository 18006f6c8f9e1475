"""Decoding of result files that others may have written.

Earlier schema versions are migrated, later ones are refused, and every defect is one kind of error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from hpcbench.results.schema import SCHEMA_VERSION, STATUSES, RunResult

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""From version n to n + 1, on the decoded document. Raising ``SCHEMA_VERSION`` adds one here."""


def migrate_document(document: Any) -> dict[str, Any] | None:
    """``document`` in this version; ``None`` where it is in it already. ``ValueError`` says why that cannot be."""
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


def decode_result(data: bytes, run_id: str) -> RunResult:
    """A result that is about ``run_id`` and that every table can show; earlier schema versions are migrated."""
    result = decode_result_unbounded(data, run_id)
    # Python's integers have no end; arithmetic with floats does.
    for value in (*msgspec.structs.astuple(result.spec), *msgspec.structs.astuple(result.metrics), result.attempt):
        if isinstance(value, int) and not -_INT64_LIMIT <= value < _INT64_LIMIT:
            raise BrokenFileError(f"it holds an integer beyond {_INT64_LIMIT}")
    return result


def decode_result_unbounded(data: bytes, run_id: str) -> RunResult:
    """Decode a result like ``decode_result``, with integers beyond 64 bits."""
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
    """A result of another schema version in this one's words; ``None`` where it says that it is of this one."""
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
