"""What ``run`` says where no terminal shows its screen: one line for every run that has ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from hpcbench.config.spec import RunSpec, label
from hpcbench.fileio import brief
from hpcbench.submit.state import ACTIVE, RunState


class Progress:
    """Tells of every run that ends and was not in ``done_before``, once."""

    def __init__(self, tell: Callable[[str], None], runs: Mapping[str, RunSpec], done_before: Collection[str]) -> None:
        self._tell = tell
        self._runs = runs
        self._told = set(done_before)

    def update(self, states: Mapping[str, RunState]) -> None:
        """A new look at all runs."""
        for key, state in states.items():
            if state.state not in ACTIVE and key not in self._told:
                self._told.add(key)
                reason = f": {state.reason}" if state.reason else ""
                self._tell(brief(f"{state.state:9} {label(self._runs[key])} ({key}){reason}"))
