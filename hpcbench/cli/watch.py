"""The live screen of ``run``, ``submit --wait`` and ``status --watch`` on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from hpcbench.cli.common import console

if TYPE_CHECKING:
    from rich.text import Text

    from hpcbench.submit.watch import Snapshot


class Screen:
    """Draws looks at sweeps in place, and only what differs from the last one.

    A terminal that has gone, as that of a closed laptop, is no reason to stop: there is only nothing more to draw.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.live import Live

        self._console = console(stderr=stream is sys.stderr)
        self._live = Live(console=self._console, auto_refresh=False)
        self._shown: tuple[int, list[Text]] | None = None

    def __enter__(self) -> Screen:
        with contextlib.suppress(OSError):
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()

    def show(self, snapshots: Sequence[Snapshot]) -> None:
        """A new look at every sweep."""
        from rich.console import Group

        from hpcbench.report.live import live_lines

        options = self._console.options
        lines = live_lines(snapshots, options.max_width, ascii_only=options.ascii_only)
        if (options.max_width, lines) != self._shown:
            self._shown = (options.max_width, lines)
            with contextlib.suppress(OSError):
                self._live.update(Group(*lines), refresh=True)
