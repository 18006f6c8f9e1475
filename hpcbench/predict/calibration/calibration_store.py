"""Calibration files, the finished runs that one is fitted to, and the machine that predictions for a cluster use.

A file is named by its date and the hash of its content and never changes. Files are kept beside the results of
their cluster, or in the user's own folder where that tree is not writable."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from math import log
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, StorageError
from hpcbench.fileio import encode_indented_json, make_folder, read_regular, write_atomic
from hpcbench.paths import is_folder, user_data_folder
from hpcbench.predict.collective_formulas import HockneyLink
from hpcbench.predict.machine import Machine, nominal_machine
from hpcbench.predict.message_prices import CommParameters
from hpcbench.results.decode import decode_record
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK, RunResult
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.workloads.models import is_custom_model

_Z95 = 1.96


class CalibrationRun(NamedTuple):
    """The result of a run, with the layer table of its model."""

    result: RunResult
    table: LayerTable

    @property
    def spec(self) -> RunSpec:
        """The specification of the run."""
        return self.result.spec

    @property
    def step_s(self) -> float:
        """The median of its timed steps, of which each time the slowest rank counts."""
        times = self.result.metrics.step_time_s
        return times.median if times is not None else 0.0

    @property
    def doubt(self) -> float:
        """Relative uncertainty of ``step_s`` within the launch: one deviation."""
        times = self.result.metrics.step_time_s
        return 0.0 if times is None else (times.ci95_high - times.ci95_low) / (2 * _Z95 * times.median)


def usable_runs(runs: Iterable[CalibrationRun]) -> list[CalibrationRun]:
    """Return the runs that ended well and have timed steps, or measured collectives."""
    good = (run for run in runs if run.result.status == STATUS_OK)
    return [run for run in good if run.step_s > 0 or run.spec.workload == "collectives"]


def runs_of_strategy(runs: Sequence[CalibrationRun], *keys: str) -> list[CalibrationRun]:
    """Return the runs of the strategies ``keys``."""
    return [run for run in runs if run.spec.strategy in keys]


DISTURBANCES = ("other processes used the cores", "other processes computed on the device")
"""Beginnings of the warnings that mark a run as disturbed by others."""
DISTURBED_NOTE = "are marked as disturbed"
_USED_SHARE = re.compile(r"(\d+) ?% of the \d+ core")
_SHARE_OF_DEVICE, _MAX_SHARE = 0.5, 0.95
_NORMAL_90 = 1.645


def disturbances(warnings: Iterable[str]) -> list[str]:
    """Return those of the warnings of a run that mark it as disturbed by others."""
    return [warning for warning in warnings if warning.startswith(DISTURBANCES)]


def check_disturbed(runs: Sequence[Iterable[str]], what: str, then: str, *, takes_disturbed: bool) -> list[str]:
    """Return a note with the number of disturbed runs; none if no run was disturbed.

    Args:
        runs: The warnings of each run.
        what: The runs, for the message, such as ``runs of snellius``.
        then: The consequence, for the message.
        takes_disturbed: Whether runs that were all disturbed are accepted.

    Raises:
        ConfigError: All runs were disturbed, and ``takes_disturbed`` is not set.
    """
    marks = [texts for texts in map(disturbances, runs) if texts]
    if marks and len(marks) == len(runs) and not takes_disturbed:
        raise ConfigError(
            f"all {len(runs)} {what} {DISTURBED_NOTE}: {marks[0][0]}; {then}",
            hint="measure again when the machine is quiet; --busy takes them as they are",
        )
    return [f"{len(marks)} of {len(runs)} runs {DISTURBED_NOTE}"] if marks else []


def disturbed_spread(runs: Sequence[Iterable[str]]) -> float:
    """Return the relative uncertainty by which a 90 % interval includes a machine as busy as it was during ``runs``.

    If others use a share of the cores, steps may take 1 / (1 - share) times as long. Others on the same device are
    assumed to use half of it. The median run counts, so the result is 0 if less than half of the runs were disturbed.
    """
    stretches = []
    for texts in map(disturbances, runs):
        used = (max(map(int, _USED_SHARE.findall(text)), default=100 * _SHARE_OF_DEVICE) / 100 for text in texts)
        stretches.append(1 / (1 - min(sum(used), _MAX_SHARE)))
    return log(median(stretches or [1.0])) / _NORMAL_90


CALIBRATION_VERSION = 1
_FILE_NAME = re.compile(r"\d{4}-\d\d-\d\d-([0-9a-f]{12})\.json")


class FitResidual(msgspec.Struct, frozen=True, kw_only=True):
    """The error of one part of the fit."""

    part: str
    """``kernels``, ``messages``, ``memory`` or ``strategies``."""
    what: str
    points: int
    error: float
    """Root mean square of the logarithm of fitted over measured: 0.05 is about 5 %."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fitted machine of a cluster, with date and runs."""

    calibration_version: int = CALIBRATION_VERSION
    cluster: str
    made_at: str
    """UTC, ISO 8601."""
    partition: str | None = None
    environment: str | None = None
    """Name of the environment in the profile; ``None`` is its default."""
    environment_key: str = ""
    """Hash of the software as the submitter saw it."""
    sweeps: list[str] = []
    """Sweeps whose own shapes were measured."""
    machine: Machine
    residuals: list[FitResidual] = []
    notes: list[str] = []
    """Figures that were not measured and keep their nominal value."""
    run_ids: list[str] = []
    """The runs that it was fitted from."""
    environment_digests: list[str] = []
    """Digests of the software and the machine of those runs."""


class StoredCalibration(msgspec.Struct, frozen=True):
    """A calibration and its file."""

    calibration: Calibration
    path: Path

    @property
    def digest(self) -> str:
        """The hash in its name."""
        return self.path.stem[-12:]


def write_calibration(calibration: Calibration, tree: ClusterTree) -> Path:
    """Keep ``calibration`` in the tree of its cluster, else in the user's folder; returns the file's path."""
    data = encode_indented_json(calibration)
    name = f"{calibration.made_at[:10]}-{_content_digest(data)}.json"
    try:
        return _write_into(tree.path("calibrations"), name, data)
    except StorageError:
        return _write_into(user_calibration_folder(calibration.cluster), name, data)


def _write_into(folder: Path, name: str, data: bytes) -> Path:
    make_folder(folder)
    write_atomic(folder / name, data)
    return folder / name


def user_calibration_folder(cluster: str) -> Path:
    """Return the user's folder for calibrations of a cluster whose tree is not writable."""
    return user_data_folder() / "calibrations" / cluster


def read_calibrations(tree: ClusterTree, cluster: str) -> tuple[list[StoredCalibration], list[str]]:
    """Return the readable calibrations, the newest first, and the errors of the unreadable ones as text."""
    calibrations: list[StoredCalibration] = []
    problems: list[str] = []
    for folder in filter(is_folder, (tree.path("calibrations"), user_calibration_folder(cluster))):
        for path in sorted(path for path in folder.glob("*.json") if _FILE_NAME.fullmatch(path.name)):
            try:
                calibrations.append(StoredCalibration(read_calibration(path), path))
            except StorageError as error:
                problems.append(error.message)
    calibrations.sort(key=lambda stored: (stored.calibration.made_at, stored.path.name), reverse=True)
    return calibrations, problems


def read_calibration(path: Path) -> Calibration:
    """Read a calibration; ``StorageError`` if it is unreadable or its content differs from the hash in its name."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    named = _FILE_NAME.fullmatch(path.name)
    if named is not None and named[1] != _content_digest(data):
        raise StorageError(
            f"{path} is damaged: it holds {_content_digest(data)}", hint="calibrate again, and remove it"
        )
    try:
        calibration = decode_record(data, Calibration)
    except msgspec.MsgspecError as error:
        raise StorageError(f"{path} is not a calibration: {error}") from error
    if calibration.calibration_version != CALIBRATION_VERSION:
        version = calibration.calibration_version
        raise StorageError(f"{path} is a calibration of another version ({version}, not {CALIBRATION_VERSION})")
    return calibration


def _content_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def machine_for(
    profile: ClusterProfile, tree: ClusterTree | None, partition: str | None = None, tasks_per_node: int = 1
) -> Machine:
    """Return the machine of the cluster's newest calibration, or the nominal one if there is none.

    ``tree`` is the cluster's. ``notes`` of the machine contain the choice and the changes of the profile since then.
    """
    nominal = nominal_machine(profile, partition, tasks_per_node)
    if tree is None:
        return nominal
    calibrations, problems = read_calibrations(tree, profile.name)
    chosen = calibration_of_partition(calibrations, profile, partition)
    if chosen is None:
        return msgspec.structs.replace(nominal, notes=[*nominal.notes, *problems])
    return apply_calibration(nominal, chosen, problems)


def apply_calibration(nominal: Machine, stored: StoredCalibration, problems: list[str]) -> Machine:
    """Return the calibrated machine with today's links and memory; its messages keep the links of their time."""
    calibration, today = stored.calibration, nominal.comm
    measured = calibration.machine.comm
    fields = ("messages", "overlaps", "measured_links", "spread", "measured_spread")
    return msgspec.structs.replace(
        calibration.machine,
        comm=msgspec.structs.replace(today, **{name: getattr(measured, name) for name in fields}),
        memory_bytes=nominal.memory_bytes,
        source=_source_text(stored),
        notes=[*calibration.notes, *_link_change_notes(measured, today), *problems],
    )


def _source_text(stored: StoredCalibration) -> str:
    calibration = stored.calibration
    text = f"calibration of {calibration.made_at[:10]} ({stored.digest})"
    return f"{text}, measured for {', '.join(calibration.sweeps)}" if calibration.sweeps else text


def calibration_of_partition(
    stored: list[StoredCalibration], profile: ClusterProfile, partition: str | None
) -> StoredCalibration | None:
    """Return the newest of ``stored`` of that partition, else of one with the same nodes."""
    wanted = partition or profile.default_partition
    of_partitions = [each for each in stored if each.calibration.partition in (None, *profile.partitions)]
    node = profile.partition(wanted).node
    alike = [each for each in of_partitions if profile.partition(each.calibration.partition).node == node]
    return next((each for each in stored if each.calibration.partition == wanted), next(iter(alike), None))


def environment_notes(stored: StoredCalibration | None, results: Sequence[RunResult]) -> list[str]:
    """Return a note if the newest of ``results`` is of another environment than the runs of the calibration."""
    known = set() if stored is None else set(stored.calibration.environment_digests)
    # A model of the user's own is a part of its environment.
    newest = next((result for result in results if not is_custom_model(result.spec.model)), None)
    if stored is None or not known or newest is None or newest.environment_digest in {None, *known}:
        return []
    return [
        f"calibration {stored.digest} is of another machine or software ({', '.join(sorted(known))}) than the newest "
        f"results ({newest.environment_digest}), and predictions rest on it: hpcbench cluster calibrate "
        f"{stored.calibration.cluster} measures again"
    ]


def _link_change_notes(measured: CommParameters, today: CommParameters) -> list[str]:
    notes = []
    for then, name, where in zip(
        measured.measured_links or (), ("intra_node", "inter_node"), ("inside nodes", "between nodes"), strict=False
    ):
        now: HockneyLink = getattr(today, name)
        if then != now:
            texts = [f"{link.latency_s * 1e6:g} us and {1e-9 / link.beta_s_per_byte:g} GB/s" for link in (then, now)]
            notes.append(
                f"the profile's link {where} has changed since the calibration: {texts[0]} then, {texts[1]} now; times "
                "per byte go with it, measured latencies stay"
            )
    return notes
