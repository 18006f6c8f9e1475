"""What a cluster is made of, as its profile says: nodes, devices, links, and how ranks reach each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpcbench.config.quantity import Bytes, BytesPerSecond, FlopsPerSecond, Seconds
from hpcbench.config.table import Count, OneLine, Precision, Table, Word

Mark = Literal["nominal", "measured"]


class Node(Table):
    """One node, as jobs see it."""

    cores: Count | None = None
    """CPUs that jobs may use, as the scheduler counts them (threads where it counts those); this machine's for
    `local`. Absent: no limit is checked."""
    memory_bytes: Bytes | None = None
    """Memory that jobs may use."""
    memory_includes_devices: bool = False
    """The scheduler's memory of a node counts the devices' (Grace Hopper): it is not what the host has."""
    devices: Annotated[int, Field(ge=0)] | None = None
    """Accelerators, as the scheduler counts them (an MI250X is two). Absent: no limit is checked."""
    device_type: str | None = None
    """A key of `devices`."""
    gres_type: Word | None = None
    """What the scheduler calls the accelerator, where that is not `device_type`."""
    arch: Literal["x86_64", "aarch64"] | None = None
    """Environments and images have to be made for it."""
    internet: bool = True
    """Whether jobs reach the internet; where not, data and models are fetched before."""
    scratch_folder: OneLine | None = None
    """Fast storage that all nodes share; `$VARIABLES` are the job's. The probe job writes there."""
    local_folder: OneLine | None = None
    """Storage of the node itself; `$VARIABLES` are the job's. The probe job writes there."""
    tmp_in_memory: bool = False
    """`/tmp` is memory and counts as the job's."""


class Device(Table):
    """One accelerator, or one core set, for the oracle and for MFU."""

    memory_bytes: Bytes | None = None
    memory_bandwidth_bytes_per_s: BytesPerSecond | None = None
    peak_flops_per_s: dict[Precision, FlopsPerSecond] = {}
    """Per precision, dense; MFU is left out where it is absent."""
    flops_efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the peak, what large matrix products reach where all multiprocessors are busy; for the oracle, which takes a
    usual share where it is absent."""
    processors: Count | None = None
    """Multiprocessors that a matrix product's tiles are dealt out to: the oracle then counts what the last wave of
    tiles leaves idle."""
    mark: Mark = "nominal"
    """Where the numbers are from: the vendor's, or measured."""


class Link(Table):
    """What one rank sends over, one direction."""

    latency_s: Seconds
    bandwidth_bytes_per_s: BytesPerSecond
    per_node: Count = 1
    """How many such links a node has to other nodes; groups of ranks that send at the same time share them."""
    mark: Mark = "nominal"
    """Where the numbers are from. Vendors state no latency: a nominal link's is a usual one of its kind."""


class Links(Table):
    """Inside a node and between nodes."""

    intra_node: Link | None = None
    inter_node: Link | None = None


class Network(Table):
    """How ranks find each other."""

    interface: OneLine | None = None
    """Name or prefix of the interface that ranks meet on, and that gloo and NCCL's sockets use; the first one that is
    up when absent."""
    host_suffix: OneLine = ""
    """Appended to rank 0's host name to reach it over the fast network."""
    meet_by: Literal["interface", "host-name"] = "interface"
    """Which address of rank 0 the others get: the interface's, or the one that its host name stands for."""
    nccl_interfaces: list[Word] = []
    """For NCCL's sockets (NCCL_SOCKET_IFNAME), where it is not `interface`: names, prefixes, or `=name`."""
    nccl_hcas: list[Word] = []
    """InfiniBand devices that NCCL may use (NCCL_IB_HCA); all when empty."""
    gloo_interface: Word | None = None
    """For gloo (GLOO_SOCKET_IFNAME), where it is not `interface`."""
    wait_s: Seconds = 300.0
    """How long a rank waits for the others."""

    @property
    def variables(self) -> dict[str, str]:
        """What the libraries of the ranks read."""
        named = {
            "NCCL_SOCKET_IFNAME": ",".join(self.nccl_interfaces),
            "NCCL_IB_HCA": ",".join(self.nccl_hcas),
            "GLOO_SOCKET_IFNAME": self.gloo_interface or "",
        }
        return {name: value for name, value in named.items() if value}
