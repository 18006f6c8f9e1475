from __future__ import annotations

import click
import pytest

from hpcbench.report.status_text import status_text
from hpcbench.submit.run_state import RunState


def lines(states: list[RunState], width: int | None = None) -> list[str]:
    named = {f"run{number}": state for number, state in enumerate(states)}
    return click.unstyle(status_text("sweep", "there", named, width)).splitlines()


def test_finished_and_planned_runs_are_only_counted() -> None:
    assert lines([RunState("ok"), RunState("planned"), RunState("ok")]) == ["sweep on there: 3 runs: 2 ok, 1 planned"]


@pytest.mark.parametrize("count", [21, 10_000])
def test_many_runs_of_one_state_and_reason_are_one_row(count: int) -> None:
    found = lines([RunState("waiting", "the queue is full; the next submit sends it")] * count)
    assert found[0].endswith(f"{count} waiting")
    assert found[3:] == [f"{count} runs  waiting       the queue is full; the next submit sends it"]


def test_a_reason_that_names_the_job_is_the_same_reason() -> None:
    states = [RunState("lost", f"job 7_{task} is unknown", job_id=f"7_{task}") for task in range(30)]
    (row,) = (line for line in lines(states) if "runs  " in line)
    assert "30 runs" in row
    assert "job 7_0 is unknown" in row


def test_few_that_failed_are_named_beside_many_that_wait() -> None:
    failed = [RunState("failed", "broken") for _ in range(3)]
    found = lines([*[RunState("pending", "Priority", job_id="7")] * 500, *failed, RunState("running", job_id="9")])
    rows = [line.split()[0] for line in found if "failed" in line and "broken" in line]
    assert rows == ["run500", "run501", "run502"]
    assert found.index(next(line for line in found if "run503" in line)) == len(found) - 2
    assert found[-1].split() == ["500", "runs", "pending", "7", "...", "Priority"]


def test_the_table_is_never_longer_than_twenty_rows() -> None:
    found = lines([RunState("failed", f"reason {number}") for number in range(50)])
    assert len(found) == 3 + 20 + 1
    assert found[-1].startswith("and 30 more")


def test_a_terminal_breaks_long_reasons() -> None:
    found = lines([RunState("failed", "word " * 30)], width=60)
    assert len(found) > 4
    assert max(len(line) for line in found[3:]) <= 60
