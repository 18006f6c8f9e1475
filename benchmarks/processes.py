"""Commands that are timed: what a process and its children cost."""

from __future__ import annotations

import os
import subprocess
import time
from typing import NamedTuple


class Measured(NamedTuple):
    """Processes that ran one after another: their time, their largest peak, the files that they left."""

    seconds: float
    cpu_s: float
    peak_mib: float
    files: int


def timed(command: list[str]) -> Measured:
    """Run ``command``; ``SystemExit`` where it fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    return Measured(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, 0)
