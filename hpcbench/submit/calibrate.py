"""A calibration as a sweep: which one is due, its plan, and what its runs left."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.load import load_sweep
from hpcbench.config.spec import RunSpec
from hpcbench.errors import HpcbenchError
from hpcbench.fileio import make_folder, write_atomic
from hpcbench.oracle.calibration.evidence import Evidence
from hpcbench.oracle.calibration.store import read_calibrations
from hpcbench.oracle.calibration.sweep import sweep_name, sweep_text
from hpcbench.parallel.layers import LayerRequest, LayerTable
from hpcbench.results.schema import OK
from hpcbench.results.store import ClusterTree
from hpcbench.submit.layers import layer_table_of
from hpcbench.submit.plan import Plan, local_cores, make_plan


def calibration_number(tree: ClusterTree, profile: ClusterProfile, partition: str | None) -> int:
    """How many calibrations of the partition are finished: the next one has runs of its own.

    Until it is finished it stays the next one, so that what was interrupted goes on.
    """
    wanted = partition or profile.default_partition
    found, _ = read_calibrations(tree, profile.name)
    return sum(one.calibration.partition == wanted and bool(one.calibration.run_ids) for one in found)


def text_of(tree: ClusterTree, profile: ClusterProfile, partition: str | None, budget_s: float) -> tuple[str, str]:
    """Name and text of the sweep of the calibration that is due."""
    number = calibration_number(tree, profile, partition)
    return sweep_name(number, partition), sweep_text(profile, partition, local_cores(), number, budget_s)


def calibration_plan(tree: ClusterTree, profile: ClusterProfile, partition: str | None, budget_s: float) -> Plan:
    """The plan of the calibration that is due; its sweep is kept beside the calibrations."""
    name, text = text_of(tree, profile, partition, budget_s)
    path = tree.path("calibrations", f"{name}.toml")
    make_folder(path.parent)
    write_atomic(path, text.encode())
    return make_plan(load_sweep(path), profile, tree)


def evidence_of(trees: Iterable[tuple[ClusterTree, Iterable[str]]]) -> tuple[list[Evidence], list[str]]:
    """What the runs of each tree left, and what is wrong with those that cannot be used, in words."""
    found: list[Evidence] = []
    problems: list[str] = []
    tables: dict[bytes, LayerTable] = {}
    for tree, run_ids in trees:
        for run_id in run_ids:
            try:
                result = tree.read_result(run_id)
                if result is None or result.status != OK:
                    continue
                found.append(Evidence(result, _table(result.spec, tables)))
            except (HpcbenchError, msgspec.MsgspecError) as error:
                problems.append(f"run {run_id} is left out: {error}")
    return found, problems


def _table(spec: RunSpec, known: dict[bytes, LayerTable]) -> LayerTable:
    request = LayerRequest(
        model=spec.model, dataset=spec.dataset, input_size=spec.input_size, model_options=spec.model_options
    )
    key = msgspec.json.encode(request)
    if key not in known:
        known[key] = layer_table_of(request)
    return known[key]


def runs_named(tree: ClusterTree, run_ids: Iterable[str] | None = None) -> tuple[ClusterTree, list[str]]:
    """``tree`` with ``run_ids``, or with all of its runs."""
    return tree, list(tree.run_ids() if run_ids is None else run_ids)


def copy_to(path: Path, data: bytes) -> None:
    """Write ``data`` where the user wants it."""
    make_folder(path.parent)
    write_atomic(path, data)
