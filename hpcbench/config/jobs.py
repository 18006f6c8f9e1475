"""How a cluster's jobs ask for what they need and what they run in, as its profile says."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpcbench.config.hardware import Node
from hpcbench.config.limits import longest_min
from hpcbench.config.quantity import Bytes, Minutes, Seconds
from hpcbench.config.table import Count, Directives, OneLine, Table, Variable, Variables, Word

GpuRequest = Literal["gpus-per-node", "gpus-per-task", "gpus", "gres", "gres-typed", "none"]
Runtime = Literal["apptainer", "singularity", "shifter", "podman-hpc", "pyxis", "cscs-engine", "uenv"]


class Scheduler(Table):
    """Who starts the jobs."""

    kind: Literal["slurm", "local", "pbs", "none"] = "slurm"
    """`local` runs the job scripts on this machine; scripts for `pbs` are rendered, not submitted; `none` is a machine
    that is only predicted for."""
    config_file: OneLine | None = None
    """The scheduler's configuration file (SLURM_CONF), where it is not the site's default."""
    bin_folder: OneLine | None = None
    """Where sbatch, squeue, sacct and scancel are, if not on PATH."""
    max_array_size: Count | None = None
    """Largest array; read from the scheduler when absent."""
    max_submitted_jobs: Count | None = None
    """Jobs that one person may have queued or running; the rest is sent later. Found by trying when absent."""
    max_running_jobs: Count | None = None
    """Jobs of one submission that may run at the same time."""
    retry_s: Seconds = 60.0
    """How long a scheduler that cannot answer just now is asked again."""
    warning_s: Seconds = 60.0
    """How long before the time limit the ranks are told (--signal), to leave what they measured."""


class Request(Table):
    """How a job asks for what it needs."""

    gpus: GpuRequest = "none"
    """How accelerators are asked for; `none` where they come with the partition."""
    gpus_on: Literal["job", "step", "both"] = "job"
    """Where that is said: to sbatch, to srun (the job then gets whole nodes), or to both."""
    memory: Literal["none", "all", "node"] = "none"
    """`none` asks for no memory, `all` is --mem=0, `node` is --mem with the node's memory."""
    memory_bytes: Bytes | None = None
    """Memory per node to ask for, instead of the node's."""
    cpus_per_task: Count | None = None
    """CPUs of one rank; the node's, shared among its ranks, when absent."""
    cpus_per_device: Count | None = None
    """CPUs that come with each accelerator, where the site wants a fixed ratio."""
    exclusive: bool = False
    """Whole nodes."""
    exclude_nodes: list[Word] = []
    """Nodes that jobs must not get."""
    drop: list[OneLine] = []
    """Directives that the site refuses, by name: "nodes", "signal"; "partition" where other keys select the nodes."""


class Binding(Table):
    """Which cores and devices each rank gets, as far as srun has to be told."""

    cpu_bind: Word | None = None
    """srun's --cpu-bind: "cores", "sockets", "none", ..."""
    whole_node_cpu_bind: Word | None = None
    """A map or mask that fits one rank per device on all devices of a whole node: there instead of `cpu_bind`."""
    gpu_bind: Word | None = None
    """srun's --gpu-bind: "none", "closest", ..."""
    device_order: list[Annotated[int, Field(ge=0)]] = []
    """The device of each local rank, where jobs take all devices of a node."""
    one_device_per_rank: bool = False
    """Show each rank its device alone; otherwise each rank sees all and takes the one of its local rank."""
    device_variable: Literal["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"] = (
        "CUDA_VISIBLE_DEVICES"
    )
    """By which the order, and the device of each rank, is said."""


class TimeStep(Table):
    """A time limit that depends on the job's size."""

    nodes: Count
    """Jobs of up to so many nodes ..."""
    max_time_min: Minutes
    """... may take so long."""


class Partition(Table):
    """One queue. The key is its name here; `name` its name at the scheduler if that differs."""

    name: OneLine | None = None
    qos: OneLine | None = None
    constraint: OneLine | None = None
    min_nodes: Count | None = None
    max_nodes: Count | None = None
    max_time_min: Minutes | None = None
    max_time_by_nodes: list[TimeStep] = []
    """Where small jobs may take less time than large ones; above the last step `max_time_min` alone counts."""
    max_node_hours: Annotated[float, Field(gt=0)] | None = None
    """The most that one job may cost, where the site limits nodes times time."""
    max_submitted_jobs: Count | None = None
    """Jobs that one person may have queued or running here."""
    max_running_jobs: Count | None = None
    """Jobs that one person may have running here."""
    whole_nodes: bool = False
    """Jobs get whole nodes here, whatever they ask for."""
    all_devices_across_nodes: bool = False
    """Jobs of several nodes must take all devices of each."""
    time_limit_min: Minutes | None = None
    """Limit of a run that names none."""
    node: Node | None = None
    """Where this partition's nodes differ from the cluster's."""
    request: Request | None = None
    """Where jobs ask for things in another way here."""
    directives: Directives = {}

    def longest_min(self, nodes: int) -> float | None:
        """The longest that a job of ``nodes`` may take, in minutes; ``None`` where nothing limits it."""
        steps = [(step.nodes, step.max_time_min) for step in self.max_time_by_nodes]
        return longest_min(nodes, self.max_time_min, steps, self.max_node_hours)


_WITHOUT_MOUNTS = ("cscs-engine", "uenv")


class Container(Table):
    """Wraps the worker's command: in words of its own (`command`), or in those of a container runtime (`kind`)."""

    command: Annotated[list[OneLine], Field(min_length=1)] | None = None
    """For instance `["apptainer", "exec", "--nv", "image.sif"]`."""
    kind: Runtime | None = None
    """`apptainer`, `singularity`, `shifter` and `podman-hpc` are commands; `pyxis` and `cscs-engine` are options of
    srun; `shifter` and `uenv` are options of sbatch."""
    image: Annotated[OneLine, Field(min_length=1)] | None = None
    """The image; for `cscs-engine` the environment's definition file, for `uenv` its name and mount point."""
    mounts: list[Word] = []
    """`SOURCE:TARGET[:OPTIONS]`, each."""
    options: list[OneLine] = []
    """More words for the runtime: `["--nv"]`, `["--rocm"]`, `["--gpu"]`, `["--no-container-mount-home"]`."""
    modules: list[Word] = []
    """Of `shifter`: `["gpu", "nccl-plugin"]`; of `uenv`: its views."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Container:
        if (self.command is None) == (self.kind is None):
            raise ValueError("say either `command` or `kind`")
        if self.kind and not self.image:
            raise ValueError(f"kind = {self.kind!r} needs an `image`")
        if self.kind in _WITHOUT_MOUNTS and self.mounts:
            raise ValueError(f"{self.kind} takes no `mounts`: its own file says what is mounted")
        if self.modules and self.kind not in ("shifter", "uenv"):
            raise ValueError(
                "`modules` are shifter's, or the views of uenv; the environment's own are beside `container`"
            )
        if self.command and (self.image or self.mounts or self.options):
            raise ValueError("`command` is the whole command: `image`, `mounts` and `options` go with `kind`")
        return self


class Environment(Table):
    """A named environment for the jobs: modules, a virtual environment or an image."""

    modules: list[OneLine] = []
    """Loaded in this order."""
    modules_start: Literal["purge", "reset", "keep"] = "purge"
    """What is done before: `module purge`, `module reset`, or nothing."""
    setup: list[str] = []
    """Shell lines of the profile's author, run as they stand."""
    venv: OneLine | None = None
    """A virtual environment; its python runs the ranks."""
    python: OneLine | None = None
    """The interpreter that runs the ranks; when absent the submitter's own, or python3 in an image."""
    container: Container | None = None
    env: Variables = {}
    env_unset: list[Variable] = []
    """Variables that the jobs must not have."""
