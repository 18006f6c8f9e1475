"""Commands that plan a sweep, called with the name of one whose file lies in no folder of sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_cli import hpcbench

SWEEP = """name = "mine"
[command]
argv = ["false"]
[[command.metrics]]
name = "step_time"
pattern = "time (?P<value>.+)"
unit = "s"
better = "lower"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the one failed run of ``my prog/mine.toml``."""
    monkeypatch.setenv("HPCBENCH_CLUSTER", "local")
    monkeypatch.delenv("HPCBENCH_RESULTS", raising=False)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "my prog").mkdir()
    (tmp_path / "my prog" / "mine.toml").write_text(SWEEP)
    return tmp_path


@pytest.mark.slow
def test_a_name_that_was_submitted_from_a_file_leads_to_the_command_with_the_file(project: Path) -> None:
    done = hpcbench("run", "my prog/mine.toml", cwd=project)
    assert done.returncode == 1, done.stderr
    for command in ("retry", "submit", "run", "plan"):
        wrong = hpcbench(command, "mine", cwd=project)
        assert wrong.returncode == 2
        expected = f"it was submitted from my prog/mine.toml: hpcbench {command} 'my prog/mine.toml' --cluster local"
        assert expected in wrong.stderr, wrong.stderr
    assert hpcbench("plan", "my prog/mine.toml", "--cluster", "local", cwd=project).returncode == 0
    elsewhere = hpcbench("retry", "mine", "--results", str(project / "results"), cwd=project / "my prog")
    assert "hpcbench retry mine.toml --cluster local" in elsewhere.stderr
    (project / "my prog" / "mine.toml").rename(project / "my prog" / "other.toml")
    assert hpcbench("run", "my prog/other.toml", cwd=project).returncode == 1
    shown = hpcbench("table", "other", cwd=project)
    assert "sweep 'other' has nothing in" in shown.stderr
    assert "the file other.toml is the sweep 'mine'" in shown.stderr
    never = hpcbench("retry", "mines", cwd=project)
    assert "submitted" not in never.stderr


def test_commands_that_are_printed_take_the_file_where_the_name_leads_nowhere(project: Path) -> None:
    none = hpcbench("retry", "my prog/mine.toml", cwd=project)
    assert "nothing was submitted: hpcbench submit 'my prog/mine.toml' --cluster local" in none.stderr
    (project / "sweeps").mkdir()
    (project / "my prog" / "mine.toml").rename(project / "sweeps" / "mine.toml")
    named = hpcbench("retry", "mine", cwd=project)
    assert "nothing was submitted: hpcbench submit mine --cluster local" in named.stderr
