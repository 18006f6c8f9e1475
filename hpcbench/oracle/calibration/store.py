"""Where calibrations lie: one file each, named by its date and the hash of what it holds, never changed.

They are kept beside the results of their cluster; where that tree may not be written, in the user's own folder.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec

from hpcbench.errors import StorageError
from hpcbench.fileio import make_folder, read_regular, write_atomic
from hpcbench.oracle.collectives import Wire
from hpcbench.oracle.machine import Machine
from hpcbench.paths import user_data_folder
from hpcbench.results.decode import decode
from hpcbench.results.store import ClusterTree

CALIBRATION_VERSION = 1
_NAME = re.compile(r"\d{4}-\d\d-\d\d-([0-9a-f]{12})\.json")


class Residual(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How well one part of the fit meets what was measured."""

    part: str
    """``kernels``, ``collectives``, ``contention``, ``overlap``, ``strategies``, ..."""
    what: str
    points: int
    error: float
    """Root mean square of the logarithm of fitted over measured: 0.05 is about 5 %."""
    r2: float | None = None
    """Share of the variance of the measured seconds that is explained; absent where all of them are equal."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found on a cluster, when and from what."""

    calibration_version: int = CALIBRATION_VERSION
    cluster: str
    made_at: str
    """UTC, ISO 8601."""
    partition: str | None = None
    intra_node: Wire
    """The profile's links as they were then: measured collectives are corrections of them."""
    inter_node: Wire
    machine: Machine
    residuals: list[Residual] = []
    notes: list[str] = []
    """What was not measured and stays at its nominal value."""
    run_ids: list[str] = []
    """The runs that it was fitted from."""
    environment_digests: list[str] = []
    """Of the software and the machine of those runs."""


class Stored(msgspec.Struct, frozen=True):
    """A calibration and its file."""

    calibration: Calibration
    path: Path

    @property
    def digest(self) -> str:
        """The hash in its name."""
        return self.path.stem[-12:]


def write_calibration(calibration: Calibration, tree: ClusterTree) -> Path:
    """Keep ``calibration`` in the tree of its cluster, else in the user's folder; returns the file's path."""
    data = msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n"
    name = f"{calibration.made_at[:10]}-{_digest(data)}.json"
    try:
        folder = tree.path("calibrations")
        make_folder(folder)
        write_atomic(folder / name, data)
    except StorageError:
        folder = own_folder(calibration.cluster)
        make_folder(folder)
        write_atomic(folder / name, data)
    return folder / name


def own_folder(cluster: str) -> Path:
    """Where calibrations of ``cluster`` lie whose tree may not be written."""
    return user_data_folder() / "calibrations" / cluster


def read_calibrations(tree: ClusterTree, cluster: str) -> tuple[list[Stored], list[str]]:
    """All that can be read, the newest first, and what is wrong with others, in words."""
    found: list[Stored] = []
    problems: list[str] = []
    for folder in (tree.path("calibrations"), own_folder(cluster)):
        for path in _files(folder):
            try:
                found.append(Stored(read_calibration(path), path))
            except StorageError as error:
                problems.append(error.message)
    found.sort(key=lambda one: (one.calibration.made_at, one.path.name), reverse=True)
    return found, problems


def read_calibration(path: Path) -> Calibration:
    """The calibration in ``path``; ``StorageError`` where it cannot be read or is not what its name says."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    named = _NAME.fullmatch(path.name)
    if named is not None and named[1] != _digest(data):
        raise StorageError(f"{path} is damaged: it holds {_digest(data)}", hint="calibrate again, and remove it")
    try:
        calibration = decode(data, Calibration)
    except msgspec.MsgspecError as error:
        raise StorageError(f"{path} is no calibration: {error}") from error
    if calibration.calibration_version != CALIBRATION_VERSION:
        version = calibration.calibration_version
        raise StorageError(f"{path} is a calibration of another version ({version}, not {CALIBRATION_VERSION})")
    return calibration


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder) if _NAME.fullmatch(name))
    except OSError:
        return []
