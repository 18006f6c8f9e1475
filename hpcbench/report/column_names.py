"""Short names of result columns (`strategy` for `spec.strategy`) and conditions over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from hpcbench.config.expression import Expression
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.results.frame import JSON_TEXT, column_types

if TYPE_CHECKING:
    import polars

DERIVED_COLUMNS: dict[str, tuple[str, ...]] = {
    "ranks": ("spec.nodes", "spec.tasks_per_node"),
    "devices": ("spec.nodes", "spec.tasks_per_node", "spec.devices_per_task"),
    "global_batch_size": ("spec.batch_size", "spec.dp_degree"),
}
"""Products of parameters that have a name."""
COMPUTED_COLUMNS = ("speedup", "efficiency")
"""Figures of a table, against its baseline."""
PREDICTED_COLUMNS = (
    "predicted_step_time_s", "predicted_samples_per_s", "predicted_compute_s", "predicted_exposed_comm_s",
    "predicted_peak_memory_bytes", "prediction_error",
)  # fmt: skip
"""Figures of the oracle, for the runs of the table; the error is (predicted - measured) / measured step time."""
_PREFIXES = ("", "spec.", "metrics.", "provenance.")


def resolve_column(name: str) -> str:
    """The column that ``name`` means; ``ConfigError`` with the nearest where there is none."""
    known = column_types()
    if name in DERIVED_COLUMNS or name in COMPUTED_COLUMNS or name in PREDICTED_COLUMNS:
        return name
    for prefix in _PREFIXES:
        for ending in ("", ".median"):
            if f"{prefix}{name}{ending}" in known:
                return f"{prefix}{name}{ending}"
    if split_option_column(f"spec.{name.removeprefix('spec.')}"):
        return f"spec.{name.removeprefix('spec.')}"
    raise ConfigError(f"no column {name!r}", hint=did_you_mean(name, column_choices()))


def split_option_column(column: str) -> tuple[str, str] | None:
    """``spec.options.bucket_mb -> (spec.options, bucket_mb)``; ``None`` for what is no entry of a table of options."""
    _, _, name = column.partition("spec.")
    table, _, key = name.partition(".")
    return (f"spec.{table}", key) if key and column_types().get(f"spec.{table}") == JSON_TEXT else None


def column_choices() -> list[str]:
    """What can be asked for, without prefixes."""
    return [
        *DERIVED_COLUMNS,
        *COMPUTED_COLUMNS,
        *PREDICTED_COLUMNS,
        *(short_name(name) for name in column_types() if not name.startswith("file.")),
    ]


def short_name(column: str) -> str:
    """``spec.strategy -> strategy``, ``metrics.step_time_s.median -> step_time_s``."""
    for prefix in ("spec.", "metrics."):
        if column.startswith(prefix):
            return column.removeprefix(prefix).removesuffix(".median")
    return column


def source_columns(columns: Iterable[str]) -> list[str]:
    """The columns of the frame that ``columns`` are made from."""
    found: dict[str, None] = {}
    for column in columns:
        option = split_option_column(column)
        if option:
            found[option[0]] = None
        elif column not in COMPUTED_COLUMNS and column not in PREDICTED_COLUMNS:
            found |= dict.fromkeys(DERIVED_COLUMNS.get(column, (column,)))
    return list(found)


def with_option_column(frame: polars.DataFrame, column: str) -> polars.DataFrame:
    """``frame`` with an entry of a table of options as a column.

    What is a number in one run and a word in another is text in all.
    """
    import polars

    option = split_option_column(column)
    assert option is not None, f"{column} is no option"
    table, key = option
    texts = frame[table].unique().drop_nulls().to_list()
    values = _to_common_type([msgspec.json.decode(text).get(key) for text in texts])
    found = polars.DataFrame({table: texts, column: values}, schema_overrides={table: polars.String}, strict=False)
    return frame.join(found, on=table, how="left", maintain_order="left")


def _to_common_type(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1 and not kinds <= {int, float}:
        return [None if value is None else str(value) for value in values]
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    return values


def with_derived_columns(frame: polars.DataFrame) -> polars.DataFrame:
    """``frame`` with the named products whose parameters it has."""
    import polars

    products = [
        polars.fold(polars.lit(1), lambda one, other: one * other, [polars.col(part) for part in parts]).alias(name)
        for name, parts in DERIVED_COLUMNS.items()
        if set(parts) <= set(frame.columns)
    ]
    return frame.with_columns(products)


class Condition:
    """An expression over the columns of a frame, in the language of sweeps."""

    def __init__(self, text: str, where: str) -> None:
        """Raises ``ConfigError`` where ``text`` is no expression, or names no column or what tables make of runs."""
        self.expression = Expression(text, where=where)
        self._columns = {name: self._column(name) for name in sorted(self.expression.names)}

    @property
    def columns(self) -> list[str]:
        """The columns of a results frame that it reads."""
        return source_columns(self._columns.values())

    @property
    def reads_figures(self) -> bool:
        """Whether it asks for what was measured."""
        return any(column.startswith("metrics.") for column in self._columns.values())

    def _column(self, name: str) -> str:
        try:
            column = resolve_column(name)
            if column in COMPUTED_COLUMNS or column in PREDICTED_COLUMNS:
                # A speed-up has a baseline, which may be among the runs that would be left out.
                raise ConfigError(
                    f"{name} is made of the runs that are chosen", hint="choose by what was run or measured, as devices"
                )
            return column
        except ConfigError as error:
            raise ConfigError(
                f"{self.expression.text!r:.120}: {error.message}", where=self.expression.where, hint=error.hint
            ) from None

    def mask(self, frame: polars.DataFrame) -> polars.Series:
        """Of every row whether it holds. Each combination of values is looked at once.

        Where a figure is missing that it needs, it does not hold.
        """
        import polars

        columns = list(dict.fromkeys(_source_column(name) for name in self._columns.values()))
        if not columns:
            return polars.Series("holds", [self.expression.holds({})] * len(frame), dtype=polars.Boolean)
        given = with_derived_columns(frame).select(columns)
        unique = given.unique()
        holds = [self._holds(row) for row in unique.iter_rows(named=True)]
        marked = unique.with_columns(polars.Series("holds", holds, dtype=polars.Boolean))
        return given.join(marked, on=columns, how="left", nulls_equal=True, maintain_order="left")["holds"]

    def _holds(self, row: dict[str, Any]) -> bool:
        values = {name: _column_value(column, row) for name, column in self._columns.items()}
        try:
            return self.expression.holds(values)
        except ConfigError:
            if None in values.values():
                return False
            raise


def _source_column(column: str) -> str:
    option = split_option_column(column)
    return option[0] if option else column


def _column_value(column: str, row: dict[str, Any]) -> Any:
    option = split_option_column(column)
    if option is None:
        return row[column]
    table, key = option
    return msgspec.json.decode(row[table]).get(key) if row[table] else None
