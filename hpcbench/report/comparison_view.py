"""Rows of a comparison or of a check against bands, as a table and as JUnit XML."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from xml.etree import ElementTree

import polars

from hpcbench.config.run_spec import RunSpec, run_label
from hpcbench.config.toml_tables import TomlSource
from hpcbench.errors import ConfigError
from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.report import comparison
from hpcbench.report.column_names import Condition, own_units, resolve_column, with_own_metrics
from hpcbench.report.configurations import aggregate_launches, filter_launches, ok_results, run_spec_of
from hpcbench.report.hypothesis_tests import INCONCLUSIVE, SIGNIFICANCE_LEVEL
from hpcbench.report.results_table import data_column, identity_columns, parameter_column, split_parameters
from hpcbench.report.table_model import View, format_value, short_name, text_column
from hpcbench.units import format_percent, pluralize

WITHIN_BAND, OUTSIDE_BAND, NO_MATCHING_RUN = "within", "outside", "nothing fits"
BAND_VERDICTS = (OUTSIDE_BAND, NO_MATCHING_RUN, WITHIN_BAND)
VERDICT_ORDER = (*BAND_VERDICTS[:2], *comparison.COMPARISON_VERDICTS, WITHIN_BAND)


@dataclass(frozen=True)
class ComparisonRow:
    """``base`` and ``new`` in SI units; ``ratio`` of new over base with its interval, where there is one."""

    metric: str
    cluster: str
    config_id: str
    spec: RunSpec | None
    verdict: str
    reason: str
    base: float | None = None
    new: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    chance: float | None = None
    launches_base: int = 0
    launches_new: int = 0
    band: str | None = None
    """The condition of a band."""
    unit: str | None = None
    """Unit of a command's metric."""

    @property
    def run_ids(self) -> list[str]:
        """The name of a row without a specification."""
        return [self.band or ""]

    @property
    def is_regression(self) -> bool:
        """Whether a comparison with this row ends with an error."""
        return self.verdict in comparison.REGRESSIONS or self.verdict in BAND_VERDICTS[:2]


def rows_from_pairs(
    pairs: Sequence[comparison.ConfigurationPair], column: str, unit: str | None = None
) -> list[ComparisonRow]:
    """The rows of judged pairs; ``unit`` is that of a command's metric."""
    return [
        ComparisonRow(
            column, pair.cluster, pair.config_id, pair.spec, pair.verdict, pair.reason,
            base=statistics.median(pair.base) if pair.base else None,
            new=statistics.median(pair.new) if pair.new else None,
            ratio=comparison.change_ratio(pair),
            ratio_low=math.exp(pair.shift.low) if pair.shift else None,
            ratio_high=math.exp(pair.shift.high) if pair.shift else None,
            chance=pair.chance, launches_base=len(pair.base), launches_new=len(pair.new), unit=unit,
        )
        for pair in pairs
    ]  # fmt: skip


def rows_from_bands(
    frame: polars.DataFrame, bands: Sequence[comparison.Band], source: TomlSource
) -> list[ComparisonRow]:
    """The rows of configurations in ``frame`` that bands refer to, by the median of their launches.

    A band without any matching run is a row too: a check of nothing must not pass.

    Raises:
        ConfigError: a band's metric is not a column, or its condition is invalid; with file and line of ``source``.
    """
    rows = []
    for number, band in enumerate(bands):
        where = source.where(("band", number, "where"))
        try:
            column = resolve_column(band.metric)
        except ConfigError as error:
            location = source.where(("band", number, "metric"))
            raise ConfigError(error.message, where=location, hint=error.hint) from None
        launches = filter_launches(with_own_metrics(frame, [column]), Condition(band.where, where))
        matching = ok_results(aggregate_launches(launches))
        measured = [row for row in matching.iter_rows(named=True) if row[column] is not None]
        rows += [_row_from_band(row, column, band, own_units(frame).get(column)) for row in measured]
        if not measured:
            rows.append(ComparisonRow(
                column, "", "", None, NO_MATCHING_RUN, f"{where}: {band.where}: no run was measured",
                base=band.si_value, band=band.where,
            ))  # fmt: skip
    return rows


def _row_from_band(row: dict[str, Any], column: str, band: comparison.Band, unit: str | None) -> ComparisonRow:
    ratio = row[column] / band.si_value
    low, high = band.low, band.high
    below, above = low is not None and ratio < 1 + low, high is not None and ratio > 1 + high
    allowed = f"[{format_percent(low, sign='+')} {format_percent(high, sign='+')}]"
    return ComparisonRow(
        column, row["cluster"], row["config_id"], run_spec_of(row), OUTSIDE_BAND if below or above else WITHIN_BAND,
        f"{'below' if below else 'above'} the band {allowed}" if below or above else "",
        base=band.si_value, new=row[column], ratio=ratio, launches_new=row["launches"], band=band.where,
        unit=unit,
    )  # fmt: skip


def worst_first(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """``rows`` by verdict, and within a verdict the largest change first."""
    return sorted(rows, key=lambda row: (VERDICT_ORDER.index(row.verdict), -abs(math.log(row.ratio or 1))))


def verdict_summary(rows: Sequence[ComparisonRow]) -> str:
    """``1 worse, 3 equivalent, 2 inconclusive``."""
    counts = Counter(row.verdict for row in rows)
    words = [f"{counts[verdict]} {verdict_word(verdict, rows)}" for verdict in VERDICT_ORDER if counts[verdict]]
    return ", ".join(words) or "nothing to compare"


def verdict_word(verdict: str, rows: Sequence[ComparisonRow]) -> str:
    """The printed word for ``verdict``: ``slower`` and ``faster`` where only times and rates are compared."""
    is_timed = all(short_name(row.metric).endswith("_s") or row.metric.endswith(".median") for row in rows)
    words = {comparison.WORSE: "slower", comparison.BETTER: "faster"} if is_timed else {}
    return words.get(verdict, verdict)


def inconclusive_reasons(rows: Sequence[ComparisonRow]) -> list[str]:
    """Each reason of inconclusive rows once, with its number of rows."""
    reasons = Counter(row.reason for row in rows if row.verdict == INCONCLUSIVE)
    return [f"inconclusive, {pluralize(count, 'row')}: {reason}" for reason, count in reasons.items()]


_DATA_FIELDS = [name for name in ComparisonRow.__dataclass_fields__ if name != "spec"]
_SPEC_PARAMETERS = ("model", "dataset", "strategy", "nodes", "tasks_per_node", "batch_size", "precision")


def comparison_text_view(rows: Sequence[ComparisonRow], title: str, notes: Sequence[str], threshold: float) -> View:
    """The table for readers: configuration, base, new, change and verdict; the worst first."""
    rows = worst_first(rows)
    metrics = {row.metric for row in rows}
    varying, shared = split_parameters([row.spec for row in rows if row.spec is not None])
    columns = identity_columns(rows, varying)
    if len(metrics) > 1:
        columns.append(text_column("metric", lambda row: short_name(row.metric), is_key=True))
    columns += [
        text_column("base", lambda row: format_value(row.metric, row.base, row.unit), is_number=True),
        text_column("new", lambda row: format_value(row.metric, row.new, row.unit), is_number=True),
        text_column("change [95 %]", _change_text, is_number=True),
        text_column("verdict", lambda row: verdict_word(row.verdict, rows)),
        text_column("launches", lambda row: f"{row.launches_base or '-'}:{row.launches_new or '-'}", is_number=True,
                    optional=True),
    ]  # fmt: skip
    subject = short_name(next(iter(metrics))) if len(metrics) == 1 else "metrics"
    least = format_percent(threshold, 1)
    legend = (
        f"{verdict_word('worse', rows)}, {verdict_word('better', rows)}: change of at least {least}, "
        f"family-wise significance {format_percent(SIGNIFICANCE_LEVEL)}; "
        f"equivalent: the 95 % interval is within {least}"
    )
    has_comparisons = any(row.verdict not in BAND_VERDICTS for row in rows)
    leading_notes = [*([f"all: {shared}"] if shared else []), *([legend] if has_comparisons else [])]
    notes = [*leading_notes, *notes, *inconclusive_reasons(rows)]
    warnings = [
        f"{_row_name(row)}: {verdict_word(row.verdict, rows)}: {row.reason}"
        for row in rows if row.is_regression and row.reason
    ]  # fmt: skip
    title = f"{printable_text(title)}, {subject}: {verdict_summary(rows)}"
    return View.from_rows(title, columns, rows, notes, warnings)


def comparison_data_view(rows: Sequence[ComparisonRow], title: str, notes: Sequence[str]) -> View:
    """The table for programs: figures in SI units."""
    columns = [parameter_column(name) for name in _SPEC_PARAMETERS]
    columns += [data_column(name, attrgetter(name)) for name in _DATA_FIELDS]
    return View.from_rows(printable_text(title), columns, worst_first(rows), notes)


def _change_text(row: ComparisonRow) -> str:
    if row.ratio is None:
        return ""
    if row.ratio_low is None or row.ratio_high is None:
        return format_percent(row.ratio - 1, 1, sign="+")
    change = format_percent(row.ratio - 1, 1, sign="+")
    return f"{change} [{(row.ratio_low - 1) * 100:+.1f} {(row.ratio_high - 1) * 100:+.1f}]"


def _row_name(row: ComparisonRow) -> str:
    return f"{run_label(row.spec)} ({row.config_id})" if row.spec is not None else row.band or row.config_id


def junit_xml(rows: Sequence[ComparisonRow], title: str) -> bytes:
    """One JUnit test per row: failed for a regression, skipped if inconclusive."""
    regressions = sum(row.is_regression for row in rows)
    inconclusive = sum(row.verdict == INCONCLUSIVE for row in rows)
    counts = {"tests": str(len(rows)), "failures": str(regressions), "skipped": str(inconclusive), "errors": "0"}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": _xml_text(title), **counts})
    for row in worst_first(rows):
        name = _xml_text(f"{short_name(row.metric)}: {_row_name(row)}")
        case = ElementTree.SubElement(
            suite, "testcase", classname=_xml_text(f"hpcbench.compare.{row.cluster}"), name=name
        )
        text = _xml_text(" ".join(filter(None, [verdict_word(row.verdict, rows), _change_text(row), row.reason])))
        if row.is_regression:
            ElementTree.SubElement(case, "failure", type=row.verdict, message=text).text = text
        elif row.verdict == INCONCLUSIVE:
            ElementTree.SubElement(case, "skipped", message=text)
    ElementTree.indent(suites, space="")
    document: bytes = ElementTree.tostring(suites, encoding="UTF-8", xml_declaration=True)
    return document + b"\n"


def _xml_text(text: str) -> str:
    """``text`` without line breaks and characters that XML cannot contain."""
    return re.sub("[\ufffe\uffff]", "\ufffd", printable_excerpt(text).replace("\n", " "))
