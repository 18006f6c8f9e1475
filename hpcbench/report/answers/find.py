"""All answers that a frame of results gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from hpcbench.report.answers.answer import CANNOT_TELL, KINDS, Answer
from hpcbench.report.answers.doubts import Unfinished, doubts, unfinished
from hpcbench.report.answers.efficiency import BOUND, efficiencies
from hpcbench.report.answers.failures import failures, memory
from hpcbench.report.answers.fastest import crossovers, fastest
from hpcbench.report.answers.measured import Measured, Subjects, measured_of, places

if TYPE_CHECKING:
    import polars

    from hpcbench.report.names import Condition


@dataclass(frozen=True)
class Findings:
    """The answers of a frame, in the order of ``KINDS``, and what they are drawn from."""

    answers: list[Answer]
    rows: list[Measured]
    statuses: dict[str, int]
    """Runs by how they ended; a launch is a run."""
    begin: datetime | None
    """When the first and the last result was put in place; ``None`` for those of bundles."""
    end: datetime | None

    def of(self, kind: str) -> list[Answer]:
        """The answers of one kind."""
        return [one for one in self.answers if one.kind == kind]

    @property
    def unsettled(self) -> list[Answer]:
        """What cannot be told."""
        return [one for one in self.answers if one.sure == CANNOT_TELL]


def find(
    frame: polars.DataFrame,
    where: Condition | None = None,
    bound: float = BOUND,
    sweeps: Sequence[Unfinished] = (),
) -> Findings:
    """The answers that the results in ``frame`` give about configurations for which ``where`` holds.

    ``sweeps`` are those whose runs they are, as far as not all have ended.
    """
    rows, broken = measured_of(frame, where)
    table = places(rows)
    subjects = Subjects(table)
    answers = [
        *fastest(table, subjects), *crossovers(table, subjects), *efficiencies(table, subjects, bound),
        *memory(table, subjects), *failures(rows, broken), *unfinished(sweeps), *doubts(rows),
    ]  # fmt: skip
    order = list(KINDS)
    answers.sort(key=lambda one: order.index(one.kind))
    statuses = Counter(status for row in [*rows, *broken] for status in [row.status] * len(row.run_ids))
    return Findings(answers, rows, dict(sorted(statuses.items())), *_dates(frame))


def _dates(frame: polars.DataFrame) -> tuple[datetime | None, datetime | None]:
    times: list[int] = sorted(frame["file.mtime_ns"].drop_nulls().to_list())
    if not times:
        return None, None
    first, last = (datetime.fromtimestamp(one // 10**9, timezone.utc) for one in (times[0], times[-1]))
    return first, last
