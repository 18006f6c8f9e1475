"""A cluster's profile: what ``clusters/<name>.toml`` may say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hpcbench.config.quantity import Bytes, BytesPerSecond, FlopsPerSecond, Minutes, Seconds

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
OneLine = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]
Variables = dict[Annotated[str, Field(pattern=VARIABLE)], str]
Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]


class Table(BaseModel):
    """A TOML table: typed, and closed to keys that nobody knows."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Scheduler(Table):
    """Who starts the jobs."""

    kind: Literal["slurm", "local"] = "slurm"
    """`local` runs the job scripts on this machine, without a scheduler."""
    config_file: OneLine | None = None
    """The scheduler's configuration file (SLURM_CONF), where it is not the site's default."""
    bin_folder: OneLine | None = None
    """Where sbatch, squeue, sacct and scancel are, if not on PATH."""
    max_array_size: Annotated[int, Field(ge=1)] | None = None
    """Largest array; read from the scheduler when absent."""
    max_submitted_jobs: Annotated[int, Field(ge=1)] | None = None
    """Jobs that one person may have queued or running; the rest is sent later. Found by trying when absent."""
    max_running_jobs: Annotated[int, Field(ge=1)] | None = None
    """Jobs of one submission that may run at the same time."""
    retry_s: Seconds = 60.0
    """How long a scheduler that cannot answer just now is asked again."""
    warning_s: Seconds = 60.0
    """How long before the time limit the ranks are told (--signal), to leave what they measured."""


class Node(Table):
    """One node, as jobs see it."""

    cores: Annotated[int, Field(ge=1)] | None = None
    """Cores that jobs may use; this machine's for `local`. Absent: no limit is checked."""
    memory_bytes: Bytes | None = None
    """Memory that jobs may use."""
    devices: Annotated[int, Field(ge=0)] | None = None
    """Accelerators. Absent: no limit is checked."""
    device_type: str | None = None
    """A key of `devices`."""


class Device(Table):
    """One accelerator, or one core set, for the oracle and for MFU."""

    memory_bytes: Bytes | None = None
    memory_bandwidth_bytes_per_s: BytesPerSecond | None = None
    peak_flops_per_s: dict[Precision, FlopsPerSecond] = {}
    """Per precision, dense; MFU is left out where it is absent."""


class Link(Table):
    """What one rank sends over."""

    latency_s: Seconds
    bandwidth_bytes_per_s: BytesPerSecond
    mark: Literal["nominal", "measured"] = "nominal"
    """Where the numbers are from."""


class Links(Table):
    """Inside a node and between nodes."""

    intra_node: Link | None = None
    inter_node: Link | None = None


class Network(Table):
    """How ranks find each other."""

    interface: OneLine | None = None
    """Name or prefix of the interface that ranks meet on; the first one that is up when absent."""
    host_suffix: OneLine = ""
    """Appended to rank 0's host name to reach it over the fast network."""
    wait_s: Seconds = 300.0
    """How long a rank waits for the others."""


class Request(Table):
    """How a job asks for what it needs."""

    gpus: Literal["gpus-per-node", "gpus-per-task", "gres", "gres-typed", "none"] = "none"
    """How accelerators are asked for; `none` where they come with the partition."""
    memory: Literal["none", "all", "node"] = "none"
    """`none` asks for no memory, `all` is --mem=0, `node` is --mem with the node's memory."""
    memory_bytes: Bytes | None = None
    """Memory per node to ask for, instead of the node's."""
    cpus_per_task: Annotated[int, Field(ge=1)] | None = None
    """Cores of one rank; the node's, shared among its ranks, when absent."""
    exclusive: bool = False
    """Whole nodes."""
    drop: list[OneLine] = []
    """Directives that the site refuses, by name: "nodes", "signal"."""


class Partition(Table):
    """One queue. The key is its name here; `name` its name at the scheduler if that differs."""

    name: OneLine | None = None
    qos: OneLine | None = None
    constraint: OneLine | None = None
    max_nodes: Annotated[int, Field(ge=1)] | None = None
    max_time_min: Minutes | None = None
    time_limit_min: Minutes | None = None
    """Limit of a run that names none."""
    node: Node | None = None
    """Where this partition's nodes differ from the cluster's."""
    directives: dict[str, str | int | bool | list[str]] = {}


class Container(Table):
    """Wraps the worker's command."""

    command: Annotated[list[OneLine], Field(min_length=1)]
    """For instance `["apptainer", "exec", "--nv", "image.sif"]`."""


class Environment(Table):
    """A named environment for the jobs: modules, a virtual environment or an image."""

    modules: list[OneLine] = []
    """Loaded in this order after `module purge`."""
    setup: list[str] = []
    """Shell lines of the profile's author, run as they stand."""
    venv: OneLine | None = None
    """A virtual environment; its python runs the ranks."""
    python: OneLine | None = None
    """The interpreter that runs the ranks; the submitter's own when absent."""
    container: Container | None = None
    env: Variables = {}


_NO_PARTITION = Partition()
_NO_ENVIRONMENT = Environment()


class ClusterProfile(Table):
    """What hpcbench must know to run on a cluster, and the oracle to predict it."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str = ""
    verified: Literal["none", "docs", "run"] = "none"
    """How sure the values are: never checked, read in the site's documentation, or run there."""
    source: str = ""
    date: str = ""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the ranks compute on."""
    launcher: Literal["srun", "torchrun", "mpirun"] = "srun"
    """What starts the ranks inside a job."""
    launcher_args: list[OneLine] = []
    """More arguments for the launcher, one word each."""
    scheduler: Scheduler = Scheduler()
    account: OneLine | None = None
    default_partition: str | None = None
    """A key of `partitions`; without one the scheduler's own default is used."""
    partitions: dict[Annotated[str, Field(pattern=NAME)], Partition] = {}
    node: Node = Node()
    data_folder: OneLine | None = None
    """Where samples lie in files, as the nodes see it; `~` and `$VARIABLES` are the job's. `$HPCBENCH_DATA` wins."""
    devices: dict[str, Device] = {}
    links: Links = Links()
    network: Network = Network()
    request: Request = Request()
    directives: dict[str, str | int | bool | list[str]] = {}
    """More #SBATCH directives: `true` writes one without a value, a list repeats it."""
    environments: dict[Annotated[str, Field(pattern=NAME)], Environment] = {}
    default_environment: str | None = None
    env: Variables = {}
    """Variables that every job gets."""
    model_folder: Annotated[OneLine, Field(min_length=1)] | None = None
    """Where `model = "module:function"` of a sweep finds its module, from this file on."""
    time_limit_min: Minutes = 30.0
    """Limit of a run that names none, nor its partition."""
    budget_node_hours: Annotated[float, Field(gt=0)] | None = None
    """The most that one submit may cost, at the runs' time limits, unless it is told `--yes`."""

    @model_validator(mode="after")
    def _names_exist(self) -> ClusterProfile:
        for key, table in (("default_partition", "partitions"), ("default_environment", "environments")):
            chosen, known = getattr(self, key), getattr(self, table)
            if chosen is not None and chosen not in known:
                raise ValueError(f"{key} = {chosen!r} is not among the {table}: {', '.join(sorted(known)) or 'none'}")
        return self

    def partition(self, key: str | None) -> Partition:
        """The partition called ``key``, the default one, or one that says nothing."""
        chosen = key or self.default_partition
        return self.partitions[chosen] if chosen else _NO_PARTITION

    def environment(self, key: str | None) -> Environment:
        """The environment called ``key``, the default one, or the submitter's own."""
        chosen = key or self.default_environment
        return self.environments[chosen] if chosen else _NO_ENVIRONMENT

    def node_of(self, key: str | None) -> Node:
        """The nodes of a partition: its own values over the cluster's."""
        own = self.partition(key).node
        if own is None:
            return self.node
        return self.node.model_copy(update=own.model_dump(exclude_unset=True))
