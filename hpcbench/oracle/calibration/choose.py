"""Which numbers predictions for a cluster are made from."""

from __future__ import annotations

import msgspec

from hpcbench.config.cluster import ClusterProfile
from hpcbench.oracle.calibration.store import Calibration, Stored, read_calibrations
from hpcbench.oracle.collectives import Wire
from hpcbench.oracle.machine import Comm, Machine
from hpcbench.oracle.nominal import nominal_machine
from hpcbench.results.store import ClusterTree

_KINDS = {"calibrated": "calibration", "fitted": "fit of whole runs", "nominal": "nominal numbers"}


def machine_for(
    profile: ClusterProfile, tree: ClusterTree | None, partition: str | None = None, tasks_per_node: int = 1
) -> Machine:
    """The newest calibration of the cluster, or the profile's numbers where there is none.

    ``tree`` is the cluster's. ``notes`` of the machine say what was chosen against what, and what has changed since.
    """
    nominal = nominal_machine(profile, partition, tasks_per_node)
    if tree is None:
        return nominal
    found, problems = read_calibrations(tree, profile.name)
    chosen = _of_partition(found, profile, partition)
    if chosen is None:
        return msgspec.structs.replace(nominal, notes=[*nominal.notes, *problems])
    return laid_over(nominal, chosen, problems)


def laid_over(nominal: Machine, stored: Stored, problems: list[str]) -> Machine:
    """The calibrated machine with today's links and memory: a measured collective corrects its link's numbers."""
    calibration = stored.calibration
    machine = calibration.machine
    today = ("links_per_node", "striped", "trees", "by_hop")
    comm: Comm = msgspec.structs.replace(
        machine.comm,
        intra_node=_moved(machine.comm.intra_node, calibration.intra_node, nominal.comm.intra_node),
        inter_node=_moved(machine.comm.inter_node, calibration.inter_node, nominal.comm.inter_node),
        **_slowdowns(machine.comm, calibration.inter_node, nominal.comm.inter_node),
        **{name: getattr(nominal.comm, name) for name in today},
    )
    return msgspec.structs.replace(
        machine,
        comm=comm,
        memory_bytes=nominal.memory_bytes,
        source=f"{_KINDS[machine.depth]} of {calibration.made_at[:10]} ({stored.digest})",
        notes=[*calibration.notes, *_changed(calibration, nominal.comm), *problems],
    )


def _slowdowns(comm: Comm, then: Wire, now: Wire) -> dict[str, float]:
    """What computation and collectives take from each other when links between nodes have another rate than ``then``.

    Under computation the processor bounds the rate of a collective, whatever the link's; and what a collective takes
    of the processor goes with the bytes in a second.
    """
    rate = then.beta_s_per_byte / now.beta_s_per_byte if now.beta_s_per_byte else 1.0
    return {
        "comm_slowdown": max(1.0, comm.comm_slowdown * rate) if comm.comm_slowdown > 1.0 else 1.0,
        "overlap_slowdown": 1.0 + (comm.overlap_slowdown - 1.0) * rate,
    }


def _moved(found: Wire, then: Wire, now: Wire) -> Wire:
    """``found`` when the profile said ``then``, as far off what it says now."""
    if then == now:
        return found
    if found == then:
        return now
    latency = found.latency_s / then.latency_s if then.latency_s else 1.0
    return Wire(latency * now.latency_s, found.beta_s_per_byte / then.beta_s_per_byte * now.beta_s_per_byte)


def _of_partition(found: list[Stored], profile: ClusterProfile, partition: str | None) -> Stored | None:
    """The newest of that partition, else of one with the same nodes."""
    wanted = partition or profile.default_partition
    same = [one for one in found if one.calibration.partition == wanted]
    node = profile.node_of(wanted)
    alike = [one for one in found if _node_of(profile, one.calibration.partition) == node]
    return next(iter([*same, *alike]), None)


def _node_of(profile: ClusterProfile, partition: str | None) -> object:
    return profile.node_of(partition) if partition is None or partition in profile.partitions else None


def _changed(calibration: Calibration, today: Comm) -> list[str]:
    found = []
    for name, place in (("intra_node", "inside nodes"), ("inter_node", "between nodes")):
        then, now = getattr(calibration, name), getattr(today, name)
        if then != now:
            found.append(
                f"the profile's link {place} has changed since the calibration: {_words(then)} then, {_words(now)} now"
                "; times per byte go with it, measured latencies stay"
            )
    return found


def _words(wire: Wire) -> str:
    return f"{wire.latency_s * 1e6:g} us and {1e-9 / wire.beta_s_per_byte:g} GB/s"
