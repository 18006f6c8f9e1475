"""A finding of a report as data: what it says, how sure that is, on which rows it rests, what would settle it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Sure = Literal["told", "alike", "cannot tell", "counted"]
TOLD: Sure = "told"
"""More than chance: the tests of all findings of its kind together are wrong in at most 5 % of reports."""
ALIKE: Sure = "alike"
"""The whole 95 % interval lies within what counts as a difference."""
CANNOT_TELL: Sure = "cannot tell"
COUNTED: Sure = "counted"
"""Seen as it stands, nothing was inferred."""

KINDS = {
    "fastest": "Fastest strategy",
    "crossover": "Where the fastest strategy changes",
    "efficiency": "Where efficiency falls",
    "memory": "Memory",
    "failure": "What failed, and why",
    "doubt": "What makes numbers doubtful",
}
"""Kinds of answers, in the order in which they are shown, and their headings."""


@dataclass(frozen=True)
class Evidence:
    """A configuration that an answer rests on; the throughput is of all ranks, the median over launches."""

    strategy: str
    nodes: int
    devices: int
    batch_size: int
    global_batch_size: int
    status: str
    config_id: str
    run_id: str
    launches: int = 0
    samples_per_s: float | None = None
    samples_per_s_low: float | None = None
    samples_per_s_high: float | None = None
    step_time_s: float | None = None
    efficiency: float | None = None
    peak_memory_bytes: int | None = None
    environment_digest: str | None = None


@dataclass(frozen=True)
class Answer:
    """``text`` stands alone beside ``subject``, what it is about (workload, cluster and scale)."""

    kind: str
    subject: str
    text: str
    sure: Sure
    why: str = ""
    """On what the certainty rests, or why there is none."""
    settle: str = ""
    """What would settle it, where nothing can be told."""
    doubts: tuple[str, ...] = ()
    cluster: str = ""
    nodes: int | None = None
    devices: int | None = None
    strategy: str = ""
    """The strategy that the answer names first."""
    rival: str = ""
    ratio: float | None = None
    """Of the throughputs that are compared, with its 95 % interval."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    evidence: tuple[Evidence, ...] = field(default=())


def percent(ratio: float) -> str:
    """``1.123 -> '+12.3 %'``; from a factor of two on ``x 3.1``."""
    if ratio >= 2:
        return f"x {ratio:.1f}"
    return f"{(ratio - 1) * 100:+.1f} %"


def listed(words: list[str], most: int = 6) -> str:
    """``a, b and c``; of many the first ones and how many more."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``3 runs``, ``1 run``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def as_json(answer: Answer) -> dict[str, Any]:
    """``answer`` as plain data: figures in SI units."""
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(answer)
    return document
