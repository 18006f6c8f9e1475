"""The cost parameters of a machine: from its profile or from measurements."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.profile_tables import DeviceConfig, LinkConfig, NodeConfig
from hpcbench.predict.collective_formulas import HockneyLink
from hpcbench.predict.kernel_prices import DeviceCompute
from hpcbench.predict.message_prices import CommParameters

MachineSource = Literal["nominal", "calibrated"]
"""Source of a machine's numbers: the profile, or measured parts of steps."""


class StrategyOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """The overhead of a strategy's library on this machine, fitted to calibration runs."""

    compute_factor: float = 1.0
    step_s: float = 0.0
    sample_s: float = 0.0
    """Seconds per sample of a replica, for a library in which one rank distributes the samples of its group."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers by which the oracle prices runs on a cluster, in seconds, bytes and FLOP/s.

    ``nominal_machine`` makes one from a profile, ``machine_for`` from the newest calibration. A machine belongs to one
    partition and one number of ranks per node, which decide its devices and, on CPUs, the memory of a rank.

    Example:
        >>> from hpcbench.config.cluster_profile import load_cluster
        >>> machine = nominal_machine(load_cluster("abci-v100")[0], tasks_per_node=4)
        >>> machine.device, machine.depth, machine.compute.peak_flops_per_s["fp32"]
        ('cuda', 'nominal', 15700000000000.0)
    """

    cluster: str
    device: str
    """``cpu`` or ``cuda``."""
    depth: MachineSource = "nominal"
    """Source of the numbers."""
    source: str = ""
    """The profile, or the calibration with its date and hash."""
    compute: DeviceCompute
    comm: CommParameters
    strategies: dict[str, StrategyOverhead] = {}
    straggling: float = 0.0
    """Relative spread of one rank's step around its mean: of p ranks the slowest counts."""
    base_bytes: float = 0.0
    """Bytes beside the run's tensors in a measured peak: the process on a CPU, cuBLAS's workspaces on cuda."""
    memory_bytes: float | None = None
    """Memory that such a peak may reach: a rank's part of the node's, or the device's without a CUDA context."""
    notes: list[str] = []
    """Notes on figures that the profile lacks and that are assumed."""


_KERNEL_LAUNCH_S = {"cpu": 10e-6, "cuda": 5e-6}
_USUAL_RATES = {
    "cpu": ({"fp64": 20e9, "fp32": 40e9, "tf32": 40e9, "bf16": 40e9, "fp16": 40e9}, 8e9),
    "cuda": ({"fp64": 10e12, "fp32": 20e12, "tf32": 150e12, "bf16": 300e12, "fp16": 300e12}, 2e12),
}
"""FLOP/s by precision and bytes/s of memory: of one core, and of an accelerator."""
_DEFAULT_LINKS = {
    "cpu": (HockneyLink(50e-6, 1 / 2e9), HockneyLink(100e-6, 1 / 1.25e9)),
    "cuda": (HockneyLink(10e-6, 1 / 50e9), HockneyLink(20e-6, 1 / 12.5e9)),
}
_PROCESS_BYTES = 300 * 2**20
"""An interpreter with torch."""
_CONTEXT_BYTES = 600 * 2**20
"""A CUDA context with the kernels of its libraries. torch's allocator, whose peak is measured, does not count it."""
_HOPPER = re.compile(r"g?h(20|100|200|800)(?!\d)", re.IGNORECASE)
_WORKSPACE_BYTES, _HOPPER_WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024, 8 * 4096 * 1024
"""Defaults of CUBLAS_WORKSPACE_CONFIG, which torch's allocator gives to a cuBLAS handle on a stream
(``aten/src/ATen/cuda/CublasHandlePool.cpp``)."""
_CUBLAS_HANDLES = 2
"""The thread that runs forward has one, and autograd's."""
_DEFAULTS_SPREAD = 0.7


def nominal_machine(profile: ClusterProfile, partition: str | None = None, tasks_per_node: int = 1) -> Machine:
    """Return a machine from the profile's numbers of ``partition``; missing ones are guessed and noted."""
    notes: list[str] = []
    node, is_cpu = profile.partition(partition).node, profile.device == "cpu"
    device = device_description(profile, node)
    memory_bytes = device.memory_bytes - _CONTEXT_BYTES if device and device.memory_bytes else None
    workspace_bytes = _HOPPER_WORKSPACE_BYTES if _HOPPER.match(node.device_type or "") else _WORKSPACE_BYTES
    if is_cpu:
        requested = profile.request.memory_bytes
        node_bytes = float(requested) if isinstance(requested, int | float) else node.memory_bytes
        memory_bytes = node_bytes / tasks_per_node if node_bytes else None
    return Machine(
        cluster=profile.name,
        device=profile.device,
        source=f"nominal numbers of the profile {profile.name}",
        compute=_nominal_compute(profile, node, device, tasks_per_node, notes),
        comm=_nominal_comm(profile, notes),
        base_bytes=_PROCESS_BYTES if is_cpu else _CUBLAS_HANDLES * workspace_bytes,
        memory_bytes=memory_bytes,
        notes=notes,
    )


_PEAKS_OF_LAYOUTS = ("fp8", "fp4")
"""Precisions in which hpcbench trains nothing itself."""


def device_description(profile: ClusterProfile, node: NodeConfig) -> DeviceConfig | None:
    """Return the device that ranks compute on, where the profile describes it."""
    if node.device_type in profile.devices:
        return profile.devices[node.device_type]
    return next(iter(profile.devices.values())) if len(profile.devices) == 1 else None


def _nominal_compute(
    profile: ClusterProfile, node: NodeConfig, device: DeviceConfig | None, tasks_per_node: int, notes: list[str]
) -> DeviceCompute:
    peaks = {str(key): value for key, value in device.peak_flops_per_s.items()} if device else {}
    peaks = {key: value for key, value in peaks.items() if key not in _PEAKS_OF_LAYOUTS}
    bandwidth = device.memory_bandwidth_bytes_per_s if device else None
    is_guess = not peaks or bandwidth is None
    if is_guess:
        notes.append(f"profile {profile.name}: device speed is not set; usual values are assumed")
    crowding = {1: 1.0}
    if profile.device == "cpu" and node.cores and tasks_per_node > node.cores:
        crowding |= {node.cores: 1.0, tasks_per_node: tasks_per_node / node.cores}
    usual_peaks, usual_bandwidth = _USUAL_RATES[profile.device]
    measured = {name: getattr(device, name, None) for name in ("flops_efficiency", "processors")}
    return DeviceCompute(
        peak_flops_per_s=peaks or usual_peaks,
        memory_bandwidth_bytes_per_s=bandwidth or usual_bandwidth,
        launch_s=_KERNEL_LAUNCH_S[profile.device],
        crowding=crowding,
        spread=_DEFAULTS_SPREAD if is_guess else 0.35,
        **{name: value for name, value in measured.items() if value is not None},
    )


def _nominal_comm(profile: ClusterProfile, notes: list[str]) -> CommParameters:
    intra, inter = profile.links.intra_node, profile.links.inter_node
    guessed_intra, guessed_inter = _DEFAULT_LINKS[profile.device]
    notes += assumed_link_notes(profile).values()
    return CommParameters(
        intra_node=nominal_link(intra) if intra else guessed_intra,
        inter_node=nominal_link(inter) if inter else guessed_inter,
        links_per_node=inter.per_node if inter else 1,
        striped=profile.device == "cuda",
        trees=profile.device == "cuda",
        by_hop=profile.device == "cuda",
        spread=0.4 if intra and inter else _DEFAULTS_SPREAD,
    )


def assumed_link_notes(profile: ClusterProfile) -> dict[str, str]:
    """Return notes with the assumed values of links that the profile does not define, by their key in ``links``."""
    places = {"intra_node": "inside nodes", "inter_node": "between nodes"}
    return {
        key: f"profile {profile.name} defines no links {places[key]}: {link.latency_s * 1e6:g} us and "
        f"{1e-9 / link.beta_s_per_byte:g} GB/s are assumed"
        for key, link in zip(places, _DEFAULT_LINKS[profile.device], strict=True)
        if getattr(profile.links, key) is None
    }


def nominal_link(link: LinkConfig) -> HockneyLink:
    """Return one direction of one link."""
    return HockneyLink(link.latency_s, 1.0 / link.bandwidth_bytes_per_s)
