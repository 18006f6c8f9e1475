from __future__ import annotations

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
