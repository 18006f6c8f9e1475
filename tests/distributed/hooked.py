"""``python -m hpcbench.worker`` with an accident built in.

$ACCIDENT is ``rank:step:what``: before that step the rank raises, kills or stops itself, or says (in a file beside
its attempt's) that it got there and goes on. Step -1 is while the strategy is set up. ``idle``: from that step on it
sleeps before each, so that an endless run leaves the processor to others.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hpcbench.worker.__main__ import main
from hpcbench.worker.strategy import DataParallelStrategy

IDLE_S = 0.2
RANK, STEP, WHAT = (os.environ["ACCIDENT"] + "::").split(":")[:3]


def happen(rank: int, step: int) -> None:
    if RANK not in ("*", str(rank)) or step < int(STEP):
        return
    if WHAT == "idle":
        time.sleep(IDLE_S)
        return
    if step > int(STEP):
        return
    if WHAT == "raise":
        raise ValueError(f"an accident before step {step}")
    if WHAT == "memory":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")
    if WHAT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if WHAT == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    Path(os.environ["REACHED"] + f".{rank}").touch()


_step, _setup = DataParallelStrategy.step, DataParallelStrategy.setup


def step_with_accident(self: Any, feed: Any, step: int) -> Any:
    happen(self.place_rank, step)
    return _step(self, feed, step)


def setup_with_accident(self: Any, model: Any, spec: Any, place: Any) -> None:
    self.place_rank = place.rank
    happen(place.rank, -1)
    _setup(self, model, spec, place)


DataParallelStrategy.step = step_with_accident  # type: ignore[method-assign]
DataParallelStrategy.setup = setup_with_accident  # type: ignore[method-assign,assignment]

if __name__ == "__main__":
    sys.exit(main())
