"""The tables of a cluster profile: hardware, scheduler, partitions, resource requests, binding, containers and
environments.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from hpcbench.config import scheduler_kinds as schedulers
from hpcbench.config.run_spec import max_job_minutes
from hpcbench.config.scheduler_kinds import SHIPPED_KINDS, SchedulerKind, check_scheduler_kind, scheduler_kind
from hpcbench.config.toml_tables import (
    BytesPerSecond,
    Directives,
    EnvironmentVariables,
    FlopsPerSecond,
    MemoryBytes,
    MemoryBytesPerSecond,
    Minutes,
    NonSpaceText,
    PositiveInt,
    Precision,
    Seconds,
    SingleLineText,
    TomlTable,
    VariableName,
)
from hpcbench.errors import did_you_mean
from hpcbench.units import MAX_COUNT

ValueSource = Literal["nominal", "measured"]


class NodeConfig(TomlTable):
    """A node, as jobs see it."""

    cores: PositiveInt | None = None
    """CPUs that jobs may use, as the scheduler counts them (threads where it counts those); this machine's for
    `local`. Absent: no limit is checked."""
    memory_bytes: MemoryBytes | None = None
    """Memory that jobs may use."""
    memory_includes_devices: bool = False
    """The scheduler's memory of a node counts the devices' (Grace Hopper): it is not what the host has."""
    devices: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    """Accelerators, as the scheduler counts them (an MI250X is two). Absent: no limit is checked."""
    device_type: str | None = None
    """A key of `devices`."""
    ranks_per_device: PositiveInt = 1
    """Ranks that share each device, with `scheduler.kind = "local"` alone. They communicate over gloo, with messages
    staged in the host's memory, so such runs show that the software is right and have no times."""
    gres_type: NonSpaceText | None = None
    """Name of the accelerator at the scheduler, where that is not `device_type`."""
    arch: Literal["x86_64", "aarch64"] | None = None
    """Environments and images have to be made for it."""
    internet: bool = True
    """Whether jobs reach the internet; where not, data and models are fetched before."""
    scratch_folder: SingleLineText | None = None
    """Fast storage that all nodes share; `$VARIABLES` are the job's. The probe job writes there."""
    local_folder: SingleLineText | None = None
    """Storage of the node itself; `$VARIABLES` are the job's. The probe job writes there."""
    tmp_in_memory: bool = False
    """`/tmp` is memory and counts as the job's."""

    @property
    def device_places(self) -> int | None:
        """Return how many ranks its devices have room for; ``None`` if nothing limits them."""
        return None if self.devices is None else self.devices * self.ranks_per_device


class DeviceConfig(TomlTable):
    """The figures of an accelerator, or of a set of cores, for the oracle and for MFU."""

    memory_bytes: MemoryBytes | None = None
    memory_bandwidth_bytes_per_s: MemoryBytesPerSecond | None = None
    peak_flops_per_s: dict[Precision, FlopsPerSecond] = {}
    """Peak rates of dense arithmetic by precision; without the run's precision MFU is left out. `fp8` and `fp4` price
    layouts of decoders in 8 and 4 bit."""
    flops_efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of the peak that large matrix products reach where all multiprocessors are busy, for the oracle; a usual
    fraction when absent."""
    processors: PositiveInt | None = None
    """Multiprocessors that a matrix product's tiles are dealt out to: the oracle then counts what the last wave of
    tiles leaves idle."""
    fitted: str | None = None
    """Machine of the oracle's package data, learned from published training runs (`h100-80gb-sxm`): `recommend` prices
    decoders by it."""
    mark: ValueSource = "nominal"
    """Source of the numbers: the vendor (`nominal`), or a measurement (`measured`)."""


class LinkConfig(TomlTable):
    """A link as one rank uses it, in one direction."""

    latency_s: Seconds
    bandwidth_bytes_per_s: BytesPerSecond
    per_node: PositiveInt = 1
    """Number of such links from a node to other nodes; groups of ranks that send at the same time share them."""
    shared: bool = False
    """Whether groups of ranks share the rate of `intra_node`, as over PCIe without NVLink."""
    mark: ValueSource = "nominal"
    """Source of the numbers. Vendors state no latency: that of a nominal link is a usual one of its kind."""


class LinksConfig(TomlTable):
    """The links inside a node and between nodes."""

    intra_node: LinkConfig | None = None
    inter_node: LinkConfig | None = None


class NetworkConfig(TomlTable):
    """Addresses and interfaces by which ranks find each other."""

    interface: SingleLineText | None = None
    """Name or prefix of the interface that ranks meet on, and that gloo and NCCL's sockets use; the first one that is
    up when absent."""
    host_suffix: SingleLineText = ""
    """Appended to rank 0's host name to reach it over the fast network."""
    meet_by: Literal["interface", "host-name"] = "interface"
    """Address of rank 0 that the other ranks connect to: the interface's, or the one that its host name resolves to."""
    nccl_interfaces: list[NonSpaceText] = []
    """Interfaces of NCCL's sockets (NCCL_SOCKET_IFNAME), where they differ from `interface`: names, prefixes, or
    `=name`."""
    nccl_hcas: list[NonSpaceText] = []
    """InfiniBand devices that NCCL may use (NCCL_IB_HCA); all when empty."""
    gloo_interface: NonSpaceText | None = None
    """Interface of gloo (GLOO_SOCKET_IFNAME), where it differs from `interface`."""
    wait_s: Seconds = 300.0
    """Seconds that a rank waits for the other ranks before the run fails."""

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables that the ranks' libraries read."""
        named = {
            "NCCL_SOCKET_IFNAME": ",".join(self.nccl_interfaces),
            "NCCL_IB_HCA": ",".join(self.nccl_hcas),
            "GLOO_SOCKET_IFNAME": self.gloo_interface or "",
        }
        return {name: value for name, value in named.items() if value}


GpuRequestStyle = Literal["gpus-per-node", "gpus-per-task", "gpus", "gres", "gres-typed", "none"]
ContainerRuntime = Literal["apptainer", "singularity", "shifter", "podman-hpc", "pyxis", "cscs-engine", "uenv"]


SchedulerName = Annotated[
    str, BeforeValidator(check_scheduler_kind), WithJsonSchema({"enum": [*SHIPPED_KINDS], "type": "string"})
]


class SchedulerConfig(TomlTable):
    """The scheduler that starts the jobs."""

    kind: SchedulerName = "slurm"
    """`local` runs the job scripts on this machine; scripts for `pbs` are rendered, not submitted; `none` is a machine
    that is only predicted for."""
    config_file: SingleLineText | None = None
    """The scheduler's configuration file (SLURM_CONF), where it is not the site's default."""
    bin_folder: SingleLineText | None = None
    """Folder of sbatch, squeue, sacct and scancel, if they are not on PATH."""
    max_array_size: PositiveInt | None = None
    """Largest array; read from the scheduler when absent."""
    max_submitted_jobs: PositiveInt | None = None
    """Jobs that one person may have queued or running; the rest is sent later. Found by trying when absent."""
    max_running_jobs: PositiveInt | None = None
    """Jobs of one submission that may run at the same time; with `local` it is always one."""
    retry_s: Seconds = 60.0
    """Seconds for which calls to a scheduler that does not answer are repeated."""
    poll_s: Seconds | None = None
    """Pause between two queries of `run`, `submit --wait` and `status --watch`; 30 s on SLURM, 1 s locally."""
    warning_s: Seconds = 60.0
    """Time before the time limit at which the ranks receive a signal (--signal) and write their measurements."""

    @property
    def traits(self) -> SchedulerKind:
        """The properties of ``kind``."""
        return scheduler_kind(self.kind)


class ResourceRequest(TomlTable):
    """The resources in a job's request, and their directives."""

    gpus: GpuRequestStyle = "none"
    """Option that requests accelerators; `none` where they come with the partition."""
    gpus_on: Literal["job", "step", "both"] = "job"
    """Command that requests accelerators: sbatch (`job`), srun (`step`; the job then gets whole nodes), or both."""
    memory: Literal["none", "all", "node"] = "none"
    """`none` asks for no memory, `all` is --mem=0, `node` is --mem with the node's memory."""
    memory_bytes: MemoryBytes | None = None
    """Memory per node to ask for, instead of the node's."""
    cpus_per_task: PositiveInt | None = None
    """CPUs of one rank. When absent: the node's, shared among its devices where jobs may share nodes, else among its
    ranks."""
    cpus_per_device: PositiveInt | None = None
    """CPUs that come with each accelerator, where the site prescribes a fixed ratio."""
    exclusive: bool = False
    """Whether jobs get whole nodes."""
    exclude_nodes: list[NonSpaceText] = []
    """Nodes that jobs must not get."""
    drop: list[SingleLineText] = []
    """Directives that the site refuses, by name: "nodes", "signal"; "partition" where other keys select the nodes."""


class BindingConfig(TomlTable):
    """The assignment of cores and devices to ranks, as far as srun needs options for it."""

    cpu_bind: NonSpaceText | None = None
    """srun's --cpu-bind: "cores", "sockets", "none", ..."""
    whole_node_cpu_bind: NonSpaceText | None = None
    """A map or mask that fits one rank per device on all devices of a whole node: there instead of `cpu_bind`."""
    gpu_bind: NonSpaceText | None = None
    """srun's --gpu-bind: "none", "closest", ..."""
    device_order: list[Annotated[int, Field(ge=0)]] = []
    """The device of each local rank, where jobs take all devices of a node."""
    one_device_per_rank: bool = False
    """Show each rank its device alone; otherwise each rank sees all and takes the one of its local rank."""
    device_variable: Literal["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"] = (
        "CUDA_VISIBLE_DEVICES"
    )
    """Variable that sets the order of the devices, and the device of each rank."""


class TimeLimitStep(TomlTable):
    """A time limit that depends on the job's size."""

    nodes: PositiveInt
    """Jobs of up to so many nodes ..."""
    max_time_min: Minutes
    """... may take so long."""


class PartitionConfig(TomlTable):
    """A queue. The key is its name here; `name` its name at the scheduler if that differs."""

    name: SingleLineText | None = None
    qos: SingleLineText | None = None
    constraint: SingleLineText | None = None
    nodes: PositiveInt | None = None
    """Nodes that it has; `plan` warns of runs on more, which the scheduler refuses or keeps pending."""
    min_nodes: PositiveInt | None = None
    max_nodes: PositiveInt | None = None
    """The most that one job may have; runs on more are infeasible."""
    max_time_min: Minutes | None = None
    max_time_by_nodes: list[TimeLimitStep] = []
    """Time limits that depend on the number of nodes, where small jobs may take less time than large ones; above the
    last step only `max_time_min` limits a job."""
    max_node_hours: Annotated[float, Field(gt=0)] | None = None
    """The most that one job may cost, where the site limits nodes times time."""
    max_submitted_jobs: PositiveInt | None = None
    """Jobs that one person may have queued or running here."""
    max_running_jobs: PositiveInt | None = None
    """Jobs that one person may have running here."""
    whole_nodes: bool = False
    """Jobs get whole nodes here, whatever they ask for."""
    all_devices_across_nodes: bool = False
    """Jobs of several nodes must take all devices of each."""
    time_limit_min: Minutes | None = None
    """Limit of a run that names none."""
    node: NodeConfig | None = None
    """Values in which this partition's nodes differ from the cluster's."""
    request: ResourceRequest | None = None
    """Keys in which the resource request of jobs here differs from the cluster's."""
    directives: Directives = {}

    def longest_min(self, nodes: int) -> float | None:
        """The longest that a job of ``nodes`` may take, in minutes; ``None`` where nothing limits it."""
        steps = [(step.nodes, step.max_time_min) for step in self.max_time_by_nodes]
        return max_job_minutes(nodes, self.max_time_min, steps, self.max_node_hours)


_RUNTIMES_WITHOUT_MOUNTS = ("cscs-engine", "uenv")


class ContainerConfig(TomlTable):
    """Wraps the worker's command: with its own command (`command`), or with that of a container runtime (`kind`)."""

    command: Annotated[list[SingleLineText], Field(min_length=1)] | None = None
    """Words before the worker's command, such as `["apptainer", "exec", "--nv", "image.sif"]`."""
    kind: ContainerRuntime | None = None
    """`apptainer`, `singularity`, `shifter` and `podman-hpc` are commands; `pyxis` and `cscs-engine` are options of
    srun; `shifter` and `uenv` are options of sbatch."""
    image: Annotated[SingleLineText, Field(min_length=1)] | None = None
    """The image; for `cscs-engine` the environment's definition file, for `uenv` its name and mount point."""
    mounts: list[NonSpaceText] = []
    """`SOURCE:TARGET[:OPTIONS]`, each."""
    options: list[SingleLineText] = []
    """More words for the runtime: `["--nv"]`, `["--rocm"]`, `["--gpu"]`, `["--no-container-mount-home"]`."""
    modules: list[NonSpaceText] = []
    """Modules of `shifter`, such as `["gpu", "nccl-plugin"]`; views of `uenv`."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> ContainerConfig:
        if (self.command is None) == (self.kind is None):
            raise ValueError("set either `command` or `kind`")
        if self.kind and not self.image:
            raise ValueError(f"kind = {self.kind!r} needs an `image`")
        if self.kind in _RUNTIMES_WITHOUT_MOUNTS and self.mounts:
            raise ValueError(f"{self.kind} takes no `mounts`: its own file lists the mounts")
        if self.modules and self.kind not in ("shifter", "uenv"):
            raise ValueError(
                "`modules` are shifter's, or the views of uenv; the environment's own are beside `container`"
            )
        if self.command and (self.image or self.mounts or self.options):
            raise ValueError("`command` is the whole command: `image`, `mounts` and `options` go with `kind`")
        return self


class EnvironmentConfig(TomlTable):
    """A named environment for the jobs: modules, a virtual environment or an image."""

    modules: list[SingleLineText] = []
    """Loaded in this order."""
    modules_start: Literal["purge", "reset", "keep"] = "purge"
    """Command before the modules are loaded: `module purge`, `module reset`, or none."""
    setup: list[str] = []
    """Shell lines of the profile's author, run as they stand."""
    venv: SingleLineText | None = None
    """A virtual environment; its python runs the ranks."""
    python: SingleLineText | None = None
    """The interpreter that runs the ranks; when absent the submitter's own, or python3 in an image."""
    container: ContainerConfig | None = None
    env: EnvironmentVariables = {}
    """Variables that the jobs get in addition."""
    env_unset: list[VariableName] = []
    """Variables that the jobs must not have."""

    @model_validator(mode="after")
    def _has_one_python(self) -> EnvironmentConfig:
        if self.venv and self.python:
            raise ValueError(f"venv = {self.venv!r} has a python, and python = {self.python!r} is another: keep one")
        return self


class Partition(PartitionConfig):
    """All that holds for the jobs of a partition: its own values, and the cluster's where it has none.

    ``ClusterProfile.partition`` makes it. ``name`` is the name at the scheduler.
    """

    key: str | None = None
    """Its name in the profile; ``None`` where jobs name no partition."""
    time_limit_min: Minutes = 30.0
    node: NodeConfig = NodeConfig()
    request: ResourceRequest = ResourceRequest()
    own: PartitionConfig = PartitionConfig()
    """Its own values alone."""

    def place(self, table: str, key: str) -> str:
        """The place in the profile of the value that holds here, as a dotted key."""
        own = getattr(self.own, table) or ()
        is_own = key in (own.model_fields_set if isinstance(own, TomlTable) else own)
        steps = ("partitions", self.key or "", table, key) if is_own else (table, key)
        return ".".join(step if re.fullmatch(r"[A-Za-z0-9_-]+", step) else json.dumps(step) for step in steps)

    def __hash__(self) -> int:
        return hash(self.key)


def check_partition(partition: Partition, scheduler: SchedulerConfig) -> None:
    """Raise ``ValueError`` for node counts, a warning or directives with which no job works."""
    least, most = partition.min_nodes, partition.max_nodes
    if least is not None and most is not None and least > most:
        raise ValueError(f"partitions.{partition.key}.min_nodes = {least} is above its max_nodes, {most}")
    where = f" of partition {partition.key}" * bool(partition.key)
    limit_s = 60 * min(partition.time_limit_min, partition.max_time_min or math.inf)
    if scheduler.warning_s >= limit_s:
        raise ValueError(
            f"scheduler.warning_s = {scheduler.warning_s:g} s is not below the time limit{where}, {limit_s:g} s: ranks "
            "would stop as they start; lower it, or raise time_limit_min"
        )
    request, written = partition.request, schedulers.WRITTEN_DIRECTIVES.get(scheduler.kind, {})
    # Arrays are an option of sbatch itself.
    names = written.keys() - {"array"}
    if written and (unknown := next((name for name in request.drop if name not in names), None)) is not None:
        place, hint = partition.place("request", "drop"), did_you_mean(unknown, names)
        raise ValueError(f"{place} = {request.drop}: hpcbench writes no directive {unknown!r}: {hint}")
    written_if = {
        "qos": partition.qos, "constraint": partition.constraint, "exclude": request.exclude_nodes,
        "mem": request.memory != "none" or request.memory_bytes, "exclusive": request.exclusive,
        "gres": request.gpus.startswith("gres") or "gpu" in str(partition.directives.get("gres")),
    }  # fmt: skip
    for name, value in partition.directives.items() if written else ():
        right = schedulers.directive_name(name, scheduler.kind)
        ours = schedulers.SAME_REQUEST.get(right, right)
        way = bool(written_if.get(ours, True)) and written.get(ours, False)
        problem = "" if right == name != "" else f"write {right}" if right else f"no directive of {scheduler.kind}"
        if way is not False and (not way or ours not in request.drop):
            problem = f"hpcbench writes {'this one' if ours == name else ours} for each job: remove it"
            problem += f"; {way} sets it, or add {ours!r} to request.drop" * bool(way)
        if problem:
            raise ValueError(f"{partition.place('directives', name)} = {value!r:.80}: {problem}")


class Environment(EnvironmentConfig):
    """All that holds for the jobs of an environment, with the interpreter and the variables that apply.

    ``ClusterProfile.environment`` makes it. ``env`` are all variables: the network's, the cluster's and its own.
    """

    key: str | None = None
    """Its name in the profile; ``None`` where it is the submitter's own."""
    python: str = sys.executable
    cluster_setup: list[str] = []
    """Shell lines before the modules are loaded."""

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def is_made_in_job(self) -> bool:
        """Whether its software can only be seen inside a job."""
        return bool(self.modules or self.container or self.setup)
