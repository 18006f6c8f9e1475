"""How long a job may take, by its size."""

from __future__ import annotations

from collections.abc import Sequence


def longest_min(
    nodes: int,
    max_time_min: float | None,
    steps: Sequence[tuple[int, float]] = (),
    max_node_hours: float | None = None,
) -> float | None:
    """The longest that a job of ``nodes`` may take, in minutes; ``None`` where nothing limits it.

    ``steps`` are pairs of a largest number of nodes and the minutes that jobs up to it may take.
    """
    limits = [] if max_time_min is None else [max_time_min]
    limits += [minutes for most, minutes in sorted(steps) if nodes <= most][:1]
    if max_node_hours is not None:
        limits.append(max_node_hours * 60 / nodes)
    return min(limits, default=None)
