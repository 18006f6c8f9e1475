"""A calibration of the day's device, fitted on any machine: ``python -m benchmarks.gpu_day calibrate FOLDER``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_day.machines import write_profiles
from benchmarks.gpu_day.outputs import DayFiles, read_day
from hpcbench.results.results_tree import ResultsTree

FILE = "calibration.json"


def calibrate_from_day(folder: Path) -> int:
    """Fit a calibration to the timed results in ``folder`` and write it there; return the command's exit code."""
    day = read_day(folder)
    with tempfile.TemporaryDirectory() as scratch:
        name = day.machine.gpu.name if day.machine.gpu is not None else None
        profiles = write_profiles(Path(scratch), "cuda" if name else "cpu", name, day.machine.cores)
        results = _timed_results(day, Path(scratch) / "results", profiles.alone.name)
        command = [
            sys.executable, "-m", "hpcbench", "cluster", "calibrate", str(profiles.files[profiles.alone.name]),
            "--from", str(results), "--busy", "--results", str(Path(scratch) / "kept"), "--out", str(folder / FILE),
        ]  # fmt: skip
        return subprocess.run(command, check=False).returncode


def _timed_results(day: DayFiles, folder: Path, cluster: str) -> Path:
    """Write the results that have times into a results tree at ``folder``; return it."""
    tree = ResultsTree(folder).cluster(cluster)
    for name in ("singles", "probes"):
        for result in day.of_part(name):
            tree.write_result(result)
    return folder
