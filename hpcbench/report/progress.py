"""The progress bar of ``run``: done, running, failed, time left; plain lines where nobody watches."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hpcbench.config.spec import RunSpec, label
from hpcbench.fileio import printable
from hpcbench.results.schema import OK
from hpcbench.submit.state import ACTIVE, RunState
from hpcbench.units import format_seconds


class Progress:
    """Shows the states that ``wait`` tells. Every run that ends is one line above the bar."""

    def __init__(self, console: Console, sweep: str, runs: dict[str, RunSpec]) -> None:
        self._console = console
        self._runs = runs
        self._seen: dict[str, str] = {}
        self._began = time.monotonic()
        self._ended_before: int | None = None
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
        if self._ended_before is None:
            self._ended_before = len(ended)
        for key, state in ended.items():
            if self._seen.get(key) != state.state and self._ended_before < len(states):
                self._tell(key, state)
            self._seen[key] = state.state
        running = sum(state.state == "running" for state in states.values())
        failed = sum(state.state != OK for state in ended.values())
        note = f"{running} running" + (f", {failed} not ok" if failed else "") + self._left(len(ended), len(states))
        self._bar.update(self._task, completed=len(ended), note=note)

    def _tell(self, key: str, state: RunState) -> None:
        if key not in self._seen and self._ended_before and len(self._seen) < self._ended_before:
            return
        spec = self._runs[key]
        line = f"{state.state:9} {label(spec)} ({key})"
        self._console.print(printable(line + (f": {state.reason}" if state.reason else "")), soft_wrap=True)

    def _left(self, ended: int, total: int) -> str:
        """Time left, from the runs that have ended since this screen began."""
        fresh = ended - (self._ended_before or 0)
        if fresh <= 0 or ended == total:
            return ""
        return f", {format_seconds((time.monotonic() - self._began) / fresh * (total - ended))} left"
