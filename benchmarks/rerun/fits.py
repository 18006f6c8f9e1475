"""Calibrations of a rerun: the one that was measured, and as runs of the rerun itself move it.

Both papers predict from profiles of one device of the very machine that they run on. A calibration may be of another
day, when other machines on the same host were busy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.testbed import CLUSTER, RATE_MBIT, Testbed
from hpcbench.oracle.calibration.calibration_store import StoredCalibration, read_calibrations
from hpcbench.results.results_tree import ClusterTree, ResultsTree

ALONE, PAIRS = "devices == 1", "devices <= 2"
CALIBRATIONS = Path(__file__).resolve().parents[1] / "oracle" / "calibrations"
"""Of the machine that the committed score was measured on."""


class Validated(NamedTuple):
    """The output of ``validate``, as text and as data."""

    text: bytes
    document: Any


def lend(tree: ClusterTree) -> None:
    """Put the committed calibration into ``tree``, where it has none of its own."""
    if not _measured(tree):
        _copy(CALIBRATIONS.glob("*.json"), tree)


def move(bed: Testbed, sweep: str, where: str) -> None:
    """Have the newest calibration be the measured one as moved by those runs of ``sweep`` for which ``where`` holds."""
    tree = ResultsTree(bed.results).cluster(CLUSTER)
    for one in _kept(tree):
        if one.calibration.machine.depth == "fitted":
            one.path.unlink()
    bed.output("cluster", "calibrate", CLUSTER, "--from", sweep, "--where", where, "--busy")


def elsewhere(bed: Testbed, sweep: str, where: str | None) -> Validated:
    """Validate ``sweep`` by the measured calibration, or as runs with ``where`` move it.

    In a tree of its own, so that predictions of other commands stay as they are.
    """
    own = Testbed(bed.work / "fits" / f"{sweep}-{'measured' if where is None else 'moved'}")
    shutil.rmtree(own.results, ignore_errors=True)
    own.describe(RATE_MBIT)
    measured = _measured(ResultsTree(bed.results).cluster(CLUSTER))
    _copy((one.path for one in measured), ResultsTree(own.results).cluster(CLUSTER))
    of_sweep = f"sweep == '{sweep}'"
    if where is not None:
        chosen = f"{of_sweep} and {where}"
        own.output("cluster", "calibrate", CLUSTER, "--from", f"{bed.results}", "--where", chosen, "--busy")
    asked = ("validate", f"{bed.results}", "--cluster", CLUSTER, "--where", of_sweep, "--busy")
    return Validated(own.output(*asked), msgspec.json.decode(own.output(*asked, "--json")))


def _measured(tree: ClusterTree) -> list[StoredCalibration]:
    """Those that were not moved by whole runs."""
    return [one for one in _kept(tree) if one.calibration.machine.depth != "fitted"]


def _kept(tree: ClusterTree) -> list[StoredCalibration]:
    """Those in the tree itself, not in the user's own folder."""
    return [one for one in read_calibrations(tree, CLUSTER)[0] if one.path.is_relative_to(tree.root)]


def _copy(paths: Iterable[Path], tree: ClusterTree) -> None:
    folder = tree.path("calibrations")
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        shutil.copy(path, folder)
