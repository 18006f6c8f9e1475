"""Messages to the user about commands of the scheduler and locks that do not answer for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

SILENCE_S = 3.0
"""Seconds without an answer after which a message is printed."""
_listeners: list[Callable[[str], None]] = []


@contextlib.contextmanager
def announce_silence(notify: Callable[[str], None]) -> Iterator[None]:
    """Call ``notify`` with a message whenever the scheduler, or the holder of a lock, lets the body wait."""
    _listeners.append(notify)
    try:
        yield
    finally:
        _listeners.remove(notify)


def has_listeners() -> bool:
    """Whether anybody reads the messages."""
    return bool(_listeners)


def announce(message: str) -> None:
    """Send ``message`` to everyone who waits."""
    for notify in _listeners:
        notify(message)
