"""What runs that rehearse another cluster have to know of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hpcbench.config.profiles import load_cluster
from hpcbench.config.spec import RunSpec
from hpcbench.oracle.calibration.choose import machine_for
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.rehearsing import rehearsed
from hpcbench.results.store import ClusterTree


def rehearsed_clusters(specs: Iterable[RunSpec], tree: ClusterTree) -> dict[str, Any]:
    """By the clusters that ``specs`` rehearse: how fast these compute, for the task file's header."""
    names = sorted({spec.rehearse for spec in specs if spec.rehearse is not None})
    return {name: msgspec.to_builtins(rehearsed(rehearsed_machine(name, tree))) for name in names}


def rehearsed_machine(name: str, tree: ClusterTree | None) -> Machine:
    """By the newest calibration of that cluster beside ``tree``, or by its profile. ``ConfigError`` where none is."""
    profile, _ = load_cluster(name)
    return machine_for(profile, ClusterTree(tree.root.parent / profile.name) if tree else None)
