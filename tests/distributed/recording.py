"""The traffic of one call, recorded for comparison with what the oracle counts."""

from __future__ import annotations

from collections.abc import Callable

from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.measure.traffic_recorder import TrafficRecorder


def record_traffic(call: Callable[[], object]) -> list[Traffic]:
    """Return the calls of collectives by this rank in ``call``."""
    recorder = TrafficRecorder()
    with recorder:
        call()
    return recorder.merged()
