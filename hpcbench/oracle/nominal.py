"""A machine by its profile's numbers alone: vendors' peaks and usual latencies."""

from __future__ import annotations

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.hardware import Device, Link, Node
from hpcbench.oracle.collectives import Wire
from hpcbench.oracle.machine import Comm, Compute, Machine

_LAUNCH_S = {"cpu": 10e-6, "cuda": 5e-6}
_CORE_PEAKS = {"fp64": 20e9, "fp32": 40e9, "tf32": 40e9, "bf16": 40e9, "fp16": 40e9}
_CORE_BANDWIDTH_BYTES_PER_S = 8e9
_ACCELERATOR_PEAKS = {"fp64": 10e12, "fp32": 20e12, "tf32": 150e12, "bf16": 300e12, "fp16": 300e12}
_ACCELERATOR_BANDWIDTH_BYTES_PER_S = 2e12
_GUESSED = {
    "cpu": (Wire(50e-6, 1 / 2e9), Wire(100e-6, 1 / 1.25e9)),
    "cuda": (Wire(10e-6, 1 / 50e9), Wire(20e-6, 1 / 12.5e9)),
}
_BASE_BYTES = {"cpu": 300 * 2**20, "cuda": 600 * 2**20}
"""An interpreter with torch; a CUDA context with its libraries' workspaces."""
_GUESS_SPREAD = 0.7


def nominal_machine(profile: ClusterProfile, partition: str | None = None, tasks_per_node: int = 1) -> Machine:
    """What the profile says of ``partition``'s nodes and the links; what it does not say is guessed and noted."""
    notes: list[str] = []
    node = profile.node_of(partition)
    compute = _compute(profile, node, tasks_per_node, notes)
    return Machine(
        cluster=profile.name,
        device=profile.device,
        source=f"nominal numbers of the profile {profile.name}",
        compute=compute,
        comm=_comm(profile, notes),
        base_bytes=_BASE_BYTES[profile.device],
        memory_bytes=_memory(profile, node, tasks_per_node),
        notes=notes,
    )


def device_of(profile: ClusterProfile, node: Node) -> Device | None:
    """The device that ranks compute on, where the profile describes it."""
    if node.device_type in profile.devices:
        return profile.devices[node.device_type]
    return next(iter(profile.devices.values())) if len(profile.devices) == 1 else None


def _compute(profile: ClusterProfile, node: Node, tasks_per_node: int, notes: list[str]) -> Compute:
    device = device_of(profile, node)
    peaks = {str(key): value for key, value in device.peak_flops_per_s.items()} if device else {}
    bandwidth = device.memory_bandwidth_bytes_per_s if device else None
    is_guess = not peaks or bandwidth is None
    if is_guess:
        notes.append(f"{profile.name} does not say how fast its devices are: usual values are taken")
    is_cpu = profile.device == "cpu"
    crowding = {1: 1.0}
    if is_cpu and node.cores and tasks_per_node > node.cores:
        crowding = {1: 1.0, node.cores: 1.0, tasks_per_node: tasks_per_node / node.cores}
    known = {
        name: value for name in ("flops_efficiency", "processors") if (value := getattr(device, name, None)) is not None
    }
    return Compute(
        peak_flops_per_s=peaks or (_CORE_PEAKS if is_cpu else _ACCELERATOR_PEAKS),
        memory_bandwidth_bytes_per_s=bandwidth
        or (_CORE_BANDWIDTH_BYTES_PER_S if is_cpu else _ACCELERATOR_BANDWIDTH_BYTES_PER_S),
        launch_s=_LAUNCH_S[profile.device],
        crowding=crowding,
        spread=_GUESS_SPREAD if is_guess else 0.35,
        **known,
    )


def _comm(profile: ClusterProfile, notes: list[str]) -> Comm:
    intra, inter = profile.links.intra_node, profile.links.inter_node
    guessed_intra, guessed_inter = _GUESSED[profile.device]
    if intra is None or inter is None:
        missing = "inside nodes" if inter is not None else "between nodes" if intra is not None else "at all"
        notes.append(f"{profile.name} says nothing of its links {missing}: usual values are taken")
    return Comm(
        intra_node=wire_of(intra) if intra else guessed_intra,
        inter_node=wire_of(inter) if inter else guessed_inter,
        links_per_node=inter.per_node if inter else 1,
        striped=profile.device == "cuda",
        trees=profile.device == "cuda",
        by_hop=profile.device == "cuda",
        spread=0.4 if intra and inter else _GUESS_SPREAD,
    )


def wire_of(link: Link) -> Wire:
    """One direction of one link."""
    return Wire(link.latency_s, 1.0 / link.bandwidth_bytes_per_s)


def _memory(profile: ClusterProfile, node: Node, tasks_per_node: int) -> float | None:
    device = device_of(profile, node)
    if profile.device == "cuda":
        return device.memory_bytes if device else None
    requested = profile.request.memory_bytes
    whole = node.memory_bytes if not isinstance(requested, int | float) else float(requested)
    return whole / tasks_per_node if whole else None
