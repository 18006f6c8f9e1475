"""``python -m hpcbench.worker`` with one rank that sleeps in every step: $SLOW is ``rank:seconds``.

Where the run has not told the parts of its steps, processor time and sleep stand in for the rank's own work: a rank
has one thread, and one that waits for another sleeps in the kernel.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from hpcbench.results.schema import StepPhases
from hpcbench.worker.__main__ import main
from hpcbench.worker.finalize import RankMeasurements
from hpcbench.worker.strategy import DataParallelStrategy

RANK, SECONDS = os.environ["SLOW"].split(":")

_step, _setup, _rank_result = DataParallelStrategy.step, DataParallelStrategy.setup, RankMeasurements.rank_result
_steps: list[tuple[float, float]] = []


def setup(self: Any, model: Any, spec: Any, place: Any) -> None:
    self.sleep_s = float(SECONDS) if place.rank == int(RANK) else 0.0
    _setup(self, model, spec, place)


def step(self: Any, feed: Any, number: int) -> Any:
    began, used = time.perf_counter(), time.process_time()
    time.sleep(self.sleep_s)
    loss = _step(self, feed, number)
    _steps.append((time.perf_counter() - began, time.process_time() - used + self.sleep_s))
    return loss


def rank_result(self: Any, *arguments: Any) -> Any:
    result = _rank_result(self, *arguments)
    if result.phases is None and _steps:
        step_s, own_s = sorted(_steps)[len(_steps) // 2]
        result.phases = StepPhases(step_s=step_s, exposed_comm_s=max(0.0, step_s - own_s))
    return result


DataParallelStrategy.setup = setup  # type: ignore[method-assign,assignment]
DataParallelStrategy.step = step  # type: ignore[method-assign,assignment]
RankMeasurements.rank_result = rank_result  # type: ignore[method-assign,assignment]

if __name__ == "__main__":
    sys.exit(main())
