"""The picture of a schedule, as a person sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcbench.cli.main import cli
from hpcbench.report.plan_view import schedule_diagram
from hpcbench.strategies.pipeline.schedules import PipelineLayout


def test_the_diagram_of_1f1b_shows_its_bubbles() -> None:
    assert schedule_diagram("1f1b", PipelineLayout(2), 3) == [
        "1f1b, 3 micro-batches: bubble 25.0 % of equal stages",
        "stage 0  |F0 F1       B0 .. F2 B1 ..    B2 ..",
        "stage 1  |   F0 B0 .. F1 B1 .. F2 B2 ..",
    ]


def test_a_long_step_is_folded() -> None:
    lines = schedule_diagram("interleaved_1f1b", PipelineLayout(4, 2), 16)
    assert max(len(line) for line in lines) <= 80
    assert "1F15" in "\n".join(lines)
    assert lines.count("") == len(lines) // 5 - 1


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", "model"])
def test_every_action_is_drawn_once(schedule: str) -> None:
    picture = "".join(schedule_diagram(schedule, PipelineLayout(3), 4)[1:])
    assert all(picture.count(f"F{number}") == 3 for number in range(4))


@pytest.mark.parametrize("columns", ["80", "60"])
def test_a_plan_breaks_no_heading_and_has_no_line_without_content(tmp_path: Path, columns: str) -> None:
    (tmp_path / "c.toml").write_text('name = "c"\n[command]\nargv = ["true"]\n')
    runner = CliRunner(env={"COLUMNS": columns})
    shown = runner.invoke(cli, ["plan", str(tmp_path / "c.toml"), "--cluster", "local"], catch_exceptions=False)
    assert "at most 0.33 node-hours" in " ".join(shown.stdout.split())
    assert ("all runs" in shown.stdout, "parti-" in shown.stdout) == (False, False)
    assert "partition" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= int(columns)
