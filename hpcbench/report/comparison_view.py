"""Rows of a comparison or of a check against reference bands, as a table and as JUnit XML."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

from hpcbench.config.reference_bands import ReferenceBand
from hpcbench.config.run_spec import RunSpec, run_label
from hpcbench.config.toml_tables import TomlSource
from hpcbench.errors import ConfigError
from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.report.column_names import Condition, resolve_column, short_name
from hpcbench.report.comparison import (
    COMPARISON_VERDICTS,
    INCONCLUSIVE,
    REGRESSIONS,
    SIGNIFICANCE_LEVEL,
    ConfigurationPair,
    change_ratio,
)
from hpcbench.report.configurations import ResultRow, aggregate_launches, filter_launches, ok_results, run_spec_of
from hpcbench.report.results_table import identity_columns, split_parameters
from hpcbench.report.table_model import Column, View, format_value

if TYPE_CHECKING:
    import polars

WITHIN_BAND, OUTSIDE_BAND, NO_MATCHING_RUN = "within", "outside", "nothing fits"
BAND_VERDICTS = (OUTSIDE_BAND, NO_MATCHING_RUN, WITHIN_BAND)
VERDICT_ORDER = (*BAND_VERDICTS[:2], *COMPARISON_VERDICTS, WITHIN_BAND)


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
    reference: str | None = None
    """Of a band: its condition."""

    @property
    def is_regression(self) -> bool:
        """Whether it is one that a comparison must not end well with."""
        return self.verdict in REGRESSIONS or self.verdict in BAND_VERDICTS[:2]


def rows_from_pairs(pairs: Sequence[ConfigurationPair], column: str) -> list[ComparisonRow]:
    """Findings of judged pairs."""
    return [_row_from_pair(pair, column) for pair in pairs]


def _row_from_pair(pair: ConfigurationPair, column: str) -> ComparisonRow:
    moved = pair.shift
    return ComparisonRow(
        column, pair.cluster, pair.config_id, pair.spec, pair.verdict, pair.reason,
        base=statistics.median(pair.base) if pair.base else None,
        new=statistics.median(pair.new) if pair.new else None,
        ratio=change_ratio(pair),
        ratio_low=math.exp(moved.low) if moved else None, ratio_high=math.exp(moved.high) if moved else None,
        chance=pair.chance, launches_base=len(pair.base), launches_new=len(pair.new),
    )  # fmt: skip


def rows_from_references(
    frame: polars.DataFrame, references: Sequence[ReferenceBand], source: TomlSource
) -> list[ComparisonRow]:
    """Findings of the configurations in ``frame``, by the median of their launches.

    A reference that nothing fits is a finding too: a check that looks at nothing must not pass.
    """
    found = []
    for number, reference in enumerate(references):
        where = source.where(("reference", number, "where"))
        try:
            column = resolve_column(reference.metric)
        except ConfigError as error:
            raise ConfigError(
                error.message, where=source.where(("reference", number, "metric")), hint=error.hint
            ) from None
        rows = ok_results(aggregate_launches(filter_launches(frame, Condition(reference.where, where))))
        values = [row for row in rows.iter_rows(named=True) if row[column] is not None]
        found += [_row_from_reference(row, column, reference) for row in values]
        if not values:
            found.append(ComparisonRow(
                column, "", "", None, NO_MATCHING_RUN, f"{where}: {reference.where}: no run was measured",
                base=reference.si_value, reference=reference.where,
            ))  # fmt: skip
    return found


def _row_from_reference(row: dict[str, object], column: str, reference: ReferenceBand) -> ComparisonRow:
    value = row[column]
    launches = row["launches"]
    assert isinstance(value, (int, float))
    assert isinstance(launches, int)
    ratio = value / reference.si_value
    low = 1 + reference.low if reference.low is not None else None
    high = 1 + reference.high if reference.high is not None else None
    below, above = low is not None and ratio < low, high is not None and ratio > high
    band = f"[{'' if low is None else f'{low - 1:+.0%}'} {'' if high is None else f'{high - 1:+.0%}'}]"
    return ComparisonRow(
        column, str(row["cluster"]), str(row["config_id"]), run_spec_of(row),
        OUTSIDE_BAND if below or above else WITHIN_BAND,
        f"{'below' if below else 'above'} the band {band}" if below or above else "",
        base=reference.si_value, new=value, ratio=ratio, launches_new=launches, reference=reference.where,
    )  # fmt: skip


def worst_first(findings: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The worst first, and of these the largest change."""
    return sorted(findings, key=lambda one: (VERDICT_ORDER.index(one.verdict), -abs(math.log(one.ratio or 1))))


def verdict_summary(findings: Sequence[ComparisonRow]) -> str:
    """``1 worse, 3 alike, 2 cannot tell``."""
    counts = {verdict: sum(one.verdict == verdict for one in findings) for verdict in VERDICT_ORDER}
    return (
        ", ".join(f"{count} {verdict_word(verdict, findings)}" for verdict, count in counts.items() if count)
        or "nothing to compare"
    )


def verdict_word(verdict: str, findings: Sequence[ComparisonRow]) -> str:
    """``slower`` and ``faster`` where only times and rates were compared."""
    timed = all(short_name(one.metric).endswith("_s") or one.metric.endswith(".median") for one in findings)
    return {"worse": "slower", "better": "faster"}.get(verdict, verdict) if timed else verdict


def inconclusive_reasons(findings: Sequence[ComparisonRow]) -> list[str]:
    """Why nothing can be told, each reason once."""
    reasons: dict[str, int] = {}
    for one in findings:
        if one.verdict == INCONCLUSIVE:
            reasons[one.reason] = reasons.get(one.reason, 0) + 1
    return [f"cannot tell, {count} row{'s' * (count > 1)}: {reason}" for reason, count in reasons.items()]


_DATA_FIELDS = [name for name in ComparisonRow.__dataclass_fields__ if name != "spec"]
_SPEC_PARAMETERS = ("model", "dataset", "strategy", "nodes", "tasks_per_node", "batch_size", "precision")


def comparison_text_view(findings: Sequence[ComparisonRow], title: str, notes: Sequence[str], threshold: float) -> View:
    """The table for people: what tells the configurations apart, base, new, change and verdict; the worst first."""
    ordered = worst_first(findings)
    rows = [ResultRow(one.cluster, one.config_id, one.spec, "", run_ids=[one.reference or ""]) for one in ordered]
    varying, shared = split_parameters([row.spec for row in rows if row.spec is not None])
    named = identity_columns(rows, varying)
    heads = [column.heading for column in named]
    columns = [Column(head, head, is_key=True, is_number=one.is_number) for head, one in zip(heads, named, strict=True)]
    metrics = {one.metric for one in ordered}
    columns += [Column("metric", "metric", is_key=True, is_number=False)] if len(metrics) > 1 else []
    columns += [Column(name, name) for name in ("base", "new", "change [95 %]")]
    columns += [Column("verdict", "verdict", is_number=False), Column("launches", "launches", can_go=True)]
    cells = [
        [
            *(column.cell(row) for column in named), *([short_name(one.metric)] if len(metrics) > 1 else []),
            format_value(one.metric, one.base), format_value(one.metric, one.new), _change_text(one),
            verdict_word(one.verdict, ordered), f"{one.launches_base or '-'}:{one.launches_new or '-'}",
        ]
        for row, one in zip(rows, ordered, strict=True)
    ]  # fmt: skip
    what = short_name(next(iter(metrics))) if len(metrics) == 1 else "metrics"
    view = View(
        f"{printable_text(title)}, {what}: {verdict_summary(ordered)}", columns, [[*row] for row in cells], cells
    )
    view.notes = [
        *([f"all: {shared}"] if shared else []),
        *_verdict_legend(ordered, threshold),
        *notes,
        *inconclusive_reasons(ordered),
    ]
    view.warnings = [
        f"{_row_name(one)}: {verdict_word(one.verdict, ordered)}: {one.reason}"
        for one in ordered if one.is_regression and one.reason
    ]  # fmt: skip
    return view


def comparison_data_view(findings: Sequence[ComparisonRow], title: str, notes: Sequence[str]) -> View:
    """The table for programs: figures in SI units."""
    ordered = worst_first(findings)
    names = [*_SPEC_PARAMETERS, *_DATA_FIELDS]
    raw = [
        [*(getattr(one.spec, name, None) for name in _SPEC_PARAMETERS), *(getattr(one, name) for name in _DATA_FIELDS)]
        for one in ordered
    ]
    cells = [["" if value is None else str(value) for value in row] for row in raw]
    return View(printable_text(title), [Column(name, name) for name in names], raw, cells, [*notes])


def _change_text(one: ComparisonRow) -> str:
    if one.ratio is None:
        return ""
    if one.ratio_low is None or one.ratio_high is None:
        return f"{one.ratio - 1:+.1%}"
    return f"{one.ratio - 1:+.1%} [{(one.ratio_low - 1) * 100:+.1f} {(one.ratio_high - 1) * 100:+.1f}]"


def _verdict_legend(findings: Sequence[ComparisonRow], threshold: float) -> list[str]:
    if all(one.verdict in BAND_VERDICTS for one in findings):
        return []
    worse, better = verdict_word("worse", findings), verdict_word("better", findings)
    return [
        f"{worse}, {better}: by {threshold:.1%} or more, where chance makes one of all rows so in "
        f"{SIGNIFICANCE_LEVEL:.0%} of "
        f"comparisons; alike: the 95 % interval is within {threshold:.1%}"
    ]


def _row_name(one: ComparisonRow) -> str:
    return f"{run_label(one.spec)} ({one.config_id})" if one.spec is not None else one.reference or one.config_id


def junit_xml(findings: Sequence[ComparisonRow], title: str) -> bytes:
    """A test for each finding: failed for a regression, skipped where nothing can be told."""
    failures = sum(one.is_regression for one in findings)
    skipped = sum(one.verdict == INCONCLUSIVE for one in findings)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    counts = f'tests="{len(findings)}" failures="{failures}" skipped="{skipped}" errors="0"'
    lines += [f"<testsuites {counts}>", f"<testsuite name={_xml_attribute(title)} {counts}>"]
    for one in worst_first(findings):
        name = f"{short_name(one.metric)}: {_row_name(one)}"
        case = f"<testcase classname={_xml_attribute(f'hpcbench.compare.{one.cluster}')} name={_xml_attribute(name)}"
        text = " ".join(filter(None, [verdict_word(one.verdict, findings), _change_text(one), one.reason]))
        inner = ""
        if one.is_regression:
            attributes = f"type={_xml_attribute(one.verdict)} message={_xml_attribute(text)}"
            inner = f"<failure {attributes}>{_xml_text(text)}</failure>"
        elif one.verdict == INCONCLUSIVE:
            inner = f"<skipped message={_xml_attribute(text)}/>"
        lines.append(f"{case}>{inner}</testcase>")
    return "\n".join([*lines, "</testsuite>", "</testsuites>"]).encode() + b"\n"


def _xml_attribute(text: str) -> str:
    return quoteattr(_without_invalid_xml(text))


def _xml_text(text: str) -> str:
    return escape(_without_invalid_xml(text))


def _without_invalid_xml(text: str) -> str:
    """``text`` without what XML has no way to say."""
    return re.sub("[\ufffe\uffff]", "\ufffd", printable_excerpt(text).replace("\n", " "))
