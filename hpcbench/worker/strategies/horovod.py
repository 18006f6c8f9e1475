"""Horovod's DistributedOptimizer (Sergeev and Del Balso 2018)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.mesh import steps_per_epoch
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.distributed.horovod_init import load_horovod, start_horovod
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.strategies.base import DataParallelStrategy, chosen_options

_OPTION_VARIABLES = {"fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD", "cycle_time_ms": "HOROVOD_CYCLE_TIME",
              "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE"}  # fmt: skip


class HorovodStrategy(DataParallelStrategy):
    """A replica per rank; a background thread fuses gradients that are ready and all_reduces them.

    Buffers (BatchNorm's running statistics) are a rank's own; what counts is rank 0's. After a step ``gradients`` are
    the reduced ones; with Adasum, which combines updates, each rank's own.
    """

    optimizer: Any
    traffic_is_seen = False
    _hvd: Any = None

    def setup(self, model: nn.Sequential, spec: RunSpec, place: RankContext) -> None:
        """Start Horovod, make every rank's weights rank 0's, wrap the optimizer."""
        options = chosen_options(spec)
        self._hvd = load_horovod()
        _refuse_conflicts(spec, options)
        _refuse_unsupported(spec, options, self._hvd)
        start_horovod(self._hvd, place, options["controller"], horovod_variables(options))
        super().setup(model, spec, place)
        self._hvd.broadcast_parameters(self.module.state_dict(), root_rank=0)
        # Not broadcast_optimizer_state: there is none yet, and it would make some by a step with gradients of zero,
        # which decays weights and counts as Adam's first.
        self.optimizer = self._hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=self.module.named_parameters(),
            compression=getattr(self._hvd.Compression, options["compression"]),
            backward_passes_per_step=spec.micro_batches,
            op={"average": self._hvd.Average, "adasum": self._hvd.Adasum}[options["op"]],
        )
        # Adasum combines updates that each replica makes of its own mean gradient: that is the same factor.
        self.loss_factor = float(spec.dp_degree)
        self._rates = warmup_learning_rate(spec, options) if options["lr_scaling"] else None

    def wrap(self, module: nn.Module, spec: RunSpec, place: RankContext) -> nn.Module:
        """Horovod hooks into the optimizer, the model stays as it is."""
        odd = [name for name, parameter in module.named_parameters() if not parameter.is_contiguous()]
        if odd:
            raise WorkerError(
                f"Horovod reduces contiguous tensors only, and {odd[0]} is stored otherwise",
                status="unsupported",
                hint="set channels_last = false",
            )
        return module

    def step(self, feed: DataFeed, step: int) -> Tensor:
        """See ``Strategy.step``; first the step's learning rate, where it is scaled."""
        if self._rates is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self._rates.at(step)
        return super().step(feed, step)

    def update(self) -> None:
        """As the base does it; before fp16's scaler reads gradients, they must have arrived."""
        if self.spec.precision != "fp16":
            super().update()
            return
        self.optimizer.synchronize()
        with self.optimizer.skip_synchronize():
            super().update()

    @staticmethod
    def close() -> None:
        """Let the background threads end together; the others' would report a lost connection otherwise."""
        load_horovod().shutdown()


class WarmupLearningRate:
    """Learning rates that grow linearly from the run's own to that times the number of replicas (Goyal et al. 2017)."""

    def __init__(self, learning_rate: float, replicas: int, warmup_steps: float) -> None:
        self.learning_rate = learning_rate
        self.replicas = replicas
        self.warmup_steps = warmup_steps

    def at(self, step: int) -> float:
        """The rate of ``step``, counted from 0 and over warm-up and timed steps alike."""
        done = 1.0 if step >= self.warmup_steps else step / self.warmup_steps
        return self.learning_rate * (1.0 + (self.replicas - 1) * done)


def warmup_learning_rate(spec: RunSpec, options: dict[str, Any]) -> WarmupLearningRate:
    """The run's rates: the warm-up lasts ``lr_warmup_epochs`` of its data set."""
    from hpcbench.parallel.workloads import DATASETS

    steps = steps_per_epoch(DATASETS[spec.dataset].samples, spec.global_batch_size, spec.dp_degree)
    return WarmupLearningRate(spec.learning_rate, spec.dp_degree, float(options["lr_warmup_epochs"]) * steps)


def horovod_variables(options: dict[str, Any]) -> dict[str, str]:
    """Options that Horovod reads from the environment when it starts."""
    return {
        "HOROVOD_FUSION_THRESHOLD": str(int(float(options["fusion_threshold_mb"]) * 2**20)),
        "HOROVOD_CYCLE_TIME": str(float(options["cycle_time_ms"])),
        "HOROVOD_HIERARCHICAL_ALLREDUCE": str(int(options["hierarchical_allreduce"])),
    }


def _refuse_conflicts(spec: RunSpec, options: dict[str, Any]) -> None:
    for name, variable in _OPTION_VARIABLES.items():
        if variable in spec.env:
            raise WorkerError(
                f"the run's env sets {variable}, which options.{name} ({options[name]}) decides",
                hint=f"sweep options.{name} instead",
            )


def _refuse_unsupported(spec: RunSpec, options: dict[str, Any], hvd: Any) -> None:
    adasum = options["op"] == "adasum"
    if options["controller"] == "mpi" and not hvd.mpi_built():
        why, hint = 'controller = "mpi"', "build it again where mpicxx works"
    elif adasum and options["controller"] != "mpi":
        why, hint = 'op = "adasum"', 'Horovod has Adasum over MPI alone: set options.controller = "mpi", use mpirun'
    elif adasum and spec.dp_degree & (spec.dp_degree - 1):
        why, hint = f'op = "adasum" on {spec.dp_degree} replicas', "Adasum takes a power of two"
    elif adasum and spec.precision == "fp16":
        why, hint = 'op = "adasum" with precision fp16', "its optimizer cannot wait for gradients to be unscaled"
    elif options["hierarchical_allreduce"] and not hvd.nccl_built():
        why, hint = "hierarchical_allreduce", "Horovod has it over NCCL alone: set it to false"
    else:
        return
    raise WorkerError(f"this Horovod cannot do {why}", status="unsupported", hint=hint)
