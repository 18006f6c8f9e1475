"""Horovod (Sergeev and Del Balso 2018): its start among ranks that have already met, and its DistributedOptimizer.

Neither horovodrun nor ssh takes part.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError, unsupported
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.mesh import steps_per_epoch
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.distributed.rendezvous import list_interfaces, reachable_address
from hpcbench.worker.failure import install_hint
from hpcbench.worker.strategy import DataParallelStrategy, refuse_strided_parameters
from hpcbench.workloads.datasets import DATASETS

_started_with: dict[str, str] = {}
"""Variables with which Horovod was started in this process; empty before its start. A second start with several ranks
ends in a segmentation fault."""


def load_horovod() -> Any:
    """``horovod.torch``; ``WorkerError`` (``unsupported``) with the command that installs it where it does not work.

    A package without its extension imports with no more than a printed warning, and one that was built for another
    torch fails on a symbol.
    """
    try:
        library = importlib.import_module("horovod.torch")
        if hasattr(library, "init"):
            return library
        problem = "its extension for torch is missing"
    except ImportError as error:
        problem = str(error)
    raise unsupported(
        f"{sys.executable} on {socket.gethostname()} has no Horovod that works with torch {torch.__version__}: "
        f"{problem}",
        install_hint("horovod"),
    )


def horovod_facts(spec: RunSpec) -> dict[str, Any] | None:
    """Version, what it was built with, and who coordinates; ``None`` where Horovod does not work."""
    with contextlib.suppress(WorkerError):
        library = load_horovod()
        built = {"gloo": library.gloo_built(), "mpi": library.mpi_built(), "nccl": library.nccl_built(),
                 "cuda": library.cuda_built()}  # fmt: skip
        return {
            "version": metadata.version("horovod"),
            "built_with": [name for name, is_built in built.items() if is_built],
            "controller": str(spec.options.get("controller", "gloo")),
        }
    return None


class HorovodSlot(NamedTuple):
    """A rank as Horovod numbers it: among all, among those of its host, and among its like on the other hosts."""

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def assign_slots(hosts: list[str]) -> list[HorovodSlot]:
    """The slot of every rank, from the host that each runs on.

    >>> assign_slots(["a", "a", "b"])[2]
    HorovodSlot(hostname='b', rank=2, size=3, local_rank=0, local_size=1, cross_rank=1, cross_size=2)
    """
    names = list(dict.fromkeys(hosts))
    sizes = {name: hosts.count(name) for name in names}
    slots = []
    for rank, host in enumerate(hosts):
        local_rank = hosts[:rank].count(host)
        like = [name for name in names if sizes[name] > local_rank]
        slots.append(HorovodSlot(host, rank, len(hosts), local_rank, sizes[host], like.index(host), len(like)))
    return slots


def start_horovod(library: Any, context: RankContext, controller: str, settings: Mapping[str, str]) -> None:
    """Initialise Horovod on every rank of ``context.group``, with the variables ``settings``.

    It reads them once: started already, it is used as it is, or refused where something else was wanted.
    """
    wanted = {**settings, "HOROVOD_CONTROLLER": controller, "HOROVOD_SIZE": str(context.world_size)}
    if _started_with:
        assert wanted == _started_with, (
            f"Horovod runs in this process with {_started_with}, it cannot start again with {wanted}"
        )
        return
    _started_with.update(wanted)
    os.environ.pop("HOROVOD_ELASTIC", None)
    os.environ.update(settings)
    os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = controller
    # Both its connections and its collectives give up after 30 s otherwise.
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(int(max(1.0, context.wait_s)))
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(int(max(61.0, context.wait_s)))
    if controller == "mpi":
        _init_library(library, context)
    else:
        with _rendezvous_server(context):
            _init_library(library, context)
            # The server may go only when the last rank has found the others.
            _gather(None, context)


def _init_library(library: Any, context: RankContext) -> None:
    try:
        library.init()
    except ValueError as error:
        raise WorkerError(
            f"rank {context.rank}: {error}", hint="is HOROVOD_GLOO_IFACE an interface of every node? see the log"
        ) from error
    if (library.rank(), library.size()) != (context.rank, context.world_size):
        raise WorkerError(
            f"Horovod numbers this process {library.rank()} of {library.size()}, but it is rank {context.rank} of "
            f"{context.world_size}",
            hint='controller = "mpi" needs a launcher that starts MPI ranks: mpirun, or srun --mpi=pmix',
        )


@contextlib.contextmanager
def _rendezvous_server(context: RankContext) -> Iterator[None]:
    """Run the server on rank 0 through which Horovod's ranks find each other, as long as the context lasts.

    Neither that server nor gloo authenticates: it listens on the interface of the ranks alone, and for
    no longer than it takes them to meet.
    """
    # IPv4 only: Horovod puts the address into a URL as it stands.
    interface, address = _ipv4_interface()
    server = _start_server(address, context.world_size) if context.rank == 0 else None
    try:
        port = server.server_address[1] if server else 0
        entries = _gather((socket.gethostname(), address, port), context)
        plan = assign_slots([host for host, _, _ in entries])
        if server:
            server.init(plan)
        _gather(None, context)
        _, server_address, server_port = entries[0]
        variables = plan[context.rank]._asdict()
        variables |= {"gloo_rendezvous_addr": server_address, "gloo_rendezvous_port": server_port}
        os.environ.update({f"HOROVOD_{name.upper()}": str(value) for name, value in variables.items()})
        if interface:
            os.environ.setdefault("HOROVOD_GLOO_IFACE", interface)
        yield
    finally:
        if server:
            server.shutdown()
            server.server_close()


def _ipv4_interface() -> tuple[str | None, str]:
    """The interface that the ranks of this process's group met on, and this host's address there."""
    name = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    addresses = [address for entry in list_interfaces() if entry.name == name for address in entry.addresses]
    if not addresses:
        interface, address = reachable_address(single_node=False, wanted=None, host_suffix="")
        name, addresses = interface or "", [address]
    usable = [address for address in addresses if ipaddress.ip_address(address.partition("%")[0]).version == 4]
    if not usable:
        message = f"Horovod's ranks meet over IPv4, and {name or socket.gethostname()} has only {', '.join(addresses)}"
        raise unsupported(message, "set `interface` in the cluster's profile to one with an IPv4 address")
    return name or None, usable[0]


def _start_server(address: str, world_size: int) -> Any:
    http_server = importlib.import_module("horovod.runner.http.http_server")
    # RendezvousServer itself would listen on every interface of the host.
    server = http_server.RendezvousHTTPServer((address, 0), http_server.RendezvousHandler, 0)
    server.daemon_threads = True
    server.socket.listen(max(5, world_size))
    threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True).start()
    return server


def _gather(entry: object, context: RankContext) -> list[Any]:
    """Return the entries of all ranks of the group, by rank. All ranks wait for each other."""
    entries = [None] * context.world_size
    dist.all_gather_object(entries, entry, group=context.group)
    return entries


_OPTION_VARIABLES: dict[str, tuple[str, Callable[[Any], float]]] = {
    "fusion_threshold_mb": ("HOROVOD_FUSION_THRESHOLD", lambda value: int(float(value) * 2**20)),
    "cycle_time_ms": ("HOROVOD_CYCLE_TIME", float),
    "hierarchical_allreduce": ("HOROVOD_HIERARCHICAL_ALLREDUCE", int),
}
"""Variable and form in which Horovod reads an option when it starts."""


class HorovodStrategy(DataParallelStrategy):
    """A replica per rank; a background thread fuses gradients that are ready and all-reduces them.

    Buffers (BatchNorm's running statistics) differ between ranks; results use those of rank 0. After a step
    ``gradients`` returns reduced gradients; with Adasum, which combines updates, each rank's local ones.
    """

    @classmethod
    def library_facts(cls, _spec: RunSpec) -> dict[str, Any] | None:
        return horovod_facts(_spec)

    optimizer: Any
    traffic_is_recorded = False
    _hvd: Any = None

    def setup(self, model: nn.Sequential, spec: RunSpec, context: RankContext) -> None:
        options = options_with_defaults(spec)
        self._hvd = load_horovod()
        for name, (variable, _) in _OPTION_VARIABLES.items():
            if variable in spec.env:
                message = f"the run's env sets {variable}, which options.{name} ({options[name]}) decides"
                raise WorkerError(message, hint=f"sweep options.{name} instead")
        _refuse_unsupported(spec, options, self._hvd)
        start_horovod(self._hvd, context, str(options["controller"]), horovod_variables(options))
        super().setup(model, spec, context)
        # Horovod has no booleans; a view as bytes is the same memory.
        state = self.module.state_dict().items()
        numbers = {name: each.view(torch.uint8) if each.dtype == torch.bool else each for name, each in state}
        self._hvd.broadcast_parameters(numbers, root_rank=0)
        # Not broadcast_optimizer_state: there is no state yet, and it would create some by a step with gradients of
        # zero, which decays weights and counts as Adam's first step.
        self.optimizer = self._hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=self.module.named_parameters(),
            compression=getattr(self._hvd.Compression, str(options["compression"])),
            backward_passes_per_step=spec.micro_batches,
            op={"average": self._hvd.Average, "adasum": self._hvd.Adasum}[str(options["op"])],
        )
        # Adasum combines updates that each replica computes from its own mean gradient: the factor is the same.
        self.loss_factor = float(spec.dp_degree)

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> nn.Module:
        refuse_strided_parameters(module, spec, "Horovod reduces contiguous tensors only")
        return module

    def step(self, feed: DataFeed, step: int) -> Tensor:
        if self.options["lr_scaling"]:
            for group in self.optimizer.param_groups:
                group["lr"] = warmup_learning_rate(self.spec, self.options, step)
        return super().step(feed, step)

    def update(self) -> None:
        if self.spec.precision != "fp16":
            super().update()
            return
        # fp16's scaler reads the gradients: they must have arrived.
        self.optimizer.synchronize()
        with self.optimizer.skip_synchronize():
            super().update()

    @staticmethod
    def close() -> None:
        """End the background threads together; otherwise those of other ranks would report a lost connection."""
        load_horovod().shutdown()


def warmup_learning_rate(spec: RunSpec, options: dict[str, Any], step: int) -> float:
    """Return the learning rate of ``step``, counted from 0 over warm-up and timed steps.

    It grows linearly from the run's rate to that times the replicas (Goyal et al. 2017), over ``lr_warmup_epochs``.
    """
    epoch_steps = steps_per_epoch(DATASETS[spec.dataset].samples, spec.global_batch_size, spec.dp_degree)
    warmup_steps = float(options["lr_warmup_epochs"]) * epoch_steps
    progress = 1.0 if step >= warmup_steps else step / warmup_steps
    return spec.learning_rate * (1.0 + (spec.dp_degree - 1) * progress)


def horovod_variables(options: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables that Horovod reads its options from when it starts."""
    return {variable: str(convert(options[name])) for name, (variable, convert) in _OPTION_VARIABLES.items()}


def _refuse_unsupported(spec: RunSpec, options: dict[str, Any], hvd: Any) -> None:
    adasum = options["op"] == "adasum"
    if options["controller"] == "mpi" and not hvd.mpi_built():
        feature, hint = 'controller = "mpi"', "build it again where mpicxx works"
    elif adasum and options["controller"] != "mpi":
        feature, hint = 'op = "adasum"', 'Horovod has Adasum over MPI alone: set options.controller = "mpi", use mpirun'
    elif adasum and spec.dp_degree & (spec.dp_degree - 1):
        feature, hint = f'op = "adasum" on {spec.dp_degree} replicas', "Adasum takes a power of two"
    elif adasum and spec.precision == "fp16":
        feature, hint = 'op = "adasum" with precision fp16', "its optimizer cannot wait for gradients to be unscaled"
    elif options["hierarchical_allreduce"] and not hvd.nccl_built():
        feature, hint = "hierarchical_allreduce", "Horovod has it over NCCL alone: set it to false"
    else:
        return
    raise unsupported(f"this Horovod cannot do {feature}", hint)


TRAININGS = {
    "horovod": HorovodStrategy,
}
"""The training of each strategy."""
