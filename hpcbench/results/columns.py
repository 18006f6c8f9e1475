"""Results as one polars frame: a row per run, a column per scalar, named by its path in ``result.json``.

``spec.strategy``, ``metrics.step_time_s.median``: the columns follow from the records, so a field that is added there
is a column here. Raw step times and per-rank values are in the files alone.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterable, Sequence
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.results.schema import BROKEN, Failure, Metrics, RunResult, Verification

if TYPE_CHECKING:
    import polars

    from hpcbench.results.collect import Collected

RESULT_FIELDS = ("run_id", "config_id", "attempt", "sweep", "cluster", "status", "environment_digest", "warnings")
PROVENANCE = ("hpcbench", "hpcbench_commit", "torch", "submission", "environment_key")
"""What of a result's provenance is in the frame, as text."""
FILE_COLUMNS = ("file.mtime_ns", "file.size_bytes")
"""When ``result.json`` was put in place, and its size: what tells whether it is still the same."""
_RECORDS: dict[str, type[msgspec.Struct]] = {
    "spec": RunSpec, "metrics": Metrics, "verification": Verification, "error": Failure
}  # fmt: skip
JSON = "JSON"
"""Tables and lists are text in the frame: their JSON, nothing where they are empty."""
_TYPES = {bool: "Boolean", int: "Int64", float: "Float64", str: "String", dict: JSON, list: JSON}


class Field(NamedTuple):
    """A field of a record: the frame's type, or the record that it holds."""

    name: str
    dtype: str
    record: type[msgspec.Struct] | None = None


@functools.cache
def fields_of(record: type[msgspec.Struct]) -> tuple[Field, ...]:
    """The fields of ``record`` in their order."""
    hints = typing.get_type_hints(record)
    return tuple(_field(name, hints[name]) for name in record.__struct_fields__)


def _field(name: str, hint: Any) -> Field:
    kinds = [kind for kind in _alternatives(hint) if kind is not type(None)]
    assert len(kinds) == 1, f"{name}: {hint} is not one type"
    (kind,) = kinds
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return Field(name, "", kind)
    return Field(name, _TYPES[kind])


def _alternatives(hint: Any) -> list[Any]:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _alternatives(typing.get_args(hint)[0])
    if origin is typing.Union or isinstance(hint, types.UnionType):
        return [kind for one in typing.get_args(hint) for kind in _alternatives(one)]
    if origin is typing.Literal:
        return list({type(value) for value in typing.get_args(hint)})
    return [origin or hint]


@functools.cache
def schema() -> dict[str, str]:
    """Every column's name and polars type, in order."""
    found = {field.name: field.dtype for field in fields_of(RunResult) if field.name in RESULT_FIELDS}
    for name, record in _RECORDS.items():
        found |= _flat(name, record)
    found |= {f"provenance.{name}": "String" for name in PROVENANCE}
    return found | dict.fromkeys(FILE_COLUMNS, "Int64")


def _flat(name: str, record: type[msgspec.Struct]) -> dict[str, str]:
    found: dict[str, str] = {}
    for field in fields_of(record):
        found |= _flat(f"{name}.{field.name}", field.record) if field.record else {f"{name}.{field.name}": field.dtype}
    return found


def frame_of(results: Sequence[RunResult], files: Sequence[tuple[int, int]] | None = None) -> polars.DataFrame:
    """``results`` as a frame; ``files`` are their modification times (ns) and sizes (bytes), where there are files.

    Raises ``TypeError`` or ``OverflowError`` where a number is beyond 64 bits.
    """
    columns: dict[str, Sequence[Any]] = {}
    for name in RESULT_FIELDS:
        columns[name] = list(map(attrgetter(name), results))
    columns["warnings"] = [as_json(result.warnings) if result.warnings else None for result in results]
    for name, record in _RECORDS.items():
        _add(columns, name, record, list(map(attrgetter(name), results)))
    known = list(map(attrgetter("provenance"), results))
    for name in PROVENANCE:
        values = [one.get(name) for one in known]
        if not set(map(type, values)) <= {str, NoneType}:
            values = [value if isinstance(value, str) else None for value in values]
        columns[f"provenance.{name}"] = values
    for number, name in enumerate(FILE_COLUMNS):
        columns[name] = [one[number] for one in files] if files is not None else [None] * len(results)
    return _frame(columns)


def _add(columns: dict[str, Sequence[Any]], path: str, record: type[msgspec.Struct], values: Sequence[Any]) -> None:
    """The columns of ``record`` below ``path``; ``values`` are records or ``None``."""
    if not any(values):
        # Most runs have no error and were not verified: no need to look at each.
        columns |= dict.fromkeys(_flat(path, record), [None] * len(values))
        return
    fields = fields_of(record)
    blank = (None,) * len(fields)
    astuple = msgspec.structs.astuple
    rows = [blank if value is None else astuple(value) for value in values]
    for field, column in zip(fields, zip(*rows, strict=True) if rows else [()] * len(fields), strict=True):
        name = f"{path}.{field.name}"
        if field.record is not None:
            _add(columns, name, field.record, column)
        elif field.dtype == JSON:
            columns[name] = [as_json(value) if value else None for value in column]
        else:
            columns[name] = column


def as_json(value: Any) -> str:
    """The one text of a table of options."""
    return msgspec.json.encode(value, order="deterministic").decode()


def _frame(columns: dict[str, Sequence[Any]]) -> polars.DataFrame:
    import polars

    return polars.DataFrame(
        [_series(name, columns[name], dtype) for name, dtype in schema().items()],
    )


def _series(name: str, values: Sequence[Any], dtype: str) -> polars.Series:
    import polars

    kind = polars.String if dtype == JSON else getattr(polars, dtype)
    first = values[0] if values else None
    if values and not isinstance(first, int | float) and values.count(first) == len(values):
        # Most parameters stand at one value: a column of it costs nothing.
        return _alike(polars.Series(name, [first], dtype=kind), len(values))
    return polars.Series(name, values, dtype=kind)


def _alike(one: polars.Series, count: int) -> polars.Series:
    """``count`` times the value of ``one``; ``polars.repeat`` starts the whole query engine for it."""
    column: polars.Series = one.new_from_index(0, count)
    return column


def broken_rows(entries: Iterable[Collected], files: Sequence[tuple[int, int]] | None = None) -> polars.DataFrame:
    """Runs whose result cannot be read: status ``broken``, the reason as ``error.message``."""
    given = list(entries)
    columns: dict[str, Sequence[Any]] = dict.fromkeys(schema(), [None] * len(given))
    columns |= {
        "run_id": [entry.run_id for entry in given], "cluster": [entry.cluster for entry in given],
        "status": [BROKEN] * len(given), "error.type": ["BrokenFile"] * len(given),
        "error.message": [entry.problem for entry in given],
    }  # fmt: skip
    for number, name in enumerate(FILE_COLUMNS):
        if files is not None:
            columns[name] = [one[number] for one in files]
    return _frame(columns)


def collected_frame(entries: Iterable[Collected]) -> polars.DataFrame:
    """What was collected, in its order: results and broken files."""
    import polars

    given = list(entries)
    whole = frame_of([entry.result for entry in given if entry.result is not None])
    whole = whole.with_columns(
        # A result lies in the tree of the cluster that it is shown under.
        polars.Series("cluster", [entry.cluster for entry in given if entry.result is not None], dtype=polars.String)
    )
    frame = polars.concat([whole, broken_rows(entry for entry in given if entry.result is None)])
    order = [number for number, entry in enumerate(given) if entry.result is not None]
    order += [number for number, entry in enumerate(given) if entry.result is None]
    return frame.with_columns(polars.Series("_order", order, dtype=polars.Int64)).sort("_order").drop("_order")
