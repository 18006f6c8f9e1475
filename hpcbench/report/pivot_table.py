"""Tables grouped by chosen keys, with chosen metrics in the cells, including the layouts of the papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.fileio import printable_text
from hpcbench.report.column_names import (
    COMPUTED_COLUMNS,
    DERIVED_COLUMNS,
    PREDICTED_COLUMNS,
    Condition,
    resolve_column,
    short_name,
    source_columns,
    split_option_column,
    with_derived_columns,
    with_option_column,
)
from hpcbench.report.configurations import (
    STEP_TIME,
    THROUGHPUT,
    Scaling,
    aggregate_launches,
    filter_launches,
    ok_results,
    required_columns,
    with_speedups,
)
from hpcbench.report.table_model import Column, View, WarningFootnotes, column_heading, format_spread, format_value
from hpcbench.results.frame import column_types
from hpcbench.results.schema import STATUS_OK

if TYPE_CHECKING:
    import polars


@dataclass(frozen=True)
class TableRequest:
    """What a table is asked for; names are columns."""

    by: tuple[str, ...] = ()
    pivot: str | None = None
    metrics: tuple[str, ...] = ()
    where: Condition | None = None
    baseline: Condition | None = None
    scaling: Scaling | None = None
    best: bool = False
    sort: str | None = None
    """A key or metric; with ``-`` the largest first."""

    @property
    def is_grouped(self) -> bool:
        """Whether configurations are put together, rather than each being a row."""
        return bool(self.by or self.pivot or self.metrics or self.scaling or self.best)

    @property
    def speedups(self) -> bool:
        """Whether a figure against the baseline is asked for."""
        return any(name in COMPUTED_COLUMNS for name in self.metrics)

    @property
    def predictions(self) -> bool:
        """Whether a figure of the oracle is asked for."""
        return any(name in PREDICTED_COLUMNS for name in self.metrics)

    def columns(self) -> list[str]:
        """The columns of a results frame that answer it."""
        named = [*self.by, *([self.pivot] if self.pivot else []), *self.metrics]
        asked = [column for one in (self.where, self.baseline) if one for column in one.columns]
        rank = [THROUGHPUT] if self.best else []
        whole = [STEP_TIME, *(f"spec.{name}" for name in RunSpec.__struct_fields__)] if self.predictions else []
        return required_columns([*source_columns(named), *asked, *rank, *whole, "warnings"], speedups=self.speedups)


def with_defaults(question: TableRequest) -> TableRequest:
    """``question`` with what was left out: how strategies scale, or throughput and step time by strategy."""
    if question.scaling and not question.pivot:
        question = replace(question, pivot="devices")
    if question.scaling and not question.metrics:
        question = replace(question, metrics=(THROUGHPUT, "speedup", "efficiency"))
    if not question.metrics:
        question = replace(question, metrics=("metrics.step_time_s.median", THROUGHPUT))
    if not question.by:
        question = replace(question, by=("devices",) if question.pivot == "spec.strategy" else ("spec.strategy",))
    if question.pivot in question.by:
        raise ConfigError(f"--by and --pivot name the same: {short_name(question.pivot)}", hint="keep one of them")
    return question


TABLE_LAYOUTS: dict[str, TableRequest] = {
    # Jansen et al. (DDLBench), figures 3.1 and 3.2: speed-up over one device by model, data set and framework.
    "ddlbench": TableRequest(
        by=("spec.model", "spec.dataset", "devices"), pivot="spec.strategy", metrics=("speedup",), best=True,
    ),
    # As Kahira et al. 2021 (ParaDL) show theirs: computation and communication of an iteration by strategy and devices.
    "paradl": TableRequest(
        by=("spec.model", "spec.strategy", "devices"),
        metrics=("metrics.compute_s", "metrics.comm_s", "metrics.exposed_comm_s", "metrics.step_time_s.median"),
    ),
}  # fmt: skip


def layout_request(name: str) -> TableRequest:
    """The question that a paper's table answers."""
    if name not in TABLE_LAYOUTS:
        raise ConfigError(f"no layout {name!r}", hint=did_you_mean(name, TABLE_LAYOUTS))
    return TABLE_LAYOUTS[name]


def parse_table_request(**asked: Any) -> TableRequest:
    """The question of ``by, pivot, metrics, where, baseline, scaling, best, sort, layout``; absent ones are ``None``.

    A layout gives what no other option says. Raises ``ConfigError`` for names of no column.
    """
    base = layout_request(asked["layout"]) if asked.get("layout") else TableRequest()
    given: dict[str, Any] = {}
    for option in ("by", "metrics"):
        if asked.get(option):
            given[option] = tuple(resolve_column(name.strip()) for name in asked[option].split(","))
    for name in given.get("metrics", ()):
        if name not in {*COMPUTED_COLUMNS, *DERIVED_COLUMNS, *PREDICTED_COLUMNS} and column_types().get(name) not in (
            "Float64",
            "Int64",
        ):
            raise ConfigError(f"--metric {short_name(name)}: no figure", hint=f"choices: {', '.join(metric_choices())}")
    if asked.get("pivot"):
        given["pivot"] = resolve_column(asked["pivot"])
    for option in ("where", "baseline"):
        if asked.get(option):
            given[option] = Condition(asked[option], f"--{option}")
    for option in ("scaling", "best", "sort"):
        if asked.get(option):
            given[option] = asked[option]
    found = replace(base, **given)
    return with_defaults(found) if found.is_grouped else found


def metric_choices() -> list[str]:
    """What the cells of a table can hold, by their short names."""
    return [
        *COMPUTED_COLUMNS,
        *PREDICTED_COLUMNS,
        *(short_name(name) for name in column_types() if name.startswith("metrics.")),
    ]


MAX_PIVOT_COLUMNS = 60
AddPredictions = Callable[["polars.DataFrame"], "polars.DataFrame"]


class _PivotCell(NamedTuple):
    """What the table says of one combination of keys."""

    row: dict[str, Any]
    warnings: list[str]


def pivot_view(
    frame: polars.DataFrame, question: TableRequest, title: str, foretold: AddPredictions | None = None
) -> View:
    """The cells of ``question`` over ``frame``: each the median of its configurations, or of ``best`` its fastest.

    ``foretold`` adds the oracle's figures to rows of configurations, where the question asks for some.
    Raises ``ConfigError`` where a pivot has too many values to be columns.
    """
    frame = filter_launches(frame, question.where)
    keys = [*question.by, *([question.pivot] if question.pivot else [])]
    cells = _aggregate_cells(frame, question, keys, foretold)
    failed = _failed_statuses(frame, keys)
    found = [_PivotCell(row, _cell_warnings(row)) for row in cells.iter_rows(named=True)]
    marks = WarningFootnotes(found)
    view = (
        _pivoted_view(found, question, failed, marks) if question.pivot else _flat_view(found, question, failed, marks)
    )
    view.title = printable_text(title)
    view.notes = _pivot_notes(found, question)
    view.warnings = marks.texts()
    if any(text.startswith("- ") for row in view.cells for text in row):
        view.notes.append("-: no run of the cell ended well; its status beside it")
    gone = int((frame["status"] != STATUS_OK).sum())
    if gone:
        view.notes.append(
            f"not counted: {gone} run{'s' * (gone > 1)} that did not end well; without --by they are listed"
        )
    return _sorted_view(view, question.sort)


def _aggregate_cells(
    frame: polars.DataFrame, question: TableRequest, keys: list[str], foretold: AddPredictions | None
) -> polars.DataFrame:
    """A row for each combination of keys that was measured."""
    import polars as pl

    rows = ok_results(aggregate_launches(frame))
    if question.predictions:
        assert foretold is not None, "a question for predictions and nobody to make them"
        rows = foretold(rows)
    if question.speedups:
        rows = with_speedups(rows, question.baseline, question.scaling or "weak")
    rows = _with_key_columns(rows, keys)
    if question.best:
        rank = "speedup" if question.speedups else THROUGHPUT
        rows = rows.filter(pl.col(rank).eq_missing(pl.col(rank).max().over(keys))).unique(keys, maintain_order=True)
    bounds = [f"{name}:{side}" for name in question.metrics for side in ("low", "high")]
    warned = [pl.col("warnings").explode().drop_nulls().unique(maintain_order=True)] if "warnings" in rows else []
    cells = rows.group_by(keys).agg(
        *(pl.col(name).median() for name in question.metrics),
        *(pl.col(name).count().alias(f"{name}:configurations") for name in question.metrics),
        # A spread between launches is not one between configurations.
        *(pl.when(pl.len() == 1).then(pl.col(name).first()).alias(name) for name in bounds if name in rows.columns),
        *warned, launches=pl.col("launches").sum(),
    )  # fmt: skip
    return cells.sort(keys, nulls_last=True)


def _with_key_columns(rows: polars.DataFrame, keys: list[str]) -> polars.DataFrame:
    """``rows`` with those of ``keys`` that are products of parameters or options; lists among these as text."""
    import polars as pl

    rows = with_derived_columns(rows)
    for key in keys:
        if split_option_column(key) is not None:
            rows = with_option_column(rows, key)
            if rows.schema[key].is_nested():
                rows = rows.with_columns(
                    pl.Series(key, [None if one is None else str(one) for one in rows[key].to_list()])
                )
    return rows


def _cell_warnings(row: dict[str, Any]) -> list[str]:
    return [text for texts in row.get("warnings", []) for text in msgspec.json.decode(texts)]


def _failed_statuses(frame: polars.DataFrame, keys: list[str]) -> dict[tuple[Any, ...], str]:
    """By key the status of runs that are not ok."""
    import polars as pl

    gone = _with_key_columns(frame.filter((pl.col("status") != STATUS_OK) & pl.col("config_id").is_not_null()), keys)
    return {row[:-1]: row[-1] for row in gone.select([*keys, "status"]).unique(keys, maintain_order=True).iter_rows()}


def _cell_text(column: str, row: dict[str, Any]) -> str:
    if row[column] is None:
        return ""
    count = row[f"{column}:configurations"]
    alike = f" ~{count}" if count > 1 else ""
    return format_spread(column, row[column], row.get(f"{column}:low"), row.get(f"{column}:high")) + alike


def _key_columns(question: TableRequest) -> list[Column]:
    return [
        Column(name, column_heading(name), is_key=True, is_number=not name.startswith("spec.")) for name in question.by
    ]


def _flat_view(
    cells: list[_PivotCell], question: TableRequest, failed: dict[tuple[Any, ...], str], marks: WarningFootnotes
) -> View:
    """A row per key; ``-`` and the status where all runs failed."""
    columns = [*_key_columns(question), *(Column(name, column_heading(name)) for name in question.metrics)]
    columns.append(Column("launches", "launches", can_go=True))
    by_key = {tuple(cell.row[name] for name in question.by): cell for cell in cells}
    view = View("", columns, [], [])
    for key in _sorted_keys([*by_key, *failed]):
        named = [format_value(name, part) for name, part in zip(question.by, key, strict=True)]
        if key in by_key:
            cell = by_key[key]
            view.raw.append([*key, *(cell.row[name] for name in question.metrics), cell.row["launches"]])
            texts = [_cell_text(name, cell.row) for name in question.metrics]
            texts[0] = f"{texts[0]} {marks.of(cell)}".rstrip()
            view.cells.append([*named, *texts, str(cell.row["launches"])])
        else:
            view.raw.append([*key, *(None for _ in question.metrics), 0])
            view.cells.append([*named, f"- {failed[key]}", *("" for _ in question.metrics)])
    return view


def _pivoted_view(
    cells: list[_PivotCell], question: TableRequest, failed: dict[tuple[Any, ...], str], marks: WarningFootnotes
) -> View:
    """A row per key and metric, a column per value of the pivot; ``-`` and the status where all runs failed."""
    assert question.pivot is not None
    by_key = {tuple(cell.row[name] for name in (*question.by, question.pivot)): cell for cell in cells}
    values = [one for (one,) in _sorted_keys([key[-1:] for key in (*by_key, *failed)])]
    if len(values) > MAX_PIVOT_COLUMNS:
        raise ConfigError(
            f"{short_name(question.pivot)} has {len(values)} values; a table has at most {MAX_PIVOT_COLUMNS} "
            f"columns of them",
            hint="choose fewer with --where, or make it a row with --by",
        )
    several = len(question.metrics) > 1
    columns = _key_columns(question)
    columns += [Column("metric", "", is_key=True, is_number=False)] if several else []
    columns += [
        Column(f"{short_name(question.pivot)}={one}", f"{_pivot_heading(question.pivot)}{one}") for one in values
    ]
    view = View("", columns, [], [])
    for key in _sorted_keys([key[:-1] for key in (*by_key, *failed)]):
        named = [format_value(by, part) for by, part in zip(question.by, key, strict=True)]
        across = [(by_key.get((*key, one)), failed.get((*key, one))) for one in values]
        marked = [(cell, f" {marks.of(cell)}".rstrip() if cell else "", why) for cell, why in across]
        for metric in question.metrics:
            if metric in COMPUTED_COLUMNS and not any(cell and cell.row[metric] is not None for cell, _ in across):
                continue
            name = [column_heading(metric)] if several else []
            view.raw.append([*key, *name, *(cell.row[metric] if cell else None for cell, _ in across)])
            view.cells.append([*named, *name, *(_pivot_cell_text(metric, *one) for one in marked)])
            # The first line of a cell bears its marks.
            marked = [(cell, "", why) for cell, _, why in marked]
    return view


def _pivot_cell_text(metric: str, cell: _PivotCell | None, mark: str, why: str | None) -> str:
    if cell is None:
        return f"- {why}" if why else ""
    return _cell_text(metric, cell.row) + mark


def _sorted_keys(keys: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """``keys`` once each, numbers by size before words, what has no value last."""
    return sorted(dict.fromkeys(keys), key=lambda parts: [(part is None, _sort_key(part)) for part in parts])


def _sort_key(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, (int, float)) else (1, str(value))


def _pivot_heading(pivot: str) -> str:
    return "" if pivot == "spec.strategy" else f"{short_name(pivot)} "


def _pivot_notes(cells: list[_PivotCell], question: TableRequest) -> list[str]:
    notes = []
    rows = [cell.row for cell in cells]
    if any(row[f"{name}:configurations"] > 1 for name in question.metrics for row in rows):
        notes.append("~n: the median of n configurations that differ in what is no key (--by); they are not alike")
    if question.best:
        notes.append("of each cell's configurations the one with the most samples/s")
    if any(row.get(f"{name}:low") is not None for name in question.metrics for row in rows):
        notes.append("[ ]: the least and the most of several launches, or the 95 % interval within the only one")
    if question.predictions:
        notes.append("predicted: by the oracle, see predict; error: (predicted - measured) / measured step time")
        if any(row[name] is None for name in question.metrics if name in PREDICTED_COLUMNS for row in rows):
            notes.append("without a prediction: validate says why")
    if question.speedups:
        same = "the same global batch" if question.scaling == "strong" else "the same batch per replica"
        base = f"the row with {question.baseline.expression.text}" if question.baseline else "one device"
        notes.append(f"speed-up: samples/s over that of {base} with {same}; eff.: speed-up per device")
        computed = [name for name in question.metrics if name in COMPUTED_COLUMNS]
        if any(row[name] is None for name in computed for row in rows):
            notes.append("without a speed-up: no such baseline was measured; another can be named with --baseline")
    return notes


def _sorted_view(view: View, by: str | None) -> View:
    if by is None:
        return view
    name = by.removeprefix("-")
    names = [column.name for column in view.columns]
    wanted = name if name in names else resolve_column(name)
    if wanted not in names:
        shown = [short_name(one) for one in names]
        raise ConfigError(f"--sort {name}: no column of this table", hint=did_you_mean(name, shown))
    place = names.index(wanted)
    order = list(range(len(view.raw)))
    there = [row for row in order if view.raw[row][place] is not None]
    there.sort(key=lambda row: _sort_key(view.raw[row][place]), reverse=by.startswith("-"))
    order = there + [row for row in order if view.raw[row][place] is None]
    view.raw, view.cells = [view.raw[row] for row in order], [view.cells[row] for row in order]
    return view
