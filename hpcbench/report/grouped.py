"""Tables by keys: rows and columns of chosen parameters, chosen metrics in the cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.fileio import printable
from hpcbench.report.ask import Question
from hpcbench.report.groups import RATE, chosen, configurations, measured, with_speedups
from hpcbench.report.marks import Marks
from hpcbench.report.names import COMPUTED, PREDICTED, column_of, option_of, short_of, with_derived, with_option
from hpcbench.report.view import Column, View, format_spread, format_value, heading_of
from hpcbench.results.schema import OK

if TYPE_CHECKING:
    import polars

MOST_COLUMNS = 60
Foretold = Callable[["polars.DataFrame"], "polars.DataFrame"]


class _Cell(NamedTuple):
    """What the table says of one combination of keys."""

    row: dict[str, Any]
    warnings: list[str]


def grouped_view(frame: polars.DataFrame, question: Question, title: str, foretold: Foretold | None = None) -> View:
    """The cells of ``question`` over ``frame``: each the median of its configurations, or of ``best`` its fastest.

    ``foretold`` adds the oracle's figures to rows of configurations, where the question asks for some.
    Raises ``ConfigError`` where a pivot has too many values to be columns.
    """
    frame = chosen(frame, question.where)
    keys = [*question.by, *([question.pivot] if question.pivot else [])]
    cells = _cells(frame, question, keys, foretold)
    failed = _failed(frame, keys)
    found = [_Cell(row, _warnings(row)) for row in cells.iter_rows(named=True)]
    marks = Marks(found)
    view = _pivoted(found, question, failed, marks) if question.pivot else _plain(found, question, failed, marks)
    view.title = printable(title)
    view.notes = _notes(found, question)
    view.warnings = marks.texts()
    if any(text.startswith("- ") for row in view.cells for text in row):
        view.notes.append("-: no run of the cell ended well; its status beside it")
    gone = int((frame["status"] != OK).sum())
    if gone:
        view.notes.append(
            f"not counted: {gone} run{'s' * (gone > 1)} that did not end well; without --by they are listed"
        )
    return _sorted(view, question.sort)


def _cells(frame: polars.DataFrame, question: Question, keys: list[str], foretold: Foretold | None) -> polars.DataFrame:
    """A row for each combination of keys that was measured."""
    import polars as pl

    rows = measured(configurations(frame))
    if question.predictions:
        assert foretold is not None, "a question for predictions and nobody to make them"
        rows = foretold(rows)
    if question.speedups:
        rows = with_speedups(rows, question.baseline, question.scaling or "weak")
    rows = _with_keys(rows, keys)
    if question.best:
        rank = "speedup" if question.speedups else RATE
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


def _with_keys(rows: polars.DataFrame, keys: list[str]) -> polars.DataFrame:
    """``rows`` with those of ``keys`` that are products of parameters or options; lists among these as text."""
    import polars as pl

    rows = with_derived(rows)
    for key in keys:
        if option_of(key) is not None:
            rows = with_option(rows, key)
            if rows.schema[key].is_nested():
                rows = rows.with_columns(
                    pl.Series(key, [None if one is None else str(one) for one in rows[key].to_list()])
                )
    return rows


def _warnings(row: dict[str, Any]) -> list[str]:
    return [text for texts in row.get("warnings", []) for text in msgspec.json.decode(texts)]


def _failed(frame: polars.DataFrame, keys: list[str]) -> dict[tuple[Any, ...], str]:
    """By key the status of runs that are not ok."""
    import polars as pl

    gone = _with_keys(frame.filter((pl.col("status") != OK) & pl.col("config_id").is_not_null()), keys)
    return {row[:-1]: row[-1] for row in gone.select([*keys, "status"]).unique(keys, maintain_order=True).iter_rows()}


def _text(column: str, row: dict[str, Any]) -> str:
    if row[column] is None:
        return ""
    count = row[f"{column}:configurations"]
    alike = f" ~{count}" if count > 1 else ""
    return format_spread(column, row[column], row.get(f"{column}:low"), row.get(f"{column}:high")) + alike


def _keys(question: Question) -> list[Column]:
    return [Column(name, heading_of(name), is_key=True, is_number=not name.startswith("spec.")) for name in question.by]


def _plain(cells: list[_Cell], question: Question, failed: dict[tuple[Any, ...], str], marks: Marks) -> View:
    """A row per key; ``-`` and the status where all runs failed."""
    columns = [*_keys(question), *(Column(name, heading_of(name)) for name in question.metrics)]
    columns.append(Column("launches", "launches", can_go=True))
    by_key = {tuple(cell.row[name] for name in question.by): cell for cell in cells}
    view = View("", columns, [], [])
    for key in _in_order([*by_key, *failed]):
        named = [format_value(name, part) for name, part in zip(question.by, key, strict=True)]
        if key in by_key:
            cell = by_key[key]
            view.raw.append([*key, *(cell.row[name] for name in question.metrics), cell.row["launches"]])
            texts = [_text(name, cell.row) for name in question.metrics]
            texts[0] = f"{texts[0]} {marks.of(cell)}".rstrip()
            view.cells.append([*named, *texts, str(cell.row["launches"])])
        else:
            view.raw.append([*key, *(None for _ in question.metrics), 0])
            view.cells.append([*named, f"- {failed[key]}", *("" for _ in question.metrics)])
    return view


def _pivoted(cells: list[_Cell], question: Question, failed: dict[tuple[Any, ...], str], marks: Marks) -> View:
    """A row per key and metric, a column per value of the pivot; ``-`` and the status where all runs failed."""
    assert question.pivot is not None
    by_key = {tuple(cell.row[name] for name in (*question.by, question.pivot)): cell for cell in cells}
    values = [one for (one,) in _in_order([key[-1:] for key in (*by_key, *failed)])]
    if len(values) > MOST_COLUMNS:
        raise ConfigError(
            f"{short_of(question.pivot)} has {len(values)} values; a table has at most {MOST_COLUMNS} columns of them",
            hint="choose fewer with --where, or make it a row with --by",
        )
    several = len(question.metrics) > 1
    columns = _keys(question)
    columns += [Column("metric", "", is_key=True, is_number=False)] if several else []
    columns += [Column(f"{short_of(question.pivot)}={one}", f"{_pivot_heading(question.pivot)}{one}") for one in values]
    view = View("", columns, [], [])
    for key in _in_order([key[:-1] for key in (*by_key, *failed)]):
        named = [format_value(by, part) for by, part in zip(question.by, key, strict=True)]
        across = [(by_key.get((*key, one)), failed.get((*key, one))) for one in values]
        marked = [(cell, f" {marks.of(cell)}".rstrip() if cell else "", why) for cell, why in across]
        for metric in question.metrics:
            if metric in COMPUTED and not any(cell and cell.row[metric] is not None for cell, _ in across):
                continue
            name = [heading_of(metric)] if several else []
            view.raw.append([*key, *name, *(cell.row[metric] if cell else None for cell, _ in across)])
            view.cells.append([*named, *name, *(_pivot_text(metric, *one) for one in marked)])
            # The first line of a cell bears its marks.
            marked = [(cell, "", why) for cell, _, why in marked]
    return view


def _pivot_text(metric: str, cell: _Cell | None, mark: str, why: str | None) -> str:
    if cell is None:
        return f"- {why}" if why else ""
    return _text(metric, cell.row) + mark


def _in_order(keys: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """``keys`` once each, numbers by size before words, what has no value last."""
    return sorted(dict.fromkeys(keys), key=lambda parts: [(part is None, _orderable(part)) for part in parts])


def _orderable(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, (int, float)) else (1, str(value))


def _pivot_heading(pivot: str) -> str:
    return "" if pivot == "spec.strategy" else f"{short_of(pivot)} "


def _notes(cells: list[_Cell], question: Question) -> list[str]:
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
        if any(row[name] is None for name in question.metrics if name in PREDICTED for row in rows):
            notes.append("without a prediction: validate says why")
    if question.speedups:
        same = "the same global batch" if question.scaling == "strong" else "the same batch per replica"
        base = f"the row with {question.baseline.expression.text}" if question.baseline else "one device"
        notes.append(f"speed-up: samples/s over that of {base} with {same}; eff.: speed-up per device")
        computed = [name for name in question.metrics if name in COMPUTED]
        if any(row[name] is None for name in computed for row in rows):
            notes.append("without a speed-up: no such baseline was measured; another can be named with --baseline")
    return notes


def _sorted(view: View, by: str | None) -> View:
    if by is None:
        return view
    name = by.removeprefix("-")
    names = [column.name for column in view.columns]
    wanted = name if name in names else column_of(name)
    if wanted not in names:
        shown = [short_of(one) for one in names]
        raise ConfigError(f"--sort {name}: no column of this table", hint=did_you_mean(name, shown))
    place = names.index(wanted)
    order = list(range(len(view.raw)))
    there = [row for row in order if view.raw[row][place] is not None]
    there.sort(key=lambda row: _orderable(view.raw[row][place]), reverse=by.startswith("-"))
    order = there + [row for row in order if view.raw[row][place] is None]
    view.raw, view.cells = [view.raw[row] for row in order], [view.cells[row] for row in order]
    return view
