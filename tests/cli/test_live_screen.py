"""The live screen draws what has changed, and outlives its terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hpcbench.cli.status_command import LiveScreen
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.submit.run_state import RunState
from hpcbench.submit.watcher import SweepWatcher, Watched

RUNS = [f"{number:016x}" for number in range(9)]


class Terminal(io.StringIO):
    """One that may go away."""

    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    made = Console(file=Terminal(), force_terminal=True, width=80, color_system=None, markup=False)
    monkeypatch.setattr("hpcbench.cli.status_command.make_console", lambda stderr: made)
    return made


@pytest.fixture
def watcher(tmp_path: Path) -> SweepWatcher:
    return SweepWatcher(tmp_path / "c", load_cluster("local")[0], {"s": RUNS})


def look(watcher: SweepWatcher, running: int, failed: int = 0, reason: str = "out of luck") -> Watched:
    states = [RunState("running")] * running + [RunState("failed", reason)] * failed
    return [(watcher, dict(zip(RUNS, states + [RunState("pending")] * (len(RUNS) - len(states)), strict=True)))]


def test_a_bar_is_over_the_rows_of_status(console: Console, watcher: SweepWatcher) -> None:
    with LiveScreen(sys.stderr) as screen:
        screen.show(look(watcher, 2, 3))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "s on c" in shown
    assert "3/9" in shown
    assert "9 runs: 3 failed, 4 pending, 2 running" in shown
    assert shown.count("out of luck") >= 3
    assert "back: hpcbench status s --watch" in shown


def test_an_unchanged_state_is_drawn_again_after_some_seconds(
    console: Console, watcher: SweepWatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = console.file
    assert isinstance(file, Terminal)
    with LiveScreen(sys.stderr) as screen:
        screen.show(look(watcher, 1))
        drawn = len(file.getvalue())
        screen.show(look(watcher, 1))
        assert len(file.getvalue()) == drawn
        screen.show(look(watcher, 2))
        assert "2 running" in file.getvalue()[drawn:]
        drawn = len(file.getvalue())
        monkeypatch.setattr(screen, "_next_s", 0.0)
        screen.show(look(watcher, 2))
        assert len(file.getvalue()) > drawn


def test_a_terminal_that_becomes_narrow_is_drawn_at_its_width(console: Console, watcher: SweepWatcher) -> None:
    file = console.file
    assert isinstance(file, Terminal)
    with LiveScreen(sys.stderr) as screen:
        screen.show(look(watcher, 1, 1, "a long reason " * 5))
        drawn = len(file.getvalue())
        console.width = 40
        screen.show(look(watcher, 1, 1, "a long reason " * 5))
        lines = Console(file=io.StringIO(), width=200).render_str(file.getvalue()[drawn:], markup=False).plain
    assert max(len(line) for line in lines.splitlines() if "\x1b" not in line) <= 40


def test_hostile_text_has_no_codes(console: Console, watcher: SweepWatcher) -> None:
    with LiveScreen(sys.stderr) as screen:
        screen.show(look(watcher, 0, 1, "\x1b[31mred[/bold]\x07"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[31m" not in shown
    assert "\x07" not in shown


def test_a_closed_terminal_raises_no_error(console: Console, watcher: SweepWatcher) -> None:
    file = console.file
    assert isinstance(file, Terminal)
    with LiveScreen(sys.stderr) as screen:
        screen.show(look(watcher, 1))
        file.gone = True
        screen.show(look(watcher, 2))
        screen.show(look(watcher, 3))
    assert "1 running" in file.getvalue()
