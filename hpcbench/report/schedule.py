"""A pipeline's schedule as a picture of text: a row per rank, a column per unit of time."""

from __future__ import annotations

from hpcbench.parallel.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Layout, actions
from hpcbench.parallel.walk import Walk, walk

UNITS = {FORWARD: 1, BACKWARD: 2, INPUT: 1, WEIGHT: 1}
"""A backward pass as long as two forward passes, its halves as one each."""

WIDTH = 80


def schedule_picture(schedule: str, layout: Layout, micro_batches: int, width: int = WIDTH) -> list[str]:
    """Lines of at most ``width`` characters, folded where the step is longer.

    Every cell is a unit of time: the kind of the action and its micro-batch (``F3``), with the number of the rank's
    chunk before it where it has several (``2F3``), dots where the action goes on, blanks where the rank waits.
    """
    walked = walk(actions(schedule, layout, micro_batches), layout, lambda action: UNITS.get(action.kind, 0))
    names = [_stage(layout, rank) for rank in range(layout.ranks)]
    cell = len(str(micro_batches - 1)) + 2 + (layout.virtual_stages > 1)
    rows = [_row(walked, rank, layout, cell) for rank in range(layout.ranks)]
    start = max(len(name) for name in names) + 1
    fold = max((width - start - 1) // cell, 1) * cell
    total = int(walked.end) * cell
    lines = [f"{schedule}, {micro_batches} micro-batches: bubble {walked.bubble_fraction:.1%} of equal stages"]
    for first in range(0, total, fold):
        cut = [row[first : first + fold].rstrip() for row in rows]
        lines += [f"{name:<{start}}|{row}" for name, row in zip(names, cut, strict=True)]
        lines += [""] if first + fold < total else []
    return lines


def _stage(layout: Layout, rank: int) -> str:
    """With the letter of the replica where the stage has several."""
    stage = layout.stage_of(rank)
    ranks = layout.ranks_of(stage)
    return f"stage {stage}{chr(ord('a') + rank - ranks.start) if 1 < len(ranks) <= 26 else ''} "


def _row(walked: Walk, rank: int, layout: Layout, cell: int) -> str:
    cells = [" " * cell] * int(walked.end)
    for action, begin, end in walked.ranks[rank]:
        for place in range(int(begin), int(end)):
            cells[place] = (_name(action, layout) if place == begin else "..").ljust(cell)
    return "".join(cells)


def _name(action: Action, layout: Layout) -> str:
    chunk = str(action.chunk // layout.stages) if layout.virtual_stages > 1 else ""
    return f"{chunk}{action.kind}{action.micro_batch}"
