"""The progress of long commands."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich import progress

from hpcbench.cli.common import make_console, print_message

_LINE_PERIOD_S = 30.0


@contextlib.contextmanager
def report_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a long command: a bar on a terminal, elsewhere one line in 30 s at most.

    Yields:
        A function that takes the number of parts that are done, and of all parts.
    """
    next_s = time.monotonic() + _LINE_PERIOD_S
    with progress_bar() as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            nonlocal next_s
            bar.update(task, completed=done, total=total)
            if bar.disable and time.monotonic() >= next_s:
                next_s = time.monotonic() + _LINE_PERIOD_S
                print_message(f"{what}: {done} of {total}")

        yield show


def progress_bar() -> progress.Progress:
    """A progress bar on standard error; nothing is shown where that is no terminal."""
    bar, count = progress.BarColumn(), progress.MofNCompleteColumn()
    columns = (progress.TextColumn("{task.description}", markup=False), bar, count, progress.TimeRemainingColumn())
    screen = make_console(stderr=True)
    return progress.Progress(*columns, console=screen, disable=not screen.is_terminal, speed_estimate_period=86_400)
