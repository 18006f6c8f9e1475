"""Launches to configurations, and their speed-ups: the one place where medians, spreads and ratios are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hpcbench.errors import ConfigError
from hpcbench.report.names import Condition, with_derived
from hpcbench.results.schema import OK

if TYPE_CHECKING:
    import polars

Scaling = Literal["weak", "strong"]

STEP = "metrics.step_time_s.median"
RATE = "metrics.samples_per_s"
LOW, HIGH = "low", "high"
IDENTITY = ("cluster", "config_id", "environment_digest")
WORKLOAD = (
    "cluster", "spec.model", "spec.model_options", "spec.dataset", "spec.input_size", "spec.precision", "spec.data",
    "spec.optimizer", "spec.channels_last",
)  # fmt: skip
"""What a run and its baseline have in common, beside the batch."""
GROUP_COLUMNS = (*IDENTITY, "run_id", "status")
"""What grouping reads in any case."""
SPEEDUP_COLUMNS = (
    *WORKLOAD, "spec.strategy", "spec.batch_size", "spec.dp_degree", "spec.nodes", "spec.tasks_per_node",
    "spec.devices_per_task", RATE,
)  # fmt: skip
SPREAD_COLUMNS = ("metrics.step_time_s.ci95_low", "metrics.step_time_s.ci95_high")
_LARGEST_COUNTS = frozenset({"metrics.peak_memory_bytes", "metrics.peak_reserved_bytes"})
_KEPT = frozenset({"warnings", "run_id", "file.mtime_ns", "file.size_bytes"})


def configurations(frame: polars.DataFrame) -> polars.DataFrame:
    """One row for the launches of one configuration on one cluster in one environment, in their first order.

    Metrics are medians over launches (memory: the most), ``<metric>:low`` and ``:high`` the least and the most of
    several launches; of a single one the 95 % interval of its median step time. ``launches`` counts, ``run_ids`` and
    ``warnings`` are lists. What is not ok is a row of its own for each run.
    """
    import polars as pl

    alone = pl.when(pl.col("status") != OK).then(pl.col("run_id")).otherwise(pl.lit("")).alias("_alone")
    keys = [name for name in (*IDENTITY, "status") if name in frame.columns]
    metrics = [name for name in frame.columns if name.startswith("metrics.") and frame.schema[name].is_numeric()]
    rest = [name for name in frame.columns if name not in {*metrics, *keys, *_KEPT}]
    over_launches = [pl.col(name).max() if name in _LARGEST_COUNTS else pl.col(name).median() for name in metrics]
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
    return _one_launch(grouped).drop("_alone")


def chosen(frame: polars.DataFrame, where: Condition | None) -> polars.DataFrame:
    """The launches for which ``where`` holds.

    A condition on figures is asked of whole configurations: the slow launches of a fast one stay with it.
    """
    if where is None:
        return frame
    if not where.reads_figures:
        return frame.filter(where.mask(frame))
    keys = [*IDENTITY, "status"]
    rows = configurations(frame)
    return frame.join(rows.filter(where.mask(rows)), on=keys, how="semi", nulls_equal=True, maintain_order="left")


def _one_launch(grouped: polars.DataFrame) -> polars.DataFrame:
    """The spread of rows with a single launch: the interval of the median where there is one, else none."""
    import polars as pl

    single = pl.col("launches") < 2
    bounds = {}
    for name in [name for name in grouped.columns if name.endswith((f":{LOW}", f":{HIGH}"))]:
        column, _, side = name.rpartition(":")
        within = SPREAD_COLUMNS[side == HIGH]
        own = pl.col(within) if column == STEP and within in grouped.columns else pl.lit(None)
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

    rows = with_derived(rows)
    batch = "spec.batch_size" if scaling == "weak" else "global_batch_size"
    keys = [*WORKLOAD, batch]
    chosen = baseline.mask(rows) if baseline else rows["devices"] == 1
    fit = rows.filter(chosen & (pl.col("status") == OK) & (pl.col(RATE) > 0))
    if baseline and fit.is_empty():
        raise ConfigError(f"no measured row fits the baseline {baseline.expression.text!r:.120}")
    order = [pl.col("spec.strategy") != "single", pl.col("devices"), -pl.col(RATE)]
    bounds = [pl.col(RATE), pl.col(f"{RATE}:{LOW}"), pl.col(f"{RATE}:{HIGH}"), pl.col("devices")]
    names = ["_rate", "_low", "_high", "_devices"]
    kept = [pl.col(name).first().alias(f"baseline.{name}") for name in carried]
    base = fit.sort(order).group_by(keys).agg(
        *(column.first().alias(name) for column, name in zip(bounds, names, strict=True)), *kept
    )  # fmt: skip
    joined = rows.join(base, on=keys, how="left", nulls_equal=True, maintain_order="left")
    ok = pl.when(pl.col("status") == OK)
    speedup = pl.col(RATE) / pl.col("_rate")
    return joined.with_columns(
        ok.then(speedup).alias("speedup"),
        ok.then(pl.col(f"{RATE}:{LOW}") / pl.col("_high")).alias(f"speedup:{LOW}"),
        ok.then(pl.col(f"{RATE}:{HIGH}") / pl.col("_low")).alias(f"speedup:{HIGH}"),
        ok.then(speedup * pl.col("_devices") / pl.col("devices")).alias("efficiency"),
    ).drop(names)


def needed(columns: Sequence[str], *, speedups: bool) -> list[str]:
    """The columns of a results frame that rows with ``columns`` are made from."""
    spread = SPREAD_COLUMNS if STEP in columns else ()
    more = SPEEDUP_COLUMNS if speedups else ()
    return list(dict.fromkeys([*GROUP_COLUMNS, *columns, *spread, *more]))


def measured(frame: polars.DataFrame) -> polars.DataFrame:
    """The results that are ok."""
    import polars as pl

    return frame.filter(pl.col("status") == OK)
