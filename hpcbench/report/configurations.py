"""Aggregation of launches into configurations: medians, spreads, speed-ups, and the rows of the results table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.report.column_names import Condition, with_derived_columns
from hpcbench.results.frame import JSON_TEXT, collected_frame, column_types
from hpcbench.results.results_tree import CollectedResult
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK

if TYPE_CHECKING:
    import polars

Scaling = Literal["weak", "strong"]

STEP_TIME = "metrics.step_time_s.median"
THROUGHPUT = "metrics.samples_per_s"
LOW, HIGH = "low", "high"
CONFIGURATION_KEYS = ("cluster", "config_id", "environment_digest")
WORKLOAD_COLUMNS = (
    "cluster", "spec.model", "spec.model_options", "spec.dataset", "spec.input_size", "spec.precision", "spec.data",
    "spec.optimizer", "spec.channels_last",
)  # fmt: skip
"""What a run and its baseline have in common, beside the batch."""
GROUP_COLUMNS = (*CONFIGURATION_KEYS, "run_id", "status")
"""What grouping reads in any case."""
SPEEDUP_COLUMNS = (
    *WORKLOAD_COLUMNS, "spec.strategy", "spec.batch_size", "spec.dp_degree", "spec.nodes", "spec.tasks_per_node",
    "spec.devices_per_task", THROUGHPUT,
)  # fmt: skip
SPREAD_COLUMNS = ("metrics.step_time_s.ci95_low", "metrics.step_time_s.ci95_high")
_MAXIMUM_OVER_LAUNCHES = frozenset({"metrics.peak_memory_bytes", "metrics.peak_reserved_bytes"})
_NOT_AGGREGATED = frozenset({"warnings", "run_id", "file.mtime_ns", "file.size_bytes"})


def aggregate_launches(frame: polars.DataFrame) -> polars.DataFrame:
    """One row for the launches of one configuration on one cluster in one environment, in their first order.

    Metrics are medians over launches (memory: the most), ``<metric>:low`` and ``:high`` the least and the most of
    several launches; of a single one the 95 % interval of its median step time. ``launches`` counts, ``run_ids`` and
    ``warnings`` are lists. What is not ok is a row of its own for each run.
    """
    import polars as pl

    alone = pl.when(pl.col("status") != STATUS_OK).then(pl.col("run_id")).otherwise(pl.lit("")).alias("_alone")
    keys = [name for name in (*CONFIGURATION_KEYS, "status") if name in frame.columns]
    metrics = [name for name in frame.columns if name.startswith("metrics.") and frame.schema[name].is_numeric()]
    rest = [name for name in frame.columns if name not in {*metrics, *keys, *_NOT_AGGREGATED}]
    over_launches = [
        pl.col(name).max() if name in _MAXIMUM_OVER_LAUNCHES else pl.col(name).median() for name in metrics
    ]
    spreads = [
        bound
        for name in metrics
        if name not in SPREAD_COLUMNS
        for bound in (pl.col(name).min().alias(f"{name}:{LOW}"), pl.col(name).max().alias(f"{name}:{HIGH}"))
    ]
    lists = [pl.col("warnings").drop_nulls().unique(maintain_order=True)] if "warnings" in frame.columns else []
    verified = [pl.col("verification.passed").all().alias("verified")] if "verification.passed" in rest else []
    asked = [pl.col("verification.passed").is_not_null().any().alias("_asked")] if verified else []
    grouped = frame.with_columns(alone).group_by([*keys, "_alone"], maintain_order=True).agg(
        pl.col(rest).first(), *over_launches, *spreads, *lists, *verified, *asked,
        launches=pl.len(), run_ids=pl.col("run_id"),
    )  # fmt: skip
    if verified:
        grouped = grouped.with_columns(pl.when("_asked").then("verified").alias("verified")).drop("_asked")
    return _single_launch_spread(grouped).drop("_alone")


def filter_launches(frame: polars.DataFrame, where: Condition | None) -> polars.DataFrame:
    """The launches for which ``where`` holds.

    A condition on figures is asked of whole configurations: the slow launches of a fast one stay with it.
    """
    if where is None:
        return frame
    if not where.reads_figures:
        return frame.filter(where.mask(frame))
    keys = [*CONFIGURATION_KEYS, "status"]
    rows = aggregate_launches(frame)
    return frame.join(rows.filter(where.mask(rows)), on=keys, how="semi", nulls_equal=True, maintain_order="left")


def _single_launch_spread(grouped: polars.DataFrame) -> polars.DataFrame:
    """The spread of rows with a single launch: the interval of the median where there is one, else none."""
    import polars as pl

    single = pl.col("launches") < 2
    bounds = {}
    for name in [name for name in grouped.columns if name.endswith((f":{LOW}", f":{HIGH}"))]:
        column, _, side = name.rpartition(":")
        within = SPREAD_COLUMNS[side == HIGH]
        own = pl.col(within) if column == STEP_TIME and within in grouped.columns else pl.lit(None)
        bounds[name] = pl.when(single).then(own).otherwise(pl.col(name))
    return grouped.with_columns(**bounds)


def with_speedups(
    rows: polars.DataFrame,
    baseline: Condition | None = None,
    scaling: Scaling = "weak",
    carried: Sequence[str] = (),
) -> polars.DataFrame:
    """``rows`` of ``configurations`` with ``speedup`` and ``efficiency``, and the least and most that spreads allow.

    The speed-up is the throughput over that of the baseline: a row for which ``baseline`` holds (without one: a run on
    one device), with the same workload and, weak, the same batch per replica or, strong, the same global batch. Of
    several that fit it is ``single``'s, else that on the fewest devices, else the fastest. Efficiency is the speed-up
    per device, the baseline's devices counted alike. Columns ``carried`` of the baseline become ``baseline.<name>``.

    Raises ``ConfigError`` where no measured row fits ``baseline``.
    """
    import polars as pl

    rows = with_derived_columns(rows)
    batch = "spec.batch_size" if scaling == "weak" else "global_batch_size"
    keys = [*WORKLOAD_COLUMNS, batch]
    chosen = baseline.mask(rows) if baseline else rows["devices"] == 1
    fit = rows.filter(chosen & (pl.col("status") == STATUS_OK) & (pl.col(THROUGHPUT) > 0))
    if baseline and fit.is_empty():
        raise ConfigError(f"no measured row fits the baseline {baseline.expression.text!r:.120}")
    order = [pl.col("spec.strategy") != "single", pl.col("devices"), -pl.col(THROUGHPUT)]
    bounds = [pl.col(THROUGHPUT), pl.col(f"{THROUGHPUT}:{LOW}"), pl.col(f"{THROUGHPUT}:{HIGH}"), pl.col("devices")]
    names = ["_rate", "_low", "_high", "_devices"]
    kept = [pl.col(name).first().alias(f"baseline.{name}") for name in carried]
    base = fit.sort(order).group_by(keys).agg(
        *(column.first().alias(name) for column, name in zip(bounds, names, strict=True)), *kept
    )  # fmt: skip
    joined = rows.join(base, on=keys, how="left", nulls_equal=True, maintain_order="left")
    ok = pl.when(pl.col("status") == STATUS_OK)
    speedup = pl.col(THROUGHPUT) / pl.col("_rate")
    return joined.with_columns(
        ok.then(speedup).alias("speedup"),
        ok.then(pl.col(f"{THROUGHPUT}:{LOW}") / pl.col("_high")).alias(f"speedup:{LOW}"),
        ok.then(pl.col(f"{THROUGHPUT}:{HIGH}") / pl.col("_low")).alias(f"speedup:{HIGH}"),
        ok.then(speedup * pl.col("_devices") / pl.col("devices")).alias("efficiency"),
    ).drop(names)


def required_columns(columns: Sequence[str], *, speedups: bool) -> list[str]:
    """The columns of a results frame that rows with ``columns`` are made from."""
    spread = SPREAD_COLUMNS if STEP_TIME in columns else ()
    more = SPEEDUP_COLUMNS if speedups else ()
    return list(dict.fromkeys([*GROUP_COLUMNS, *columns, *spread, *more]))


def ok_results(frame: polars.DataFrame) -> polars.DataFrame:
    """The results that are ok."""
    import polars as pl

    return frame.filter(pl.col("status") == STATUS_OK)


ROW_ORDER = (
    "spec.model", "spec.dataset", "spec.strategy", "spec.nodes", "spec.tasks_per_node", "spec.batch_size", "config_id",
)  # fmt: skip
"""How rows follow each other where nothing else orders them."""


@dataclass
class ResultRow:
    """One configuration on one cluster in one environment."""

    cluster: str
    config_id: str
    spec: RunSpec | None
    status: str
    reason: str = ""
    launches: int = 0
    step_time_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    spread: str = ""
    """What low and high are: within one launch, or between several."""
    samples_per_s: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    accuracy: float | None = None
    verified: bool | None = None
    """Whether what was computed is what the reference computes; ``None`` where no launch was asked to check."""
    warnings: list[str] = field(default_factory=list)
    run_ids: list[str] = field(default_factory=list)


def rows_from_collected(collected: Iterable[CollectedResult]) -> list[ResultRow]:
    """Rows in the order in which their configurations first appear; what failed is a row with its reason."""
    return rows_from_frame(collected_frame(collected))


def rows_from_frame(
    frame: polars.DataFrame, baseline: Condition | None = None, scaling: Scaling = "weak"
) -> list[ResultRow]:
    """As ``rows_from_collected``, of a frame with all columns; broken files are at its end."""
    grouped = with_speedups(aggregate_launches(frame), baseline, scaling)
    made = [_row_from_values(values) for values in grouped.iter_rows(named=True)]
    return sorted(made, key=lambda row: row.status == STATUS_BROKEN)


def row_sort_key(row: ResultRow) -> tuple[Any, ...]:
    """As ``ORDER`` has it, clusters first; what has no specification comes last."""
    if row.spec is None:
        return (True, row.cluster, *row.run_ids)
    values = (getattr(row.spec, name.removeprefix("spec.")) for name in ROW_ORDER if name.startswith("spec."))
    return (False, row.cluster, *values, row.config_id, *row.run_ids)


def sort_rows(rows: list[ResultRow], by: str) -> list[ResultRow]:
    """``rows`` by one of their fields or parameters; ``-name`` has the largest first, what has none comes last."""
    name = by.removeprefix("-")
    fields = {*ResultRow.__dataclass_fields__, *RunSpec.__struct_fields__, "ranks", "devices"}
    if name not in fields:
        raise ConfigError(f"--sort {name}: no column of this table", hint=did_you_mean(name, fields))
    known = [(value, row) for row in rows if isinstance(value := _row_value(row, name), (int, float, str))]
    known.sort(key=lambda pair: pair[0], reverse=by.startswith("-"))
    there = {id(row) for _, row in known}
    return [row for _, row in known] + [row for row in rows if id(row) not in there]


def _row_value(row: ResultRow, name: str) -> Any:
    return getattr(row, name) if name in ResultRow.__dataclass_fields__ else getattr(row.spec, name, None)


def _row_from_values(values: dict[str, Any]) -> ResultRow:
    launches = values["launches"]
    row = ResultRow(
        cluster=values["cluster"],
        config_id=values["config_id"] or "",
        spec=None if values["status"] == STATUS_BROKEN else run_spec_of(values),
        status=values["status"],
        reason=values["error.message"] or "",
        launches=0 if values["status"] == STATUS_BROKEN else launches,
        warnings=decode_warnings(values["warnings"]),
        run_ids=values["run_ids"],
        verified=values["verified"],
    )
    row.step_time_s, row.low_s, row.high_s = values[STEP_TIME], values[f"{STEP_TIME}:low"], values[f"{STEP_TIME}:high"]
    if row.step_time_s is not None:
        row.spread = "within one launch" if launches < 2 else f"between {launches} launches"
    for name, column in _METRIC_FIELDS.items():
        setattr(row, name, values[column])
    return row


_METRIC_FIELDS = {
    "samples_per_s": "metrics.samples_per_s", "speedup": "speedup", "efficiency": "efficiency", "mfu": "metrics.mfu",
    "peak_memory_bytes": "metrics.peak_memory_bytes", "loss_first": "metrics.loss.first",
    "loss_last": "metrics.loss.last", "accuracy": "metrics.accuracy",
}  # fmt: skip


def decode_warnings(texts: Iterable[str]) -> list[str]:
    """Each warning once; ``texts`` are the JSON lists of the launches."""
    return list(dict.fromkeys(warning for text in texts for warning in msgspec.json.decode(text)))


def run_spec_of(values: dict[str, Any]) -> RunSpec:
    """The specification that a row of a results frame holds."""
    given: dict[str, Any] = {}
    for name in RunSpec.__struct_fields__:
        value = values[f"spec.{name}"]
        if value is not None:
            given[name] = msgspec.json.decode(value) if column_types()[f"spec.{name}"] == JSON_TEXT else value
    return RunSpec(**given)
