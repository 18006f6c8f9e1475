"""Short names of result columns (`strategy` for `spec.strategy`) and conditions over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import polars as pl

from hpcbench.config.expression import Expression
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.report.table_model import short_name
from hpcbench.results.frame import JSON_TEXT, column_types

DERIVED_COLUMNS: dict[str, tuple[str, ...]] = {
    "ranks": ("spec.nodes", "spec.tasks_per_node"),
    "devices": ("spec.nodes", "spec.tasks_per_node", "spec.devices_per_task"),
    "global_batch_size": ("spec.batch_size", "spec.dp_degree"),
}
"""Products of parameters with a name of their own."""
COMPUTED_COLUMNS = ("speedup", "efficiency")
"""Figures of a table relative to its baseline."""
PREDICTED_COLUMNS = (
    "predicted_step_time_s", "predicted_samples_per_s", "predicted_compute_s", "predicted_exposed_comm_s",
    "predicted_peak_memory_bytes", "prediction_error",
)  # fmt: skip
"""Figures of the oracle, for the runs of the table; the error is (predicted - measured) / measured step time."""
OWN_METRICS = "metrics.own"
"""The metrics of commands by name, in JSON."""
_PREFIXES = ("", "spec.", "metrics.", "provenance.")


def resolve_column(name: str) -> str:
    """Return the column of a short or full ``name``; ``ConfigError`` with the nearest if there is none."""
    columns = column_types()
    if name in DERIVED_COLUMNS or is_computed(name):
        return name
    for prefix in _PREFIXES:
        for ending in ("", ".median"):
            if f"{prefix}{name}{ending}" in columns:
                return f"{prefix}{name}{ending}"
    option = f"spec.{name.removeprefix('spec.')}"
    if split_option_column(option):
        return option
    own = f"metrics.{name.removeprefix('metrics.')}"
    if own_metric_name(own):
        return own
    raise ConfigError(f"no column {name!r}", hint=did_you_mean(name, column_choices()))


def is_computed(column: str) -> bool:
    """Whether ``column`` is computed for the rows of a table: speed-ups and predictions."""
    return column in COMPUTED_COLUMNS or column in PREDICTED_COLUMNS


def split_option_column(column: str) -> tuple[str, str] | None:
    """``spec.options.bucket_mb -> (spec.options, bucket_mb)``; ``None`` for any other column."""
    _, _, name = column.partition("spec.")
    table, _, key = name.partition(".")
    return (f"spec.{table}", key) if key and column_types().get(f"spec.{table}") == JSON_TEXT else None


def own_metric_name(column: str) -> str | None:
    """``metrics.own.loss -> loss``; ``None`` for a column that is no metric of a command."""
    name = column.removeprefix(f"{OWN_METRICS}.")
    return name if name != column and name.isidentifier() else None


def with_own_metrics(frame: pl.DataFrame, columns: Iterable[str]) -> pl.DataFrame:
    """Return ``frame``, whose rows are launches, with those of ``columns`` that are metrics of commands.

    Raises:
        ConfigError: no launch has a metric of that name.
    """
    for column in dict.fromkeys(columns):
        name = own_metric_name(column)
        if name is None:
            continue
        texts = frame[OWN_METRICS].unique().drop_nulls().to_list()
        found = [msgspec.json.decode(text) for text in texts]
        if not any(name in metrics for metrics in found):
            known = sorted({known for metrics in found for known in metrics})
            raise ConfigError(f"no command has a metric {name!r}", hint=did_you_mean(name, known))
        values = [own_metric_value(metrics[name]) if name in metrics else None for metrics in found]
        own = pl.DataFrame({OWN_METRICS: texts, column: values}, schema={OWN_METRICS: pl.String, column: pl.Float64})
        frame = frame.join(own, on=OWN_METRICS, how="left", maintain_order="left")
    return frame


def own_units(frame: pl.DataFrame) -> dict[str, str]:
    """The units of commands' metrics by column, as the sweeps state them."""
    texts: list[str] = frame["units"].unique().drop_nulls().to_list() if "units" in frame.columns else []
    return {f"{OWN_METRICS}.{name}": unit for text in texts for name, unit in sorted(msgspec.json.decode(text).items())}


def own_metric_value(value: dict[str, float] | float) -> float:
    """The figure of a command's metric: the median of one per step."""
    return value["median"] if isinstance(value, dict) else value


def column_choices() -> list[str]:
    """Return the short names of all columns."""
    stored = [short_name(name) for name in column_types() if not name.startswith("file.")]
    return [*DERIVED_COLUMNS, *COMPUTED_COLUMNS, *PREDICTED_COLUMNS, *stored]


def source_columns(columns: Iterable[str]) -> list[str]:
    """Return the columns of a results frame that ``columns`` are computed from, each once."""
    sources: list[str] = []
    for column in columns:
        option = split_option_column(column)
        if option:
            sources.append(option[0])
        elif own_metric_name(column):
            sources += [OWN_METRICS, "units", "better"]
        elif not is_computed(column):
            sources += DERIVED_COLUMNS.get(column, (column,))
    return list(dict.fromkeys(sources))


def with_option_column(frame: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return ``frame`` with an entry of a table of options as a column.

    An option that is a number in one run and a word in another is text in all.
    """
    option = split_option_column(column)
    assert option is not None, f"{column} is not an option"
    table, key = option
    texts = frame[table].unique().drop_nulls().to_list()
    values = [msgspec.json.decode(text).get(key) for text in texts]
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1:
        common = float if kinds == {int, float} else str
        values = [None if value is None else common(value) for value in values]
    options = pl.DataFrame({table: texts, column: values}, schema_overrides={table: pl.String}, strict=False)
    return frame.join(options, on=table, how="left", maintain_order="left")


def with_derived_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """Return ``frame`` with those ``DERIVED_COLUMNS`` whose parameters it has."""
    products = [
        pl.fold(pl.lit(1), lambda product, factor: product * factor, [pl.col(factor) for factor in factors]).alias(name)
        for name, factors in DERIVED_COLUMNS.items()
        if set(factors) <= set(frame.columns)
    ]
    return frame.with_columns(products)


class Condition:
    """An expression over the columns of a frame, in the language of sweeps."""

    def __init__(self, text: str, where: str) -> None:
        """Raise ``ConfigError`` if ``text`` is not an expression, or names no column or a computed one."""
        self.expression = Expression(text, where=where)
        self._columns = {name: self._column(name) for name in sorted(self.expression.names)}

    @property
    def columns(self) -> list[str]:
        """The columns of a results frame that it reads."""
        return source_columns(self._columns.values())

    @property
    def names(self) -> list[str]:
        """The names that it uses, as columns."""
        return [*self._columns.values()]

    @property
    def reads_figures(self) -> bool:
        """Whether it refers to measured figures."""
        return any(column.startswith("metrics.") for column in self._columns.values())

    def _column(self, name: str) -> str:
        try:
            column = resolve_column(name)
            if is_computed(column):
                # A speed-up has a baseline, which may be among the runs that would be left out.
                raise ConfigError(
                    f"{name} is computed from the selected runs", hint="use parameters or measured figures, as devices"
                )
            return column
        except ConfigError as error:
            message = f"{self.expression.text!r:.120}: {error.message}"
            raise ConfigError(message, where=self.expression.where, hint=error.hint) from None

    def mask(self, frame: pl.DataFrame) -> pl.Series:
        """Return for every row whether the condition holds; a missing figure makes it false.

        Each combination of values is evaluated once.
        """
        columns = list(dict.fromkeys((split_option_column(name) or (name,))[0] for name in self._columns.values()))
        if not columns:
            return pl.Series("holds", [self.expression.holds({})] * len(frame), dtype=pl.Boolean)
        values = with_derived_columns(frame).select(columns)
        unique = values.unique()
        holds = [self._holds(row) for row in unique.iter_rows(named=True)]
        marked = unique.with_columns(pl.Series("holds", holds, dtype=pl.Boolean))
        return values.join(marked, on=columns, how="left", nulls_equal=True, maintain_order="left")["holds"]

    def _holds(self, row: dict[str, Any]) -> bool:
        values = {name: _column_value(column, row) for name, column in self._columns.items()}
        try:
            return self.expression.holds(values)
        except ConfigError:
            if None in values.values():
                return False
            raise


def _column_value(column: str, row: dict[str, Any]) -> Any:
    option = split_option_column(column)
    if option is None:
        return row[column]
    table, key = option
    return msgspec.json.decode(row[table]).get(key) if row[table] else None
