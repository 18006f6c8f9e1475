"""Validated requests to the oracle: recommendations for a model, and calibrations of a cluster as sweeps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.fileio import make_folder, write_atomic
from hpcbench.forecast.forecast import Forecast
from hpcbench.forecast.layer_table_cache import load_layer_table
from hpcbench.oracle.calibration.calibration_runs import (
    PROBE_LOOPS,
    CalibrationRun,
    calibration_sweep_name,
    calibration_sweep_toml,
)
from hpcbench.oracle.calibration.calibration_store import read_calibrations
from hpcbench.oracle.candidate_points import DeviceAllocation
from hpcbench.oracle.recommend import OBJECTIVES, Recommendation, recommend
from hpcbench.parallel.catalog import get_model as catalog_model
from hpcbench.parallel.layer_table import LayerTable, LayerTableRequest
from hpcbench.parallel.resolve import InfeasiblePoint, single_device_run
from hpcbench.parallel.workloads import DATASETS, check_custom_model, is_custom_model
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.results.schema import STATUS_OK
from hpcbench.submit.plan import SweepPlan, available_cores, make_plan, partition_limits


class RecommendRequest(NamedTuple):
    """The arguments of ``recommend``. One of the batch sizes is set; layouts of decoders have a default."""

    model: str
    dataset: str
    nodes: tuple[int, ...] = (1,)
    tasks_per_node: int | None = None
    input_size: int | None = None
    batch_size: int | None = None
    global_batch_size: int | None = None
    precision: str = "fp32"
    optimizer: str = "sgd"
    partition: str | None = None
    objective: str = "samples_per_s"


def recommend_for(
    wish: RecommendRequest, cluster_name: str, results: ResultsTree, model_folder: Path
) -> tuple[list[Recommendation], Forecast]:
    """A ranking for each number of nodes, and what it was made with.

    Raises ``ConfigErrors`` with everything that is wrong with ``wish``.
    """
    profile, _ = load_cluster(cluster_name)
    check_request(wish, profile, model_folder)
    base: dict[str, Any] = {"model": wish.model, "dataset": wish.dataset, "precision": wish.precision}
    base |= {"optimizer": wish.optimizer} if wish.optimizer != "sgd" else {}
    base |= {key: value for key in ("input_size", "partition") if (value := getattr(wish, key)) is not None}
    batch = {key: value for key in ("batch_size", "global_batch_size") if (value := getattr(wish, key)) is not None}
    forecast = Forecast(profile, results.cluster(profile.name), model_folder)
    per_node = wish.tasks_per_node or default_tasks_per_node(profile, wish.partition)
    limits = partition_limits(profile, wish.partition or profile.default_partition)
    worlds = [DeviceAllocation(nodes, per_node, batch) for nodes in sorted(set(wish.nodes))]
    return [recommend(base, world, limits, forecast, wish.objective) for world in worlds], forecast


def check_request(
    wish: RecommendRequest, profile: ClusterProfile, model_folder: Path, *, needs_batch: bool = True
) -> RunSpec:
    """Return a run of one sample on one device; ``ConfigErrors`` with everything that is wrong with ``wish``."""
    problems = [*_request_problems(wish, profile, model_folder, needs_batch)]
    if problems:
        raise ConfigErrors(problems)
    one = single_device_run(wish.model, wish.dataset, wish.input_size)
    if isinstance(one, InfeasiblePoint):
        raise ConfigError(one.reason)
    return one


def default_tasks_per_node(profile: ClusterProfile, partition: str | None) -> int:
    """A task for each device; of machines without devices one a node, here one a core."""
    if profile.device == "cpu":
        return available_cores() if profile.scheduler.kind == "local" else 1
    return profile.node_of(partition).devices or 1


def _request_problems(
    wish: RecommendRequest, profile: ClusterProfile, model_folder: Path, needs_batch: bool
) -> list[HpcbenchError]:
    found: list[HpcbenchError] = []
    if is_custom_model(wish.model):
        found += [problem] if (problem := check_custom_model(wish.model, model_folder.resolve(), "--model")) else []
    else:
        try:
            catalog_model(wish.model)
        except ConfigError as error:
            found.append(error)
    hints = get_type_hints(RunSpec)
    choices: dict[str, Any] = {
        "dataset": DATASETS, "precision": get_args(hints["precision"]), "optimizer": get_args(hints["optimizer"]),
        "objective": OBJECTIVES, "partition": profile.partitions,
    }  # fmt: skip
    for name, known in choices.items():
        value = getattr(wish, name)
        if value is not None and value not in known:
            found.append(ConfigError(f"unknown {name} {value!r}", hint=did_you_mean(value, known)))
    is_without = wish.batch_size is None and wish.global_batch_size is None
    if (wish.batch_size is None) == (wish.global_batch_size is None) and (needs_batch or not is_without):
        said = "both are given" if wish.batch_size else "neither is given"
        hint = "--batch-size is per replica, --global-batch-size of all replicas; the latter keeps the training equal"
        found.append(ConfigError(f"--batch-size or --global-batch-size: {said}", hint=hint))
    return found


def count_calibrations(tree: ClusterTree, profile: ClusterProfile, partition: str | None) -> int:
    """Return the number of finished calibrations of the partition: the next one has runs of its own.

    An interrupted calibration is not counted, so that it is continued.
    """
    wanted = partition or profile.default_partition
    found, _ = read_calibrations(tree, profile.name)
    whole = [one.calibration for one in found if not one.calibration.extends]
    return sum(calibration.partition == wanted and bool(calibration.run_ids) for calibration in whole)


def calibration_sweep_text(
    tree: ClusterTree, profile: ClusterProfile, partition: str | None, budget_s: float
) -> tuple[str, str]:
    """Name and text of the sweep of the calibration that is due."""
    number = count_calibrations(tree, profile, partition)
    return calibration_sweep_name(number, partition), calibration_sweep_toml(
        profile, partition, available_cores(), number, budget_s
    )


def make_calibration_plan(
    tree: ClusterTree, profile: ClusterProfile, partition: str | None, budget_s: float
) -> SweepPlan:
    """The plan of the calibration that is due; its sweep is kept beside the calibrations."""
    name, text = calibration_sweep_text(tree, profile, partition, budget_s)
    path = tree.path("calibrations", f"{name}.toml")
    make_folder(path.parent)
    write_atomic(path, text.encode())
    return make_plan(load_sweep(path), profile, tree)


def collect_evidence(trees: Iterable[tuple[ClusterTree, Iterable[str]]]) -> tuple[list[CalibrationRun], list[str]]:
    """Return the usable runs of each tree, and for the others the reason as text."""
    found: list[CalibrationRun] = []
    problems: list[str] = []
    tables: dict[bytes, LayerTable] = {}
    for tree, run_ids in trees:
        for run_id in run_ids:
            try:
                result = tree.read_result(run_id)
                if result is None or result.status != STATUS_OK or result.spec.strategy == PROBE_LOOPS:
                    continue
                spec = result.spec
                request = LayerTableRequest(
                    model=spec.model, dataset=spec.dataset, input_size=spec.input_size, model_options=spec.model_options
                )
                key = msgspec.json.encode(request)
                tables[key] = tables.get(key) or load_layer_table(request)
                found.append(CalibrationRun(result, tables[key]))
            except (HpcbenchError, msgspec.MsgspecError) as error:
                problems.append(f"run {run_id} is left out: {error}")
    return found, problems
