"""Phrases that tables, findings and pages share: counts with nouns, lists of words, percentages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hpcbench.fileio import printable_excerpt


def pluralize(count: int, noun: str, plural: str | None = None) -> str:
    """``3 runs``, ``1 run``, ``2 launches``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def join_words(words: Sequence[str], most: int = 6) -> str:
    """``a, b and c``; beyond ``most`` words the first ones and the number of the rest."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def or_empty(value: object) -> str:
    """``str(value)``; an empty text for ``None``."""
    return "" if value is None else str(value)


def count_span(counts: Sequence[int]) -> str:
    """``3``, ``2 to 5``: the range of those above one, which are in order."""
    several = [count for count in counts if count > 1]
    return str(several[0]) if several[0] == several[-1] else f"{several[0]} to {several[-1]}"


def three_digits(value: float) -> str:
    """``123``, ``12.3``, ``1.23``, ``0.12``."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def status_counts(statuses: Iterable[str]) -> str:
    """``1 failed, 2 oom``, by name."""
    return ", ".join(f"{count} {printable_excerpt(status)}" for status, count in sorted(Counter(statuses).items()))
