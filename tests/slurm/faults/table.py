"""The table that ends a session with faults: what was broken, and what became of the runs."""

from __future__ import annotations

from dataclasses import dataclass

from tests.slurm.faults.truth import Truth

HEADS = ("fault", "runs", "ok", "lost", "doubled", "s")


@dataclass
class Row:
    """One fault; without a truth the test ended before it could look."""

    fault: str
    truth: Truth | None = None
    began_s: float = 0.0
    ended_s: float = 0.0

    def cells(self) -> tuple[str, ...]:
        counts = ("?",) * 4
        if self.truth is not None:
            runs, ok, lost, doubled = self.truth
            counts = (str(runs), str(ok), str(len(lost)), str(len(doubled)))
        return (self.fault, *counts, f"{self.ended_s - self.began_s:.0f}")


def table(rows: list[Row]) -> list[str]:
    """Lines of a table, the numbers flush right, with a line for the sum."""
    truths = [row.truth for row in rows if row.truth is not None]
    total = Truth(
        sum(truth.runs for truth in truths),
        sum(truth.ok for truth in truths),
        [word for truth in truths for word in truth.lost],
        [word for truth in truths for word in truth.doubled],
    )
    lines = [
        HEADS,
        *(row.cells() for row in rows),
        Row("all", total, min(row.began_s for row in rows), max(row.ended_s for row in rows)).cells(),
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADS))]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
