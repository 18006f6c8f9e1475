"""Tables grouped by chosen keys, with chosen metrics in the cells, including the layouts of the papers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.fileio import printable_text
from hpcbench.paths import results_folder
from hpcbench.report import column_names, configurations
from hpcbench.report.load_results import load_frame
from hpcbench.report.results_table import results_data_view
from hpcbench.report.table_files import unique_column_names
from hpcbench.report.table_model import (
    Column,
    View,
    WarningFootnotes,
    column_heading,
    format_spread,
    format_value,
    short_name,
)
from hpcbench.results.frame import column_types
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import STATUS_OK
from hpcbench.units import pluralize


@dataclass(frozen=True)
class TableRequest:
    """The options of a table; names are columns."""

    by: tuple[str, ...] = ()
    pivot: str | None = None
    metrics: tuple[str, ...] = ()
    where: column_names.Condition | None = None
    baseline: column_names.Condition | None = None
    scaling: configurations.Scaling | None = None
    best: bool = False
    sort: str | None = None
    """A key or metric; with ``-`` the largest first."""

    @property
    def is_grouped(self) -> bool:
        """Whether configurations are combined, rather than each being a row."""
        return bool(self.by or self.pivot or self.metrics or self.scaling or self.best)

    @property
    def keys(self) -> list[str]:
        return list(filter(None, (*self.by, self.pivot)))

    @property
    def speedups(self) -> bool:
        """Whether it contains a figure relative to the baseline."""
        return any(name in column_names.COMPUTED_COLUMNS for name in self.metrics)

    @property
    def predictions(self) -> bool:
        """Whether it contains a figure of the oracle."""
        return any(name in column_names.PREDICTED_COLUMNS for name in self.metrics)

    def columns(self) -> list[str]:
        """Return the columns of a results frame that the table needs."""
        columns = column_names.source_columns([*self.keys, *self.metrics])
        columns += [column for condition in (self.where, self.baseline) if condition for column in condition.columns]
        columns += [configurations.THROUGHPUT] if self.best else []
        columns += () if self.best else configurations.WORKLOAD_COLUMNS
        if self.predictions:
            columns += [configurations.STEP_TIME, *configurations.SPEC_COLUMNS]
        return configurations.required_columns([*columns, "warnings"], speedups=self.speedups)


def with_defaults(request: TableRequest) -> TableRequest:
    """Return ``request`` with defaults: scaling over devices, or throughput and step time by strategy.

    Raises:
        ConfigError: the pivot is one of the columns of ``by``.
    """
    scaled = (configurations.THROUGHPUT, "speedup", "efficiency")
    metrics = request.metrics or (scaled if request.scaling else (configurations.STEP_TIME, configurations.THROUGHPUT))
    pivot = request.pivot or ("devices" if request.scaling else None)
    by = request.by or (("devices",) if pivot == "spec.strategy" else ("spec.strategy",))
    request = replace(request, by=by, pivot=pivot, metrics=metrics)
    if request.pivot in request.by:
        raise ConfigError(f"--by and --pivot name the same: {short_name(request.pivot)}", hint="keep one of them")
    return request


TABLE_LAYOUTS: dict[str, TableRequest] = {
    # Jansen et al. (DDLBench), figures 3.1 and 3.2: speed-up over one device by model, data set and framework.
    "ddlbench": TableRequest(
        by=("spec.model", "spec.dataset", "devices"), pivot="spec.strategy", metrics=("speedup",), best=True,
    ),
    # Kahira et al. 2021 (ParaDL): computation and communication of an iteration by strategy and devices.
    "paradl": TableRequest(
        by=("spec.model", "spec.strategy", "devices"),
        metrics=("metrics.compute_s", "metrics.comm_s", "metrics.exposed_comm_s", "metrics.step_time_s.median"),
    ),
}  # fmt: skip


_FIGURE_TYPES = ("Float64", "Int64")


def parse_table_request(**options: Any) -> TableRequest:
    """Return the request for the options of ``hpcbench table``; options that are ``None`` are absent.

    Args:
        options: ``by``, ``metrics`` (comma-separated), ``pivot``, ``where``, ``baseline``, ``scaling``, ``best``,
            ``sort``, and ``layout``, which sets those that are absent.

    Raises:
        ConfigError: a name is not a column, a metric is not a figure, or the layout is unknown.
    """
    selected = {name: value for name, value in options.items() if value not in (None, False)}
    layout = selected.pop("layout", None)
    if layout is not None and layout not in TABLE_LAYOUTS:
        raise ConfigError(f"no layout {layout!r}", hint=did_you_mean(layout, TABLE_LAYOUTS))
    for name in {"by", "metrics"} & selected.keys():
        selected[name] = tuple(column_names.resolve_column(column.strip()) for column in selected[name].split(","))
    for name in {"where", "baseline"} & selected.keys():
        selected[name] = column_names.Condition(selected[name], f"--{name}")
    if "pivot" in selected:
        selected["pivot"] = column_names.resolve_column(selected["pivot"])
    for name in selected.get("metrics", ()):
        computed = (column_names.COMPUTED_COLUMNS, column_names.DERIVED_COLUMNS, column_names.PREDICTED_COLUMNS)
        is_derived = any(name in columns for columns in computed)
        is_figure = column_types().get(name) in _FIGURE_TYPES or column_names.own_metric_name(name)
        if not is_derived and not is_figure:
            raise ConfigError(
                f"--metric {short_name(name)}: not a figure",
                hint=f"choices: {', '.join(metric_choices())}",
            )
    request = replace(TABLE_LAYOUTS[layout] if layout else TableRequest(), **selected)
    return with_defaults(request) if request.is_grouped else request


def metric_choices() -> list[str]:
    """Return the short names of columns that cells of a table can hold."""
    types = column_types()
    metrics = [short_name(name) for name in types if name.startswith("metrics.") and types[name] in _FIGURE_TYPES]
    return [*column_names.COMPUTED_COLUMNS, *column_names.PREDICTED_COLUMNS, *metrics]


MAX_PIVOT_COLUMNS = 60
AddPredictions = Callable[[pl.DataFrame], pl.DataFrame]


class _Cell(NamedTuple):
    """The figures for one combination of keys, by column."""

    row: dict[str, Any]
    warnings: list[str]
    units: dict[str, str]
    """Units of columns that are metrics of commands."""


_Key = tuple[Any, ...]


def pivot_view(
    frame: pl.DataFrame, request: TableRequest, title: str, add_predictions: AddPredictions | None = None
) -> View:
    """Return the table of ``request``: each cell is the median of its configurations, or the fastest with ``best``.

    Args:
        frame: results with the columns of ``request.columns()``.
        request: a request with defaults (``with_defaults``).
        title: heading of the table.
        add_predictions: adds the oracle's figures to rows of configurations; needed if the request contains some.

    Raises:
        ConfigError: a pivot has too many values to be columns, or ``request.sort`` is not a column.
    """
    frame = configurations.filter_launches(column_names.with_own_metrics(frame, request.metrics), request.where)
    rows = [*_aggregate_cells(frame, request, add_predictions).iter_rows(named=True)]
    units = column_names.own_units(frame)
    cells = [_Cell(row, configurations.decode_warnings(row.get("warnings", [])), units) for row in rows]
    ended_badly = frame.filter((pl.col("status") != STATUS_OK) & pl.col("config_id").is_not_null())
    statuses = _with_key_columns(ended_badly, request.keys).select([*request.keys, "status"])
    failed = {row[:-1]: row[-1] for row in statuses.unique(request.keys, maintain_order=True).iter_rows()}
    shown = [cell for cell in cells if any(cell.row[name] is not None for name in request.metrics)]
    footnotes = WarningFootnotes(shown, "cell", shared=True)
    view = (_pivoted_view if request.pivot else _flat_view)(cells, request, failed, footnotes)
    view.title = printable_text(title)
    view.notes = [*_unequal_rows_notes(frame, request), *_pivot_notes(rows, request)]
    view.warnings = footnotes.footnotes()
    if any(text.startswith("- ") for line in view.cells for text in line):
        view.notes.append("-: no run of the cell ended well; its status beside it")
    not_ok = int((frame["status"] != STATUS_OK).sum())
    if not_ok:
        view.notes.append(
            f"not counted: {pluralize(not_ok, 'run')} that did not end well; the table without --by lists them"
        )
    return _sorted_view(view, request.sort)


def _aggregate_cells(
    frame: pl.DataFrame, request: TableRequest, add_predictions: AddPredictions | None
) -> pl.DataFrame:
    """One row for each measured combination of keys."""
    keys, metrics = request.keys, request.metrics
    rows = configurations.ok_results(configurations.aggregate_launches(frame))
    if request.predictions:
        assert add_predictions is not None, "a request for predictions without add_predictions"
        rows = add_predictions(rows)
    if request.speedups:
        rows = configurations.with_speedups(rows, request.baseline, request.scaling or "weak")
    rows = _with_key_columns(rows, keys)
    if request.best:
        rank = "speedup" if request.speedups else configurations.THROUGHPUT
        rows = rows.filter(pl.col(rank).eq_missing(pl.col(rank).max().over(keys))).unique(keys, maintain_order=True)
    bounds = [f"{name}:{side}" for name in metrics for side in ("low", "high")]
    warned = [pl.col("warnings").explode().drop_nulls().unique(maintain_order=True)] if "warnings" in rows else []
    cells = rows.group_by(keys).agg(
        *(pl.col(name).median() for name in metrics),
        *(pl.col(name).count().alias(f"{name}:configurations") for name in metrics),
        # A spread between launches is not one between configurations.
        *(pl.when(pl.len() == 1).then(pl.col(name).first()).alias(name) for name in bounds if name in rows.columns),
        *warned, launches=pl.col("launches").sum(),
    )  # fmt: skip
    return cells.sort(keys, nulls_last=True)


def _with_key_columns(rows: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """``rows`` with those of ``keys`` that are products of parameters or options; lists among these as text."""
    rows = column_names.with_derived_columns(rows)
    for key in keys:
        if column_names.split_option_column(key) is not None:
            rows = column_names.with_option_column(rows, key)
            if rows.schema[key].is_nested():
                texts = [None if value is None else str(value) for value in rows[key].to_list()]
                rows = rows.with_columns(pl.Series(key, texts))
    return rows


def _cell_text(column: str, cell: _Cell) -> str:
    row = cell.row
    if row[column] is None:
        return ""
    count = row[f"{column}:configurations"]
    text = format_spread(
        column, row[column], row.get(f"{column}:low"), row.get(f"{column}:high"), cell.units.get(column)
    )
    return f"{text} ~{count}" if count > 1 else text


def _key_columns(request: TableRequest) -> list[Column]:
    return [
        Column(name, column_heading(name), is_key=True, is_number=not name.startswith("spec.")) for name in request.by
    ]


def _flat_view(cells: list[_Cell], request: TableRequest, failed: dict[_Key, str], footnotes: WarningFootnotes) -> View:
    """One row per key; ``-`` and the status where all runs failed."""
    columns = [*_key_columns(request), *(Column(name, column_heading(name)) for name in request.metrics)]
    view = View("", [*columns, Column("launches", "launches", optional=1)], [], [])
    by_key = {tuple(cell.row[name] for name in request.by): cell for cell in cells}
    for key in _sorted_keys([*by_key, *failed]):
        cell, (first, *others) = by_key.get(key), request.metrics
        entries = [_entry(cell, first, footnotes, failed.get(key)), *(_entry(cell, name) for name in others)]
        entries.append((cell.row["launches"], str(cell.row["launches"])) if cell else (0, ""))
        _append_line(view, request, key, [], entries)
    return view


def _entry(
    cell: _Cell | None, metric: str, footnotes: WarningFootnotes | None = None, status: str | None = None
) -> tuple[Any, str]:
    """Figure and text of ``metric``: with marks if ``footnotes`` are given, ``-`` and the status without a cell."""
    if cell is None:
        return None, f"- {status}" if status else ""
    text = _cell_text(metric, cell)
    # Marks are of a figure.
    return cell.row[metric], f"{text} {footnotes.marks(cell) if footnotes and text else ''}".rstrip()


def _append_line(
    view: View, request: TableRequest, key: _Key, names: list[str], entries: Sequence[tuple[Any, str]]
) -> None:
    keys = [format_value(name, part) for name, part in zip(request.by, key, strict=True)]
    view.raw.append([*key, *names, *(figure for figure, _ in entries)])
    view.cells.append([*keys, *names, *(text for _, text in entries)])


def _pivoted_view(
    cells: list[_Cell], request: TableRequest, failed: dict[_Key, str], footnotes: WarningFootnotes
) -> View:
    """One row per key and metric, one column per value of the pivot; ``-`` and the status where all runs failed."""
    assert request.pivot is not None
    pivot = short_name(request.pivot)
    by_key = {tuple(cell.row[name] for name in request.keys): cell for cell in cells}
    values = [value for (value,) in _sorted_keys([key[-1:] for key in (*by_key, *failed)])]
    if len(values) > MAX_PIVOT_COLUMNS:
        raise ConfigError(
            f"{pivot} has {len(values)} values; a table has at most {MAX_PIVOT_COLUMNS} columns of them",
            hint="choose fewer with --where, or make it a row with --by",
        )
    several = len(request.metrics) > 1
    heading = "" if request.pivot == "spec.strategy" else f"{pivot} "
    columns = [
        *_key_columns(request),
        *([Column("metric", "", is_key=True, is_number=False)] if several else []),
        *(Column(f"{pivot}={value}", f"{heading}{value}") for value in values),
    ]
    view = View("", columns, [], [])
    for key in _sorted_keys([key[:-1] for key in (*by_key, *failed)]):
        across = [(by_key.get((*key, value)), failed.get((*key, value))) for value in values]
        # The first line of a cell has its marks.
        marks: WarningFootnotes | None = footnotes
        for metric in request.metrics:
            entries = [_entry(cell, metric, marks, status) for cell, status in across]
            if metric not in column_names.COMPUTED_COLUMNS or any(figure is not None for figure, _ in entries):
                marks = None
                _append_line(view, request, key, [column_heading(metric)] if several else [], entries)
    return view


def _sorted_keys(keys: list[_Key]) -> list[_Key]:
    """``keys`` once each: numbers by size before words, missing values last."""
    return sorted(dict.fromkeys(keys), key=lambda parts: [(part is None, _sort_key(part)) for part in parts])


def _sort_key(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, (int, float)) else (1, str(value))


def _unequal_rows_notes(frame: pl.DataFrame, request: TableRequest) -> list[str]:
    """Return a note if the cells hold other workloads than each other: their medians then compare nothing."""
    others = [name for name in configurations.WORKLOAD_COLUMNS if name not in request.keys and name in frame.columns]
    ended = _with_key_columns(configurations.ok_results(frame), request.keys)
    varying = [name for name in others if ended[name].n_unique() > 1]
    if request.best or not varying:
        return []
    held = ended.unique([*request.keys, *varying]).group_by(request.keys).len()["len"]
    if held.n_unique() == 1 and held[0] == ended.select(varying).n_unique():
        return []
    names = ", ".join(map(short_name, varying))
    return [
        f"the cells hold different runs and cannot be compared; they differ in {names}: add it to --by, or use --where"
    ]


_ABSENT_REASONS = {
    "metrics.mfu": "it needs FLOPs of the model, and the device's peak in the profile",
    "metrics.hfu": "it needs FLOPs of the model, and the device's peak in the profile",
    "metrics.flops_per_s": "it needs FLOPs of the model",
    **dict.fromkeys(("metrics.tokens_per_s", "metrics.tokens_per_s_per_device"), "only runs on tokens have it"),
    "metrics.bubble_fraction": "only pipelines have it",
    "metrics.accuracy": "only runs on real data have it",
    "metrics.energy_j": "no counter of energy could be read",
    "metrics.energy_per_token_j": "only runs on tokens have it, where a counter of energy could be read",
    **dict.fromkeys(("metrics.idle_power_w", "metrics.power_cap_w"), "no GPU reported its power"),
}


def _pivot_notes(rows: list[dict[str, Any]], request: TableRequest) -> list[str]:
    notes = []
    for name in request.metrics:
        if rows and name not in column_names.COMPUTED_COLUMNS and all(row[name] is None for row in rows):
            reason = _ABSENT_REASONS.get(name)
            notes.append(f"{short_name(name)}: no run has it" + (f"; {reason}" if reason else ""))
    if any(row[f"{name}:configurations"] > 1 for name in request.metrics for row in rows):
        notes.append(
            "~n: median over n configurations that differ in other parameters; add one of them to --by to separate them"
        )
    if request.best:
        notes.append("the configuration with the most samples/s of each cell")
    if any(row.get(f"{name}:low") is not None for name in request.metrics for row in rows):
        notes.append("[min max] over repeats; with one launch, 95 % confidence interval of its median")
    if request.predictions:
        notes.append("predicted: by the oracle, see predict; error: (predicted - measured) / measured step time")
        if any(row[name] is None for name in request.metrics if name in column_names.PREDICTED_COLUMNS for row in rows):
            notes.append("without a prediction: see validate for the reason")
    if request.speedups:
        batch = "the same global batch" if request.scaling == "strong" else "the same batch per replica"
        base = f"the row with {request.baseline.expression.text}" if request.baseline else "one device"
        notes.append(f"speed-up: samples/s over that of {base} with {batch}; eff.: speed-up per device")
        if any(row[name] is None for name in request.metrics if name in column_names.COMPUTED_COLUMNS for row in rows):
            notes.append("without a speed-up: no such baseline was measured; choose another with --baseline")
    return notes


def _sorted_view(view: View, by: str | None) -> View:
    if by is None:
        return view
    name = by.removeprefix("-")
    names = [column.name for column in view.columns]
    column = name if name in names else column_names.resolve_column(name)
    if column not in names:
        hint = did_you_mean(name, [short_name(choice) for choice in names])
        raise ConfigError(f"--sort {name}: no column of this table", hint=hint)
    number = names.index(column)
    lines = list(zip(view.raw, view.cells, strict=True))
    present = [line for line in lines if line[0][number] is not None]
    present.sort(key=lambda line: _sort_key(line[0][number]), reverse=by.startswith("-"))
    present += [line for line in lines if line[0][number] is None]
    view.raw, view.cells = [raw for raw, _ in present], [cells for _, cells in present]
    return view


def grouped_view(
    tree: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None, request: TableRequest, title: str
) -> tuple[View, pl.DataFrame]:
    """A table with the keys of ``request``, and the runs before its filter."""
    frame = load_frame(tree, sources, clusters, request.columns())
    add_predictions: AddPredictions | None = None
    if request.predictions:
        # Imported here: other tables need no oracle.
        from hpcbench.predict.cluster_forecasts import ClusterForecasts
        from hpcbench.report.prediction_frames import with_predictions

        add_predictions = functools.partial(with_predictions, forecasts=ClusterForecasts(tree))
    return pivot_view(frame, request, title, add_predictions), frame


def table(
    *sources: str | Path, results: str | Path | None = None, clusters: Sequence[str] | None = None, **options: Any
) -> pl.DataFrame:
    """Return the rows of ``hpcbench table`` as a frame with short column names, in SI units.

        frame = hpcbench.table("scaling", by="strategy,nodes", metrics="samples_per_s")

    Args:
        sources: as in ``load``.
        results: the tree of the sweeps; else ``$HPCBENCH_RESULTS``, else ``results``.
        clusters: only these.
        options: those of the command as text: ``by``, ``pivot``, ``metrics``, ``where``, ``baseline``, ``scaling``,
            ``best``, ``sort``, ``layout``.

    Raises:
        HpcbenchError: there is no such source, column or option.
    """
    choices = ("by", "pivot", "metrics", "where", "baseline", "scaling", "best", "sort", "layout")
    for name in options:
        if name not in choices:
            raise ConfigError(f"table() has no option {name!r}", hint=did_you_mean(name, choices))
    request = parse_table_request(**options)
    tree, names = ResultsTree(results_folder(str(results) if results is not None else None)), [*map(str, sources)]
    if request.is_grouped:
        view, _ = grouped_view(tree, names, clusters, request, "table")
    else:
        frame = load_frame(tree, names, clusters)
        rows = configurations.rows_from_frame(configurations.filter_launches(frame, request.where), request.baseline)
        if request.sort is not None:
            rows = configurations.sort_rows(rows, request.sort)
        view = results_data_view(rows, "table")
    return pl.DataFrame(view.raw, unique_column_names(view), orient="row", infer_schema_length=None, strict=False)
