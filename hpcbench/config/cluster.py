"""A cluster's profile: what ``clusters/<name>.toml`` may say."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from hpcbench.config.hardware import Device, Link, Links, Network, Node
from hpcbench.config.jobs import Binding, Container, Environment, Partition, Request, Scheduler
from hpcbench.config.quantity import Minutes
from hpcbench.config.table import NAME, Directives, OneLine, Table, Variable, Variables

__all__ = [
    "NAME", "Binding", "ClusterProfile", "Container", "Device", "Environment", "Link", "Links", "Match", "Network",
    "Node", "Partition", "Request", "Scheduler", "Table",
]  # fmt: skip

_T = TypeVar("_T", bound=Table)


class Match(Table):
    """How this machine is known to be a login node of the cluster: any of these is enough."""

    hosts: list[str] = []
    """Regular expressions for the whole host name, with or without its domain."""
    variables: Variables = {}
    """Variables of the environment and their values."""
    files: dict[str, OneLine] = {}
    """Files and what they hold."""

    @field_validator("hosts")
    @classmethod
    def _compiles(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            try:
                re.compile(host)
            except re.error as error:
                raise ValueError(f"{host!r} is no regular expression: {error}") from None
        return hosts


_NO_PARTITION = Partition()
_NO_ENVIRONMENT = Environment()


class ClusterProfile(Table):
    """What hpcbench must know to run on a cluster, and the oracle to predict it."""

    name: Annotated[str, Field(pattern=NAME)]
    extends: Annotated[str, Field(pattern=NAME)] | None = None
    """Another profile, whose tables this one is laid over, key by key."""
    description: str = ""
    verified: Literal["none", "docs", "run"] = "none"
    """How sure the values are: never checked, read in the site's documentation, or run there."""
    source: str = ""
    """Where the values are from."""
    date: str = ""
    """When they were looked up."""
    match: Match = Match()
    device: Literal["cpu", "cuda"] = "cpu"
    """What the ranks compute on; torch calls AMD's devices cuda, too."""
    launcher: Literal["srun", "torchrun", "mpirun", "ibrun"] = "srun"
    """What starts the ranks inside a job; ibrun is TACC's."""
    launcher_args: list[OneLine] = []
    """More arguments for the launcher, one word each."""
    scheduler: Scheduler = Scheduler()
    account: OneLine | None = None
    """Keep yours out of profiles that are shared: `[accounts]` in `~/.config/hpcbench/config.toml` is the place."""
    account_required: bool = False
    """The site takes no job without an account."""
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
    binding: Binding = Binding()
    directives: Directives = {}
    """More #SBATCH directives: `true` writes one without a value, a list repeats it."""
    environments: dict[Annotated[str, Field(pattern=NAME)], Environment] = {}
    default_environment: str | None = None
    setup: list[str] = []
    """Shell lines of the profile's author that every job runs before its environment's modules."""
    env: Variables = {}
    """Variables that every job gets."""
    env_unset: list[Variable] = []
    """Variables that no job must have."""
    model_folder: Annotated[OneLine, Field(min_length=1)] | None = None
    """Where `model = "module:function"` of a sweep finds its module, from this file on."""
    time_limit_min: Minutes = 30.0
    """Limit of a run that names none, nor its partition; never more than its partition allows."""
    budget_node_hours: Annotated[float, Field(gt=0)] | None = None
    """The most that one submit may cost, at the runs' time limits, unless it is told `--yes`."""

    @model_validator(mode="after")
    def _names_exist(self) -> ClusterProfile:
        for key, table in (("default_partition", "partitions"), ("default_environment", "environments")):
            chosen, known = getattr(self, key), getattr(self, table)
            if chosen is not None and chosen not in known:
                raise ValueError(f"{key} = {chosen!r} is not among the {table}: {', '.join(sorted(known)) or 'none'}")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> ClusterProfile:
        for key in (None, *self.partitions):
            request, node = self.request_of(key), self.node_of(key)
            if request.gpus == "gres-typed" and not (node.gres_type or node.device_type):
                raise ValueError("request.gpus = 'gres-typed' needs node.gres_type or node.device_type")
            if request.gpus_on != "job" and self.launcher in ("mpirun", "ibrun"):
                raise ValueError(
                    f"request.gpus_on = {request.gpus_on!r} speaks to srun, but launcher = {self.launcher!r}"
                )
        order, devices = self.binding.device_order, self.node.devices
        if order and devices is not None and sorted(order) != list(range(devices)):
            raise ValueError(f"binding.device_order = {order} does not name each of the {devices} devices once")
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
        return _laid_over(self.node, self.partition(key).node)

    def request_of(self, key: str | None) -> Request:
        """How jobs of a partition ask: its own words over the cluster's."""
        return _laid_over(self.request, self.partition(key).request)

    def variables(self, key: str | None) -> dict[str, str]:
        """What jobs in the environment called ``key`` have set: the network's, the cluster's, the environment's own."""
        return {**self.network.variables, **self.env, **self.environment(key).env}


def _laid_over(base: _T, own: _T | None) -> _T:
    if own is None:
        return base
    set_there: dict[str, Any] = {name: getattr(own, name) for name in own.model_fields_set}
    return base.model_copy(update=set_there)
