"""What somebody wants to train, where and on how much: checked, and ranked by the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.load import load_cluster
from hpcbench.config.spec import RunSpec
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.oracle.candidates import World
from hpcbench.oracle.recommend import OBJECTIVES, Recommendation, recommend
from hpcbench.parallel.catalog import model as catalog_model
from hpcbench.parallel.datasets import DATASETS
from hpcbench.parallel.own_model import check_own, is_own
from hpcbench.parallel.pairs import pair
from hpcbench.parallel.resolve import Dropped
from hpcbench.results.store import ResultsTree
from hpcbench.submit.forecast import Forecast
from hpcbench.submit.plan import limits_of, local_cores


class Wish(NamedTuple):
    """As ``recommend`` is told. One of the batch sizes is given."""

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


def fulfilled(
    wish: Wish, cluster_name: str, results: ResultsTree, model_folder: Path
) -> tuple[list[Recommendation], Forecast]:
    """A ranking for each number of nodes, and what it was made with.

    Raises ``ConfigErrors`` with everything that is wrong with ``wish``.
    """
    profile, _ = load_cluster(cluster_name)
    problems = [*_problems(wish, profile, model_folder)]
    if problems:
        raise ConfigErrors(problems)
    one = pair(wish.model, wish.dataset, wish.input_size)
    if isinstance(one, Dropped):
        raise ConfigError(one.reason)
    base: dict[str, Any] = {"model": wish.model, "dataset": wish.dataset, "precision": wish.precision}
    base |= {"optimizer": wish.optimizer} if wish.optimizer != "sgd" else {}
    base |= {key: value for key in ("input_size", "partition") if (value := getattr(wish, key)) is not None}
    batch = {key: value for key in ("batch_size", "global_batch_size") if (value := getattr(wish, key)) is not None}
    forecast = Forecast(profile, results.cluster(profile.name), model_folder)
    per_node = wish.tasks_per_node or _tasks_per_node(profile, wish.partition)
    limits = limits_of(profile, wish.partition or profile.default_partition)
    worlds = [World(nodes, per_node, batch) for nodes in sorted(set(wish.nodes))]
    return [recommend(base, world, limits, forecast, wish.objective) for world in worlds], forecast


def _tasks_per_node(profile: ClusterProfile, partition: str | None) -> int:
    """A task for each device; of machines without devices one a node, here one a core."""
    if profile.device == "cpu":
        return local_cores() if profile.scheduler.kind == "local" else 1
    return profile.node_of(partition).devices or 1


def _problems(wish: Wish, profile: ClusterProfile, model_folder: Path) -> list[HpcbenchError]:
    found: list[HpcbenchError] = []
    if is_own(wish.model):
        found += [problem] if (problem := check_own(wish.model, model_folder.resolve(), "--model")) else []
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
    if (wish.batch_size is None) == (wish.global_batch_size is None):
        said = "both are given" if wish.batch_size else "neither is given"
        hint = "--batch-size is per replica, --global-batch-size of all replicas; the latter keeps the training alike"
        found.append(ConfigError(f"--batch-size or --global-batch-size: {said}", hint=hint))
    return found
