"""What runs that rehearse another cluster have to know of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from hpcbench.config.profiles import load_cluster
from hpcbench.config.spec import RunSpec
from hpcbench.results.store import ClusterTree

if TYPE_CHECKING:
    from hpcbench.oracle.machine import Machine


def rehearsed_clusters(specs: Iterable[RunSpec], tree: ClusterTree) -> dict[str, Any]:
    """By the clusters that ``specs`` rehearse: how fast these compute, for the task file's header."""
    names = sorted({spec.rehearse for spec in specs if spec.rehearse is not None})
    if not names:
        # Nearly all submits: they need not load the oracle.
        return {}
    from hpcbench.oracle.rehearsing import rehearsed

    return {name: msgspec.to_builtins(rehearsed(rehearsed_machine(name, tree))) for name in names}


def rehearsed_machine(name: str, tree: ClusterTree | None) -> Machine:
    """By the newest calibration of that cluster beside ``tree``, or by its profile. ``ConfigError`` where none is."""
    from hpcbench.oracle.calibration.choose import machine_for

    profile, _ = load_cluster(name)
    return machine_for(profile, ClusterTree(tree.root.parent / profile.name) if tree else None)
