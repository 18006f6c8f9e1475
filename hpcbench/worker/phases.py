"""Names for the parts of a step. In timed steps they cost nothing; in profiled ones they mark what was done when."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Phases = Callable[[str], AbstractContextManager[object]]
"""Called with one of ``PHASES``; the part runs inside the context that it gives."""

PHASES = ("data", "forward", "backward", "optimizer")

_NOTHING = nullcontext()


def unmarked(_name: str) -> AbstractContextManager[object]:
    """No mark at all."""
    return _NOTHING
