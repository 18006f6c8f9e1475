"""Calibration files, and the machine that predictions for a cluster use.

A file is named by its date and the hash of its content and never changes. Files are kept beside the results of
their cluster, or in the user's own folder where that tree is not writable."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import StorageError
from hpcbench.fileio import encode_indented_json, make_folder, read_regular, write_atomic
from hpcbench.oracle.collective_formulas import HockneyLink
from hpcbench.oracle.machine import CommParameters, Machine, StrategyOverhead, nominal_machine
from hpcbench.oracle.measured_shapes import MeasuredShapes
from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.paths import is_folder, user_data_folder
from hpcbench.results.decode import decode_record
from hpcbench.results.results_tree import ClusterTree

CALIBRATION_VERSION = 1
_FILE_NAME = re.compile(r"\d{4}-\d\d-\d\d-([0-9a-f]{12})\.json")


class FitResidual(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The error of one part of the fit."""

    part: str
    """``kernels``, ``collectives``, ``contention``, ``overlap``, ``strategies``, ..."""
    what: str
    points: int
    error: float
    """Root mean square of the logarithm of fitted over measured: 0.05 is about 5 %."""
    r2: float | None = None
    """Share of the variance of the measured seconds that is explained; absent where all of them are equal."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fitted machine of a cluster, with date and runs."""

    calibration_version: int = CALIBRATION_VERSION
    cluster: str
    made_at: str
    """UTC, ISO 8601."""
    partition: str | None = None
    intra_node: HockneyLink
    """The profile's links as they were then: measured collectives are corrections of them."""
    inter_node: HockneyLink
    machine: Machine
    residuals: list[FitResidual] = []
    notes: list[str] = []
    """Figures that were not measured and keep their nominal value."""
    extends: str = ""
    """Hash of the calibration to which this one, made for a sweep, adds measured shapes; ``profile`` without one."""
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
        raise StorageError(f"{path} is no calibration: {error}") from error
    if calibration.calibration_version != CALIBRATION_VERSION:
        version = calibration.calibration_version
        raise StorageError(f"{path} is a calibration of another version ({version}, not {CALIBRATION_VERSION})")
    return calibration


def _content_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


_SOURCE_NAMES = {"calibrated": "calibration", "fitted": "fit of whole runs", "nominal": "nominal numbers"}


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
    """The calibrated machine with today's links and memory: a measured collective corrects its link's numbers."""
    calibration = stored.calibration
    machine, measured = calibration.machine, calibration.machine.comm
    shapes = _current_shapes(calibration, nominal.comm)
    if machine.depth == "nominal":
        notes = [*nominal.notes, *calibration.notes, *problems]
        return msgspec.structs.replace(nominal, measured=shapes, source=_source_text(stored), notes=notes)
    beta = nominal.comm.inter_node.beta_s_per_byte
    overlap_slowdown, comm_slowdown = slowdowns_at_rate(
        measured, calibration.inter_node.beta_s_per_byte / beta if beta else 1.0
    )
    today = ("links_per_node", "striped", "trees", "by_hop")
    comm: CommParameters = msgspec.structs.replace(
        measured,
        intra_node=_rescaled_link(measured.intra_node, calibration.intra_node, nominal.comm.intra_node),
        inter_node=_rescaled_link(measured.inter_node, calibration.inter_node, nominal.comm.inter_node),
        overlap_slowdown=overlap_slowdown,
        comm_slowdown=comm_slowdown,
        **{name: getattr(nominal.comm, name) for name in today},
    )
    return msgspec.structs.replace(
        machine,
        comm=comm,
        strategies=library_overheads(machine.strategies) if machine.depth == "calibrated" else machine.strategies,
        memory_bytes=nominal.memory_bytes,
        measured=shapes,
        source=_source_text(stored),
        notes=[*calibration.notes, *_link_change_notes(calibration, nominal.comm), *problems],
    )


def slowdowns_at_rate(measured: CommParameters, rate: float) -> tuple[float, float]:
    """Return the slowdowns of computation and of a collective under each other, on a link ``rate`` times as fast.

    What each loses to the other is in proportion to the bytes that the link carries in a second.
    """
    return 1.0 + (measured.overlap_slowdown - 1.0) * rate, 1.0 + (measured.comm_slowdown - 1.0) * rate


def library_overheads(overheads: Mapping[str, StrategyOverhead]) -> dict[str, StrategyOverhead]:
    """Return the plausible overheads of libraries; earlier calibrations have some of this project's own code."""
    return {
        name: plausible_overhead(overhead)
        for name, overhead in overheads.items()
        if name in STRATEGIES and STRATEGIES[name].library is not None
    }


def plausible_overhead(overhead: StrategyOverhead) -> StrategyOverhead:
    """Return ``overhead``; none where its library would compute faster than the kernels that it calls.

    Earlier fits let such a factor, an error of the formulas, be balanced by a time per step.
    """
    return overhead if overhead.compute_factor >= 1.0 else StrategyOverhead()


def _source_text(stored: StoredCalibration) -> str:
    machine = stored.calibration.machine
    text = f"{_SOURCE_NAMES[machine.depth]} of {stored.calibration.made_at[:10]} ({stored.digest})"
    return text if machine.measured is None else f"{text}, measured for {', '.join(machine.measured.sweeps)}"


def _current_shapes(calibration: Calibration, today: CommParameters) -> MeasuredShapes | None:
    """Return the measured shapes, without messages over a link that the profile has changed since."""
    shapes = calibration.machine.measured
    if shapes is None:
        return None
    return shapes.over_links((today.intra_node, today.inter_node))


def _rescaled_link(fitted: HockneyLink, profile_then: HockneyLink, profile_now: HockneyLink) -> HockneyLink:
    """Return ``fitted``, scaled by the ratio of the profile's link today to its link when it was fitted."""
    if profile_then == profile_now:
        return fitted
    if fitted == profile_then:
        return profile_now
    latency = fitted.latency_s / profile_then.latency_s if profile_then.latency_s else 1.0
    beta = fitted.beta_s_per_byte / profile_then.beta_s_per_byte
    return HockneyLink(latency * profile_now.latency_s, beta * profile_now.beta_s_per_byte)


def calibration_of_partition(
    stored: list[StoredCalibration], profile: ClusterProfile, partition: str | None
) -> StoredCalibration | None:
    """Return the newest of ``stored`` of that partition, else of one with the same nodes."""
    wanted = partition or profile.default_partition
    of_partitions = [each for each in stored if each.calibration.partition in (None, *profile.partitions)]
    alike = [each for each in of_partitions if profile.node_of(each.calibration.partition) == profile.node_of(wanted)]
    return next((each for each in stored if each.calibration.partition == wanted), next(iter(alike), None))


def _link_change_notes(calibration: Calibration, today: CommParameters) -> list[str]:
    notes = []
    for name, where in (("intra_node", "inside nodes"), ("inter_node", "between nodes")):
        links = getattr(calibration, name), getattr(today, name)
        if links[0] != links[1]:
            then, now = (f"{link.latency_s * 1e6:g} us and {1e-9 / link.beta_s_per_byte:g} GB/s" for link in links)
            notes.append(
                f"the profile's link {where} has changed since the calibration: {then} then, {now} now"
                "; times per byte go with it, measured latencies stay"
            )
    return notes
