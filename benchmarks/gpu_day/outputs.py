"""The files of a day, read back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.gpu_day.loops import LoopFigures
from benchmarks.gpu_day.preflight import Machine
from benchmarks.gpu_day.shards import ShardFigures
from hpcbench.results.bundle_archive import collect_bundle_results
from hpcbench.results.schema import RunResult

MACHINE, RESULTS, LOOPS, SHARDS = "machine.json", "results.tar.gz", "loops.json", "shards.json"
REPORT, LOG = "report.md", "log.txt"
DAYS = Path(__file__).parents[1] / "gpu_days"
"""Committed days, a folder each: ``YYYY-MM-DD-device``."""


class DayFiles(NamedTuple):
    """What a day left; parts that it did not reach are empty."""

    name: str
    machine: Machine
    results: list[RunResult]
    problems: list[str]
    """Results that cannot be read, each with the reason."""
    loops: list[LoopFigures]
    shards: list[ShardFigures]

    @property
    def device(self) -> str:
        return self.machine.gpu.name if self.machine.gpu is not None else "a cpu"

    @property
    def on_gpu(self) -> bool:
        return self.machine.gpu is not None

    def of_part(self, name: str) -> list[RunResult]:
        """Return the results of one part."""
        return [result for result in self.results if result.sweep == f"gpu-day-{name}"]


def read_day(folder: Path) -> DayFiles:
    """Read the files in ``folder``; raises ``OSError`` or ``msgspec.MsgspecError`` if there is no ``machine.json``."""
    machine = msgspec.json.decode((folder / MACHINE).read_bytes(), type=Machine)
    bundle, loops, shards = folder / RESULTS, folder / LOOPS, folder / SHARDS
    entries = collect_bundle_results(bundle) if bundle.is_file() else []
    return DayFiles(
        folder.name,
        machine,
        [entry.result for entry in entries if entry.result is not None],
        [entry.problem for entry in entries if entry.result is None],
        msgspec.json.decode(loops.read_bytes(), type=list[LoopFigures]) if loops.is_file() else [],
        msgspec.json.decode(shards.read_bytes(), type=list[ShardFigures]) if shards.is_file() else [],
    )


def committed_days() -> list[DayFiles]:
    """Return the days of ``DAYS`` that ran on a GPU, oldest first."""
    folders = sorted(DAYS.iterdir()) if DAYS.is_dir() else []
    days = [read_day(folder) for folder in folders if re.fullmatch(r"\d{4}-\d\d-\d\d-[A-Za-z0-9-]+", folder.name)]
    return [day for day in days if day.on_gpu]
