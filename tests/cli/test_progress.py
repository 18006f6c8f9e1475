from __future__ import annotations

import pytest

from hpcbench.cli import progress


@pytest.mark.parametrize(("period_s", "lines"), [(0.0, ["work: 1 of 3", "work: 2 of 3"]), (600.0, [])])
def test_a_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], period_s: float, lines: list[str]
) -> None:
    monkeypatch.setattr(progress, "_LINE_PERIOD_S", period_s)
    with progress.report_progress("work") as show_progress:
        show_progress(1, 3)
        show_progress(2, 3)
    assert capsys.readouterr().err.splitlines() == lines
