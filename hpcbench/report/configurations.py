"""Aggregation of launches into configurations: medians, spreads, speed-ups, and the rows of the results table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from statistics import median
from typing import Any, Literal

import msgspec
import polars as pl

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.report.column_names import (
    OWN_METRICS,
    Condition,
    own_metric_value,
    with_derived_columns,
    with_own_metrics,
)
from hpcbench.report.results_table import ResultRow
from hpcbench.results.frame import JSON_TEXT, column_types
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK
from hpcbench.strategies.catalog import SINGLE_DEVICE

Scaling = Literal["weak", "strong"]

STEP_TIME = "metrics.step_time_s.median"
THROUGHPUT = "metrics.samples_per_s"
LOW, HIGH = "low", "high"
SPEC_COLUMNS = tuple(f"spec.{name}" for name in RunSpec.__struct_fields__)
"""The columns of a results frame that a specification, and a prediction, needs."""
CONFIGURATION_KEYS = ("cluster", "config_id", "environment_digest")
WORKLOAD_COLUMNS = (
    "cluster", "spec.model", "spec.model_options", "spec.dataset", "spec.input_size", "spec.precision", "spec.data",
    "spec.optimizer", "spec.channels_last", "spec.command_digest",
)  # fmt: skip
"""A run and its baseline are equal in these, and in the batch; a command and its baseline in the parameters, too."""
GROUP_COLUMNS = (*CONFIGURATION_KEYS, "run_id", "status")
"""Columns that grouping always reads."""
SPEEDUP_COLUMNS = (
    *WORKLOAD_COLUMNS, "spec.strategy", "spec.batch_size", "spec.dp_degree", "spec.nodes", "spec.tasks_per_node",
    "spec.devices_per_task", "spec.parameters", THROUGHPUT,
)  # fmt: skip
SPREAD_COLUMNS = ("metrics.step_time_s.ci95_low", "metrics.step_time_s.ci95_high")
_MAXIMUM_OVER_LAUNCHES = frozenset({"metrics.peak_memory_bytes", "metrics.peak_reserved_bytes"})
_NOT_AGGREGATED = frozenset({"warnings", OWN_METRICS, "run_id", "ended_at_s", "file.mtime_ns", "file.size_bytes"})


def aggregate_launches(frame: pl.DataFrame) -> pl.DataFrame:
    """Return one row for the launches of each configuration on one cluster in one environment, in their first order.

    Metrics are medians over launches (memory: the maximum), ``<metric>:low`` and ``:high`` min and max of several
    launches; with one launch the 95 % interval of its median step time. ``launches`` is a count, ``run_ids`` and
    ``warnings`` are lists. Each run that is not ok is a row of its own.
    """
    alone = pl.when(pl.col("status") != STATUS_OK).then(pl.col("run_id")).otherwise(pl.lit("")).alias("_alone")
    keys = [name for name in (*CONFIGURATION_KEYS, "status") if name in frame.columns]
    metrics = [name for name in frame.columns if name.startswith("metrics.") and frame.schema[name].is_numeric()]
    rest = [name for name in frame.columns if name not in {*metrics, *keys, *_NOT_AGGREGATED}]
    figures = pl.col([name for name in metrics if name not in _MAXIMUM_OVER_LAUNCHES]).median()
    largest = pl.col([name for name in metrics if name in _MAXIMUM_OVER_LAUNCHES]).max()
    varying = pl.col([name for name in metrics if name not in SPREAD_COLUMNS])
    others = [pl.col("warnings").drop_nulls().unique(maintain_order=True)] if "warnings" in frame.columns else []
    if OWN_METRICS in frame.columns:
        others.append(pl.col(OWN_METRICS).drop_nulls())
    if "verification.passed" in rest:
        passed = pl.col("verification.passed")
        others.append(pl.when(passed.is_not_null().any()).then(passed.all()).alias("verified"))
    grouped = frame.with_columns(alone).group_by([*keys, "_alone"], maintain_order=True).agg(
        pl.col(rest).first(), figures, largest, varying.min().name.suffix(f":{LOW}"),
        varying.max().name.suffix(f":{HIGH}"), *others, launches=pl.len(), run_ids=pl.col("run_id"),
    )  # fmt: skip
    # Replace the spread of rows with a single launch by the interval of the median, if there is one.
    single = pl.col("launches") < 2
    bounds = {}
    for name in [name for name in grouped.columns if name.endswith((f":{LOW}", f":{HIGH}"))]:
        column, _, side = name.rpartition(":")
        within = SPREAD_COLUMNS[side == HIGH]
        bound = pl.col(within) if column == STEP_TIME and within in grouped.columns else pl.lit(None)
        bounds[name] = pl.when(single).then(bound).otherwise(pl.col(name))
    return grouped.with_columns(**bounds).drop("_alone")


def filter_launches(frame: pl.DataFrame, where: Condition | None) -> pl.DataFrame:
    """Return the launches that satisfy ``where``.

    A condition on figures is evaluated for whole configurations: the slow launches of a fast one stay with it.
    """
    if where is None:
        return frame
    if not where.reads_figures:
        return frame.filter(where.mask(frame))
    keys = [*CONFIGURATION_KEYS, "status"]
    rows = aggregate_launches(with_own_metrics(frame, where.names))
    return frame.join(rows.filter(where.mask(rows)), on=keys, how="semi", nulls_equal=True, maintain_order="left")


def with_speedups(
    rows: pl.DataFrame, baseline: Condition | None = None, scaling: Scaling = "weak", carried: Sequence[str] = ()
) -> pl.DataFrame:
    """Return ``rows`` of ``aggregate_launches`` with ``speedup`` and ``efficiency``, and bounds from the spreads.

    The speed-up is the throughput over that of the baseline: a row with the same workload and batch that satisfies
    ``baseline``. Of several it is ``single``'s, else that on the fewest devices, else the fastest. Efficiency is the
    speed-up times the baseline's devices over the row's.

    Args:
        rows: configurations.
        baseline: condition on baselines; ``None`` for runs on one device.
        scaling: the batch that is equal: ``weak`` per replica, ``strong`` the global one.
        carried: columns of the baseline that become ``baseline.<name>``.

    Raises:
        ConfigError: no measured row satisfies ``baseline``.
    """
    rows = with_derived_columns(rows)
    batch = "spec.batch_size" if scaling == "weak" else "global_batch_size"
    # With a baseline that the user named, parameters of a command may differ.
    keys = [*WORKLOAD_COLUMNS, batch, *(["spec.parameters"] if baseline is None else [])]
    is_baseline = baseline.mask(rows) if baseline else rows["devices"] == 1
    candidates = rows.filter(is_baseline & (pl.col("status") == STATUS_OK) & (pl.col(THROUGHPUT) > 0))
    if baseline and candidates.is_empty():
        raise ConfigError(f"no measured row fits the baseline {baseline.expression.text!r:.120}")
    order = [pl.col("spec.strategy") != SINGLE_DEVICE, pl.col("devices"), -pl.col(THROUGHPUT)]
    figures = {
        "_rate": THROUGHPUT,
        "_low": f"{THROUGHPUT}:{LOW}",
        "_high": f"{THROUGHPUT}:{HIGH}",
        "_devices": "devices",
    }
    figures |= {f"baseline.{name}": name for name in carried}
    base = (
        candidates.sort(order)
        .group_by(keys)
        .agg(pl.col(source).first().alias(name) for name, source in figures.items())
    )
    joined = rows.join(base, on=keys, how="left", nulls_equal=True, maintain_order="left")
    ok = pl.when(pl.col("status") == STATUS_OK)
    speedup = pl.col(THROUGHPUT) / pl.col("_rate")
    return joined.with_columns(
        ok.then(speedup).alias("speedup"),
        ok.then(pl.col(f"{THROUGHPUT}:{LOW}") / pl.col("_high")).alias(f"speedup:{LOW}"),
        ok.then(pl.col(f"{THROUGHPUT}:{HIGH}") / pl.col("_low")).alias(f"speedup:{HIGH}"),
        ok.then(speedup * pl.col("_devices") / pl.col("devices")).alias("efficiency"),
    ).drop("_rate", "_low", "_high", "_devices")


def required_columns(columns: Sequence[str], *, speedups: bool) -> list[str]:
    """Return the columns of a results frame that rows with ``columns`` are computed from."""
    spread = SPREAD_COLUMNS if STEP_TIME in columns else ()
    more = SPEEDUP_COLUMNS if speedups else ()
    return list(dict.fromkeys([*GROUP_COLUMNS, *columns, *spread, *more]))


def varying_parameters(frame: pl.DataFrame) -> list[str]:
    """Return the parameters of commands that differ between the runs of ``frame``, where all runs are of commands."""
    texts = frame["spec.parameters"].unique().to_list() if "spec.parameters" in frame.columns else [None]
    if None in texts:
        return []
    values: dict[str, set[str]] = {}
    for text in sorted(texts):
        for name, value in msgspec.json.decode(text).items():
            values.setdefault(name, set()).add(repr(value))
    return [name for name, found in values.items() if len(found) > 1]


def ok_results(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the results that are ok."""
    return frame.filter(pl.col("status") == STATUS_OK)


ROW_ORDER = (
    "spec.model", "spec.dataset", "spec.strategy", "spec.nodes", "spec.tasks_per_node", "spec.batch_size", "config_id",
)  # fmt: skip
"""The default order of rows."""


def rows_from_frame(frame: pl.DataFrame, baseline: Condition | None = None) -> list[ResultRow]:
    """Return the rows of a frame with all columns, in the order in which their configurations first appear.

    Failed runs are rows with a reason; broken files come last.
    """
    grouped = with_speedups(aggregate_launches(frame), baseline)
    rows = [_row_from_values(values) for values in grouped.iter_rows(named=True)]
    return sorted(rows, key=lambda row: row.status == STATUS_BROKEN)


def row_sort_key(row: ResultRow) -> tuple[Any, ...]:
    """The key of the default order: clusters, then ``ROW_ORDER``; rows without a specification last."""
    if row.spec is None:
        return (True, row.cluster, *row.run_ids)
    values = (getattr(row.spec, name.removeprefix("spec.")) for name in ROW_ORDER if name.startswith("spec."))
    return (False, row.cluster, *values, row.config_id, *row.run_ids)


def sort_rows(rows: list[ResultRow], by: str) -> list[ResultRow]:
    """Return ``rows`` in the order of a field or parameter; rows without a value come last.

    Args:
        rows: the rows.
        by: name of the field or parameter, ascending; ``-name`` has the largest value first.

    Raises:
        ConfigError: no field or parameter has that name.
    """
    name = by.removeprefix("-")
    fields = {*ResultRow.__dataclass_fields__, *RunSpec.__struct_fields__, "ranks", "devices"}
    if name not in fields:
        raise ConfigError(f"--sort {name}: no column of this table", hint=did_you_mean(name, fields))
    values = [getattr(row if name in ResultRow.__dataclass_fields__ else row.spec, name, None) for row in rows]
    sortable = [(value, row) for value, row in zip(values, rows, strict=True) if isinstance(value, (int, float, str))]
    others = [row for value, row in zip(values, rows, strict=True) if not isinstance(value, (int, float, str))]
    return [*(row for _, row in sorted(sortable, key=itemgetter(0), reverse=by.startswith("-"))), *others]


def _row_from_values(values: dict[str, Any]) -> ResultRow:
    launches = values["launches"]
    is_broken = values["status"] == STATUS_BROKEN
    spread = "within one launch" if launches < 2 else f"between {launches} launches"
    return ResultRow(
        values["cluster"], values["config_id"] or "", None if is_broken else run_spec_of(values), values["status"],
        values["error.message"] or "", 0 if is_broken else launches, values[STEP_TIME], values[f"{STEP_TIME}:low"],
        values[f"{STEP_TIME}:high"], "" if values[STEP_TIME] is None else spread, values[THROUGHPUT],
        values["metrics.tokens_per_s"], values["metrics.tokens_per_s_per_device"], values["speedup"],
        values["efficiency"], values["metrics.mfu"], values["metrics.hfu"], values["metrics.peak_memory_bytes"],
        values["metrics.loss.first"], values["metrics.loss.last"], values["metrics.accuracy"], values["verified"],
        decode_warnings(values["warnings"]), values["run_ids"], median_metrics(values[OWN_METRICS]),
        msgspec.json.decode(values["units"] or b"{}"),
    )  # fmt: skip


def median_metrics(texts: Iterable[str]) -> dict[str, float]:
    """The medians over launches of each metric of a command; ``texts`` are the JSON of the launches."""
    found: dict[str, list[float]] = {}
    for text in texts:
        for name, value in msgspec.json.decode(text).items():
            found.setdefault(name, []).append(own_metric_value(value))
    return {name: median(values) for name, values in found.items()}


def decode_warnings(texts: Iterable[str]) -> list[str]:
    """Each warning once; ``texts`` are the JSON lists of the launches."""
    return list(dict.fromkeys(warning for text in texts for warning in msgspec.json.decode(text)))


def run_spec_of(values: dict[str, Any]) -> RunSpec:
    """Return the specification in a row of a results frame."""
    types = column_types()
    parameters = {name: values[f"spec.{name}"] for name in RunSpec.__struct_fields__}
    return RunSpec(**{
        name: msgspec.json.decode(value) if types[f"spec.{name}"] == JSON_TEXT else value
        for name, value in parameters.items() if value is not None
    })  # fmt: skip
