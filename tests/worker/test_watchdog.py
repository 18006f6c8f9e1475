"""A pipeline that gets no further is noticed, one that goes on or rests is not."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from hpcbench.errors import WorkerError
from hpcbench.strategies.pipeline.train.action_timeline import watch_progress

PATIENCE_S = 0.2
"""Of which the thread looks twenty times."""


def watch(answers: Iterable[int | None], last: int | None) -> tuple[list[WorkerError], bool]:
    """Return the reports while ``progress`` gives ``answers`` and then ``last``, and whether it was seen."""
    told: list[WorkerError] = []
    ended = threading.Event()
    given = iter([*answers, *[last] * 60])

    def progress() -> int | None:
        found = next(given, "over")
        if isinstance(found, str):
            ended.set()
            return last
        return found

    def stuck(error: WorkerError) -> None:
        told.append(error)
        ended.set()

    with watch_progress(progress, lambda: "stage 1 of 2: at F(chunk 1, micro-batch 0)", PATIENCE_S, stuck):
        assert ended.wait(60)
    return told, ended.is_set()


def test_a_rank_without_progress_is_reported() -> None:
    (error,), _ = watch([None, 1, 2, 3], 3)
    assert error.status == "failed"
    assert "for 0.2 s nothing was done (stage 1 of 2: at F(chunk 1, micro-batch 0))" in error.message


def test_between_steps_nothing_is_stuck() -> None:
    assert watch([1, 2, 2], None)[0] == []


def test_a_rank_with_progress_is_not_reported() -> None:
    assert watch(range(60), None)[0] == []
