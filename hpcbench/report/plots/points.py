"""Results to the points of a plot: the line and the panel of each, and what is left out so that it is readable."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hpcbench.config.spec import DEGREES
from hpcbench.errors import ConfigError
from hpcbench.fileio import printable
from hpcbench.report.groups import HIGH, LOW, RATE, STEP, Scaling, configurations, measured, with_speedups
from hpcbench.report.names import DERIVED, option_of, short_of, with_derived, with_option
from hpcbench.results.schema import OK

if TYPE_CHECKING:
    import polars

MOST_PANELS = 9
MOST_SERIES = 12
_BEYOND = 1e18
_LONGEST = 60
"""Characters of a name; who writes longer ones has the whole in the table."""
_PANELS = {
    "cluster": "on {}", "spec.model": "{}", "spec.model_options": "{}", "spec.dataset": "{}",
    "spec.input_size": "size {}", "_batch": "{}", "spec.precision": "{}", "spec.data": "data {}",
    "spec.optimizer": "{}", "spec.channels_last": "channels_last {}", "environment_digest": "environment {}",
}  # fmt: skip
"""What points in one panel have in common, and how it is said."""
_SAID_ALWAYS = ("spec.model", "spec.dataset", "_batch", "cluster")
_KEYS = frozenset({"cluster", "sweep", "environment_digest", *DERIVED})
"""What tells lines apart beside parameters and provenance."""
_BATCHES: tuple[tuple[str, str, Scaling], ...] = (
    ("spec.batch_size", "batch {} per replica", "weak"), ("global_batch_size", "global batch {}", "strong"),
    ("_per_device", "{} samples per device", "weak"),
)  # fmt: skip
COLUMNS = (
    "cluster", "config_id", "environment_digest", "run_id", "status", "sweep", *(f"spec.{name}" for name in DEGREES),
    "spec.model", "spec.model_options", "spec.dataset", "spec.input_size", "spec.precision", "spec.data",
    "spec.optimizer", "spec.channels_last", "spec.strategy", "spec.batch_size", "spec.nodes", "spec.tasks_per_node",
    "spec.devices_per_task", "metrics.samples_per_s", "metrics.step_time_s.median", "metrics.step_time_s.ci95_low",
    "metrics.step_time_s.ci95_high",
)  # fmt: skip
"""What ``points`` reads of a results frame, beside the metric."""


class Points(NamedTuple):
    """``frame``: rows of ``configurations`` with ``speedup`` and ``efficiency``, ``panel``, ``series``, ``devices`` and
    ``label`` (the strategy with its degrees)."""

    frame: polars.DataFrame
    shared: str
    """In words, what all of them have in common."""
    notes: list[str]
    nothing: str = ""
    """Why there is no point."""


def points(frame: polars.DataFrame, by: Sequence[str] = (), metric: str = RATE, *, every: bool = False) -> Points:
    """The measured configurations of ``frame`` that have a ``metric``; of several for one point the fastest.

    With ``every`` all of them, however many.
    """
    import polars as pl

    ended = measured(frame)
    if ended.is_empty():
        return Points(ended, "", [], _why_nothing(frame))
    notes = _not_ok(frame)
    rows = with_derived(configurations(_with_keys(ended, by)))
    batch, text, scaling = _batch_kind(rows)
    rows = with_speedups(_with_rate_bounds(rows), scaling=scaling)
    # What nobody can have measured would only stretch an axis.
    possible = (pl.col(metric) > 0) & (pl.col(metric) < _BEYOND) & (pl.col("devices") > 0)
    there = rows.filter(possible).with_columns(
        pl.when((pl.col(name) > 0) & (pl.col(name) < _BEYOND)).then(name).alias(name)
        for name in [f"{name}:{side}" for name in {metric, RATE, STEP, "speedup"} for side in (LOW, HIGH)]
        if name in rows.columns
    )
    if there.is_empty():
        count = f"{len(rows)} configuration{'s' * (len(rows) > 1)}"
        why = "no baseline of one device with the same workload" if metric == "efficiency" else "none has it measured"
        return Points(there, "", notes, f"{short_of(metric)}: {count} ended well, but {why}")
    if len(there) < len(rows):
        notes.append(f"without {short_of(metric)}: {len(rows) - len(there)} configurations")
    there = _per_device(there).with_columns(
        pl.format(text, _rounded(batch)).alias("_batch"),
        _label().alias("label"),
    )  # fmt: skip
    there = _clean(there, "label")
    there, shared = _with_panels(_with_series(there, by))
    return Points(there, shared, notes) if every else _readable(there, shared, notes)


def _readable(rows: polars.DataFrame, shared: str, notes: list[str]) -> Points:
    """One configuration a point, and no more panels and lines than can be told apart."""
    import polars as pl

    for key, most, words in (("panel", MOST_PANELS, "panels"), ("series", MOST_SERIES, "lines")):
        counts = rows.group_by(key, maintain_order=True).len().sort("len", descending=True, maintain_order=True)
        if len(counts) > most:
            rows = rows.filter(pl.col(key).is_in(counts[key].head(most).to_list()))
            notes.append(f"the {most} {words} with most points of {len(counts)}; others can be chosen with --where")
    cell = ["panel", "series", "devices"]
    fastest = rows.sort(RATE, descending=True, nulls_last=True, maintain_order=True).unique(
        cell, keep="first", maintain_order=True
    )
    if len(fastest) < len(rows):
        notes.append(
            f"a point is the fastest of its configurations: {len(rows) - len(fastest)} slower ones are not drawn; "
            "--by tells them apart"
        )
    order = {name: place for place, name in enumerate(sorted(fastest["panel"].unique().to_list(), key=_natural))}
    place = pl.col("panel").replace_strict(order, return_dtype=pl.Int64)
    return Points(fastest.sort([place, "series", "devices"], maintain_order=True), shared, notes)


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in names by their size."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name[:_LONGEST])]


def _why_nothing(frame: polars.DataFrame) -> str:
    if frame.is_empty():
        return "there are no results"
    count = "the one run" if len(frame) == 1 else f"none of {len(frame)} runs"
    verb = "did not end well" if len(frame) == 1 else "ended well"
    return f"{count} {verb}: {_counts(frame)}"


def _not_ok(frame: polars.DataFrame) -> list[str]:
    failed = frame.filter(frame["status"] != OK)
    if failed.is_empty():
        return []
    return [f"not drawn: {len(failed)} run{'s' * (len(failed) > 1)} that did not end well ({_counts(failed)})"]


def _counts(frame: polars.DataFrame) -> str:
    counts = frame.group_by("status", maintain_order=True).len().sort("len", descending=True, maintain_order=True)
    return ", ".join(f"{count} {printable(status)[:_LONGEST]}" for status, count in counts.iter_rows())


def _with_keys(frame: polars.DataFrame, by: Sequence[str]) -> polars.DataFrame:
    for column in by:
        if option_of(column):
            frame = with_option(frame, column)
        elif not column.startswith(("spec.", "provenance.")) and column not in _KEYS:
            raise ConfigError(f"--by {short_of(column)}: it tells no lines apart", hint="name a parameter of runs")
    return frame


def _with_rate_bounds(rows: polars.DataFrame) -> polars.DataFrame:
    """Of a single launch the rates that the 95 % interval of its median step time allows."""
    import polars as pl

    single = pl.col("launches") < 2
    bounds = [
        pl.when(single & (pl.col(f"{STEP}:{other}") > 0))
        .then(pl.col(RATE) * pl.col(STEP) / pl.col(f"{STEP}:{other}"))
        .otherwise(pl.col(f"{RATE}:{side}")).alias(f"{RATE}:{side}")
        for side, other in ((LOW, HIGH), (HIGH, LOW))
    ]  # fmt: skip
    return rows.with_columns(bounds)


def _per_device(rows: polars.DataFrame) -> polars.DataFrame:
    import polars as pl

    return rows.with_columns((pl.col("global_batch_size") / pl.col("devices")).alias("_per_device"))


def _rounded(column: str) -> polars.Expr:
    """Whole numbers without a decimal point."""
    import polars as pl

    value = pl.col(column)
    return pl.when(value == value.round()).then(value.cast(pl.Int64).cast(pl.String)).otherwise(
        value.cast(pl.Float64).round(3).cast(pl.String)
    )  # fmt: skip


def _batch_kind(rows: polars.DataFrame) -> tuple[str, str, Scaling]:
    """Which batch the runs hold equal while devices grow: the one with the fewest values."""
    given = _per_device(rows)
    return min(_BATCHES, key=lambda one: given[one[0]].n_unique())


def _more_than_one(name: str) -> polars.Expr:
    import polars as pl

    return (pl.col(f"spec.{name}") > 1).cast(pl.Int64)


def _degrees(template: str) -> polars.Expr:
    """The strategy; of a hybrid with ``template`` for each of its degrees."""
    import polars as pl

    several = sum((_more_than_one(name) for name in DEGREES), pl.lit(0)) > 1
    parts = [
        pl.when(several & (pl.col(f"spec.{name}") > 1))
        .then(pl.format(template, pl.lit(name.removesuffix("_degree")), pl.col(f"spec.{name}")))
        .otherwise(pl.lit(""))
        for name in DEGREES
    ]
    return pl.concat_str([pl.col("spec.strategy"), *parts])


def _label() -> polars.Expr:
    """As ``config.spec.strategy_label``."""
    return _degrees(" {}{}")


def labelled(frame: polars.DataFrame, by: Sequence[str]) -> polars.DataFrame:
    """Rows of a results frame with ``series``, ``label`` and ``devices``, as ``points`` names them."""
    return _clean(_with_series(with_derived(_with_keys(frame, by)), by).with_columns(_label().alias("label")), "label")


def _with_series(rows: polars.DataFrame, by: Sequence[str]) -> polars.DataFrame:
    """A hybrid is one line however large its degrees are: ``filter dp tp``."""
    import polars as pl

    if not by:
        family = _degrees(" {}:{}").str.replace_all(r":\d+", "")
        return _clean(rows.with_columns(family.alias("series")), "series")
    parts = [
        _degrees(" {}:{}").str.replace_all(r":\d+", "") if name == "spec.strategy"
        else pl.format(f"{short_of(name).rpartition('.')[2]} {{}}", pl.col(name).cast(pl.String).fill_null("default"))
        for name in by
    ]  # fmt: skip
    return _clean(rows.with_columns(pl.concat_str(parts, separator=", ").alias("series")), "series")


def _clean(rows: polars.DataFrame, column: str) -> polars.DataFrame:
    """Somebody else may have written the names in ``column``."""
    import polars as pl

    names = rows[column].unique().to_list()
    return rows.with_columns(
        pl.col(column).replace_strict(names, [name_of(one) for one in names], return_dtype=pl.String)
    )


def name_of(value: Any) -> str:
    """``value`` as a short piece of text that steers nothing."""
    text = printable(str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _with_panels(rows: polars.DataFrame) -> tuple[polars.DataFrame, str]:
    """``rows`` with ``panel``: what differs between them; and what does not."""
    import polars as pl

    varying = [name for name in _PANELS if rows[name].n_unique() > 1]
    shared = ", ".join(_said(name, rows[name][0]) for name in _SAID_ALWAYS if name not in varying)
    if not varying:
        return rows.with_columns(pl.lit("").alias("panel")), shared
    different = rows.select(varying).unique(maintain_order=True)
    names: dict[str, None] = {}
    for values in different.iter_rows():
        name = ", ".join(filter(None, map(_said, varying, values)))
        # What was cut short may look alike.
        names[name if name not in names else f"{name} ({len(names) + 1})"] = None
    panels = different.with_columns(pl.Series("panel", list(names), dtype=pl.String))
    return rows.join(panels, on=varying, how="left", nulls_equal=True, maintain_order="left"), shared


def _said(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "spec.model_options":
        value = " ".join(f"{key} {one}" for key, one in msgspec.json.decode(value).items())
    return _PANELS[name].format(name_of(value))
