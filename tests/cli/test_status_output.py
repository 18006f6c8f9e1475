"""The live screen draws what has changed, and outlives its terminal."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from hpcbench.cli.status_output import LiveScreen
from hpcbench.submit.watcher import ArrayShape, ArraySnapshot, SweepSnapshot


class Terminal(io.StringIO):
    """One that may go away."""

    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    file = Terminal()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr("hpcbench.cli.status_output.make_console", lambda stderr: console)
    return file


def look(running: int, now_unix_s: float = 1e9) -> SweepSnapshot:
    array = ArraySnapshot(name="s-0001/0", shape=ArrayShape(1, 1), counts={"running": running, "pending": 9 - running})
    return SweepSnapshot(sweep="s", cluster="c", now_unix_s=now_unix_s, arrays=(array,))


def test_an_unchanged_snapshot_is_not_drawn_again(terminal: Terminal) -> None:
    with LiveScreen(sys.stderr) as screen:
        screen.show([look(1)])
        drawn = len(terminal.getvalue())
        screen.show([look(1, now_unix_s=1e9 + 10)])
        assert len(terminal.getvalue()) == drawn
        screen.show([look(2)])
        assert "2 running" in terminal.getvalue()[drawn:]


def test_a_closed_terminal_raises_no_error(terminal: Terminal) -> None:
    with LiveScreen(sys.stderr) as screen:
        screen.show([look(1)])
        terminal.gone = True
        screen.show([look(2)])
        screen.show([look(3)])
    assert "1 running" in terminal.getvalue()
