"""What a comparison found, a row each, from pairs and from reference bands alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcbench.config.references import Reference
from hpcbench.config.spec import RunSpec
from hpcbench.config.validate import Source
from hpcbench.errors import ConfigError
from hpcbench.report.compare import CANNOT_TELL, REGRESSIONS, VERDICTS, Pair, ratio_of
from hpcbench.report.groups import chosen, configurations, measured
from hpcbench.report.names import Condition, column_of, short_of
from hpcbench.report.rows import spec_of

if TYPE_CHECKING:
    import polars

WITHIN, OUTSIDE, NOTHING = "within", "outside", "nothing fits"
BAND_VERDICTS = (OUTSIDE, NOTHING, WITHIN)
ORDER = (*BAND_VERDICTS[:2], *VERDICTS, WITHIN)


@dataclass(frozen=True)
class Finding:
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


def of_pairs(pairs: Sequence[Pair], column: str) -> list[Finding]:
    """Findings of judged pairs."""
    return [_of_pair(pair, column) for pair in pairs]


def _of_pair(pair: Pair, column: str) -> Finding:
    moved = pair.shift
    return Finding(
        column, pair.cluster, pair.config_id, pair.spec, pair.verdict, pair.reason,
        base=statistics.median(pair.base) if pair.base else None,
        new=statistics.median(pair.new) if pair.new else None,
        ratio=ratio_of(pair),
        ratio_low=math.exp(moved.low) if moved else None, ratio_high=math.exp(moved.high) if moved else None,
        chance=pair.chance, launches_base=len(pair.base), launches_new=len(pair.new),
    )  # fmt: skip


def of_references(frame: polars.DataFrame, references: Sequence[Reference], source: Source) -> list[Finding]:
    """Findings of the configurations in ``frame``, by the median of their launches.

    A reference that nothing fits is a finding too: a check that looks at nothing must not pass.
    """
    found = []
    for number, reference in enumerate(references):
        where = source.where(("reference", number, "where"))
        try:
            column = column_of(reference.metric)
        except ConfigError as error:
            raise ConfigError(
                error.message, where=source.where(("reference", number, "metric")), hint=error.hint
            ) from None
        rows = measured(configurations(chosen(frame, Condition(reference.where, where))))
        values = [row for row in rows.iter_rows(named=True) if row[column] is not None]
        found += [_of_reference(row, column, reference) for row in values]
        if not values:
            found.append(Finding(
                column, "", "", None, NOTHING, f"{where}: {reference.where}: no run was measured",
                base=reference.si_value, reference=reference.where,
            ))  # fmt: skip
    return found


def _of_reference(row: dict[str, object], column: str, reference: Reference) -> Finding:
    value = row[column]
    launches = row["launches"]
    assert isinstance(value, (int, float))
    assert isinstance(launches, int)
    ratio = value / reference.si_value
    low = 1 + reference.low if reference.low is not None else None
    high = 1 + reference.high if reference.high is not None else None
    below, above = low is not None and ratio < low, high is not None and ratio > high
    band = f"[{'' if low is None else f'{low - 1:+.0%}'} {'' if high is None else f'{high - 1:+.0%}'}]"
    return Finding(
        column, str(row["cluster"]), str(row["config_id"]), spec_of(row), OUTSIDE if below or above else WITHIN,
        f"{'below' if below else 'above'} the band {band}" if below or above else "",
        base=reference.si_value, new=value, ratio=ratio, launches_new=launches, reference=reference.where,
    )  # fmt: skip


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """The worst first, and of these the largest change."""
    return sorted(findings, key=lambda one: (ORDER.index(one.verdict), -abs(math.log(one.ratio or 1))))


def headline(findings: Sequence[Finding]) -> str:
    """``1 worse, 3 alike, 2 cannot tell``."""
    counts = {verdict: sum(one.verdict == verdict for one in findings) for verdict in ORDER}
    return (
        ", ".join(f"{count} {word_of(verdict, findings)}" for verdict, count in counts.items() if count)
        or "nothing to compare"
    )


def word_of(verdict: str, findings: Sequence[Finding]) -> str:
    """``slower`` and ``faster`` where only times and rates were compared."""
    timed = all(short_of(one.metric).endswith("_s") or one.metric.endswith(".median") for one in findings)
    return {"worse": "slower", "better": "faster"}.get(verdict, verdict) if timed else verdict


def why_not(findings: Sequence[Finding]) -> list[str]:
    """Why nothing can be told, each reason once."""
    reasons: dict[str, int] = {}
    for one in findings:
        if one.verdict == CANNOT_TELL:
            reasons[one.reason] = reasons.get(one.reason, 0) + 1
    return [f"cannot tell, {count} row{'s' * (count > 1)}: {reason}" for reason, count in reasons.items()]
