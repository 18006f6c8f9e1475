from __future__ import annotations

import io

import pytest
from rich.console import Console

from hpcbench.config.spec import RunSpec
from hpcbench.report.progress import Progress
from hpcbench.submit.state import RunState

RUNS = {
    name: RunSpec(model="resnet18", dataset="digits", strategy="single", batch_size=size)
    for size, name in enumerate("abc", 1)
}


def shown(*looks: dict[str, str], terminal: bool = False, done_before: tuple[str, ...] = ()) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)
    with Progress(console, "sweep", RUNS, done_before) as progress:
        for look in looks:
            progress.update(
                {key: RunState(state, "because" if state == "failed" else "") for key, state in look.items()}
            )
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_run_that_ends_is_told_once_with_its_reason() -> None:
    text = shown(
        {"a": "running", "b": "pending", "c": "pending"},
        {"a": "ok", "b": "running", "c": "failed"},
        {"a": "ok", "b": "lost", "c": "failed"},
    )
    assert [line.split()[0] for line in text.splitlines() if line.strip()] == ["ok", "failed", "lost"]
    assert "batch 3 (c): because" in text


def test_what_was_done_before_is_not_told_and_what_is_lost_at_the_first_look_is() -> None:
    text = shown({"a": "ok", "b": "lost", "c": "lost"}, done_before=("a",))
    assert [line.split()[0] for line in text.splitlines() if line.strip()] == ["lost", "lost"]


@pytest.mark.parametrize("looks", [1, 3])
def test_on_a_terminal_there_is_a_bar_with_counts(looks: int) -> None:
    text = shown(*[{"a": "ok", "b": "running", "c": "failed"}] * looks, terminal=True)
    assert "2/3" in text
    assert "1 running, 1 not ok" in text
    assert "left" in text
