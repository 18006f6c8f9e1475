"""``node = "each"``: the nodes of a partition, as its scheduler lists them."""

from __future__ import annotations

from dataclasses import replace

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import EACH_NODE
from hpcbench.config.sweep_loader import ParameterSettings, Sweep
from hpcbench.errors import ConfigError, HpcbenchError
from hpcbench.submit.scheduler_registry import scheduler_class


def with_each_node(sweep: Sweep, profile: ClusterProfile) -> Sweep:
    """Return ``sweep`` with the names of the partition's nodes in the place of ``node = "each"``.

    Raises ``ConfigError`` for several partitions, and for a scheduler that lists no nodes; ``SubmitError``, if it does
    not answer.
    """
    if EACH_NODE not in sweep.values("node"):
        return sweep
    partitions = sweep.values("partition") or [profile.default_partition]
    if len(partitions) > 1:
        named = ", ".join(map(str, partitions))
        where = sweep.where("node")
        raise ConfigError(f'node = "each" is of one partition, not of {named}', where=where, hint="name the nodes")
    try:
        nodes = scheduler_class(profile.scheduler.kind, profile.name)(profile).node_names(partitions[0])
    except HpcbenchError as error:
        error.where = error.where or sweep.where("node")
        raise
    steps: list[ParameterSettings] = [{("node",): name} for name in nodes]
    each = [{("node",): EACH_NODE}]
    return replace(sweep, axes=[replace(axis, steps=steps) if axis.steps == each else axis for axis in sweep.axes])
