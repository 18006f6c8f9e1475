from __future__ import annotations

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.report.status_text import EndedRunLog
from hpcbench.submit.run_state import RunState

RUNS = {
    name: RunSpec(model="resnet18", dataset="digits", strategy="single", batch_size=size)
    for size, name in enumerate("abc", 1)
}


def told(*looks: dict[str, str], done_before: tuple[str, ...] = ()) -> list[str]:
    lines: list[str] = []
    progress = EndedRunLog(lines.append, RUNS, done_before)
    for look in looks:
        progress.update({key: RunState(state, "because" if state == "failed" else "") for key, state in look.items()})
    return lines


def test_each_finished_run_is_printed_once_with_its_reason() -> None:
    lines = told(
        {"a": "running", "b": "pending", "c": "pending"},
        {"a": "ok", "b": "running", "c": "failed"},
        {"a": "ok", "b": "lost", "c": "failed"},
    )
    assert [line.split()[0] for line in lines] == ["ok", "failed", "lost"]
    assert lines[1].endswith("batch 3 (c): because")


def test_earlier_results_are_not_printed_but_lost_runs_are() -> None:
    lines = told({"a": "ok", "b": "lost", "c": "lost"}, done_before=("a",))
    assert [line.split()[0] for line in lines] == ["lost", "lost"]


def test_a_reason_to_wait_is_printed_once_when_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while another run runs, and anew when the reason has changed."""
    now_s = 100.0
    monkeypatch.setattr("hpcbench.report.status_text.time.monotonic", lambda: now_s)
    lines: list[str] = []
    progress = EndedRunLog(lines.append, RUNS, ())
    both = [("pending", "waits for run x"), ("pending", "")]
    for after_s, states in (
        (0, both), (2, both), (2, both), (9, both),
        (1, [("running", ""), ("pending", "waits for run a")]), (9, [("running", ""), ("pending", "waits for run a")]),
        (0, [("ok", ""), ("pending", "Priority")]), (4, [("ok", ""), ("pending", "Priority")]),
    ):  # fmt: skip
        now_s += after_s
        progress.update({key: RunState(*state) for key, state in zip("ab", states, strict=True)})
    assert [line.split()[0] for line in lines] == ["pending", "ok", "pending"]
    assert (lines[0], lines[2]) == ("pending   waits for run x", "pending   Priority")
