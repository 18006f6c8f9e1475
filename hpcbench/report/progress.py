"""The progress bar of ``run``: done, running, failed, time left; plain lines where nobody watches."""

from __future__ import annotations

import time
from collections.abc import Collection
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hpcbench.config.spec import RunSpec, label
from hpcbench.fileio import brief, printable
from hpcbench.results.schema import OK
from hpcbench.submit.state import ACTIVE, RunState
from hpcbench.units import format_seconds


class Progress:
    """Shows the states that ``wait`` tells. Every run that ends and was not in ``done_before`` is one line."""

    def __init__(self, console: Console, sweep: str, runs: dict[str, RunSpec], done_before: Collection[str]) -> None:
        self._console = console
        self._runs = runs
        self._told = set(done_before)
        self._began = time.monotonic()
        self._done_before = len(self._told)
        self._bar = Bar(
            TextColumn(printable(sweep)), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=len(runs), note="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, states: dict[str, RunState]) -> None:
        """Show a new look at all runs."""
        ended = {key: state for key, state in states.items() if state.state not in ACTIVE}
        for key, state in ended.items():
            if key not in self._told:
                self._told.add(key)
                reason = f": {state.reason}" if state.reason else ""
                line = f"{state.state:9} {label(self._runs[key])} ({key}){reason}"
                self._console.print(brief(line), soft_wrap=True)
        running = sum(state.state == "running" for state in states.values())
        failed = sum(state.state != OK for state in ended.values())
        note = f"{running} running" + (f", {failed} not ok" if failed else "") + self._left(len(ended), len(states))
        self._bar.update(self._task, completed=len(ended), note=note)

    def _left(self, ended: int, total: int) -> str:
        """Time left, from the runs that have ended since this screen began."""
        fresh = ended - self._done_before
        if fresh <= 0 or ended == total:
            return ""
        return f", {format_seconds((time.monotonic() - self._began) / fresh * (total - ended))} left"
