"""A comparison as a table, and as JUnit's XML for a CI server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from hpcbench.config.spec import label
from hpcbench.fileio import brief, printable
from hpcbench.report.compare import CANNOT_TELL, LEVEL
from hpcbench.report.findings import BAND_VERDICTS, Finding, headline, in_order, why_not, word_of
from hpcbench.report.names import short_of
from hpcbench.report.rows import Row
from hpcbench.report.tables import identity_columns, split_parameters
from hpcbench.report.view import Column, View, format_value

_DATA = [name for name in Finding.__dataclass_fields__ if name != "spec"]
_PARAMETERS = ("model", "dataset", "strategy", "nodes", "tasks_per_node", "batch_size", "precision")


def text_view(findings: Sequence[Finding], title: str, notes: Sequence[str], threshold: float) -> View:
    """The table for people: what tells the configurations apart, base, new, change and verdict; the worst first."""
    ordered = in_order(findings)
    rows = [Row(one.cluster, one.config_id, one.spec, "", run_ids=[one.reference or ""]) for one in ordered]
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
            *(column.cell(row) for column in named), *([short_of(one.metric)] if len(metrics) > 1 else []),
            format_value(one.metric, one.base), format_value(one.metric, one.new), _change(one),
            word_of(one.verdict, ordered), f"{one.launches_base or '-'}:{one.launches_new or '-'}",
        ]
        for row, one in zip(rows, ordered, strict=True)
    ]  # fmt: skip
    what = short_of(next(iter(metrics))) if len(metrics) == 1 else "metrics"
    view = View(f"{printable(title)}, {what}: {headline(ordered)}", columns, [[*row] for row in cells], cells)
    view.notes = [*([f"all: {shared}"] if shared else []), *_legend(ordered, threshold), *notes, *why_not(ordered)]
    view.warnings = [
        f"{_name(one)}: {word_of(one.verdict, ordered)}: {one.reason}"
        for one in ordered if one.is_regression and one.reason
    ]  # fmt: skip
    return view


def data_view(findings: Sequence[Finding], title: str, notes: Sequence[str]) -> View:
    """The table for programs: figures in SI units."""
    ordered = in_order(findings)
    names = [*_PARAMETERS, *_DATA]
    raw = [
        [*(getattr(one.spec, name, None) for name in _PARAMETERS), *(getattr(one, name) for name in _DATA)]
        for one in ordered
    ]
    cells = [["" if value is None else str(value) for value in row] for row in raw]
    return View(printable(title), [Column(name, name) for name in names], raw, cells, [*notes])


def _change(one: Finding) -> str:
    if one.ratio is None:
        return ""
    if one.ratio_low is None or one.ratio_high is None:
        return f"{one.ratio - 1:+.1%}"
    return f"{one.ratio - 1:+.1%} [{(one.ratio_low - 1) * 100:+.1f} {(one.ratio_high - 1) * 100:+.1f}]"


def _legend(findings: Sequence[Finding], threshold: float) -> list[str]:
    if all(one.verdict in BAND_VERDICTS for one in findings):
        return []
    worse, better = word_of("worse", findings), word_of("better", findings)
    return [
        f"{worse}, {better}: by {threshold:.1%} or more, where chance makes one of all rows so in {LEVEL:.0%} of "
        f"comparisons; alike: the 95 % interval is within {threshold:.1%}"
    ]


def _name(one: Finding) -> str:
    return f"{label(one.spec)} ({one.config_id})" if one.spec is not None else one.reference or one.config_id


def junit(findings: Sequence[Finding], title: str) -> bytes:
    """A test for each finding: failed for a regression, skipped where nothing can be told."""
    failures = sum(one.is_regression for one in findings)
    skipped = sum(one.verdict == CANNOT_TELL for one in findings)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    counts = f'tests="{len(findings)}" failures="{failures}" skipped="{skipped}" errors="0"'
    lines += [f"<testsuites {counts}>", f"<testsuite name={_attribute(title)} {counts}>"]
    for one in in_order(findings):
        name = f"{short_of(one.metric)}: {_name(one)}"
        case = f"<testcase classname={_attribute(f'hpcbench.compare.{one.cluster}')} name={_attribute(name)}"
        text = " ".join(filter(None, [word_of(one.verdict, findings), _change(one), one.reason]))
        inner = ""
        if one.is_regression:
            inner = f"<failure type={_attribute(one.verdict)} message={_attribute(text)}>{_escaped(text)}</failure>"
        elif one.verdict == CANNOT_TELL:
            inner = f"<skipped message={_attribute(text)}/>"
        lines.append(f"{case}>{inner}</testcase>")
    return "\n".join([*lines, "</testsuite>", "</testsuites>"]).encode() + b"\n"


def _attribute(text: str) -> str:
    return quoteattr(_plain(text))


def _escaped(text: str) -> str:
    return escape(_plain(text))


def _plain(text: str) -> str:
    """``text`` without what XML has no way to say."""
    return re.sub("[\ufffe\uffff]", "\ufffd", brief(text).replace("\n", " "))
