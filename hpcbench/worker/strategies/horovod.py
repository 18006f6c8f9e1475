"""Horovod's DistributedOptimizer (Sergeev and Del Balso 2018)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError, unsupported
from hpcbench.parallel.catalog import options_with_defaults
from hpcbench.parallel.mesh import steps_per_epoch
from hpcbench.parallel.workloads import DATASETS
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.distributed.horovod_init import load_horovod, start_horovod
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.strategies.base import DataParallelStrategy

_OPTION_VARIABLES = {
    "fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
}


class HorovodStrategy(DataParallelStrategy):
    """A replica per rank; a background thread fuses gradients that are ready and all-reduces them.

    Buffers (BatchNorm's running statistics) differ between ranks; results use those of rank 0. After a step
    ``gradients`` returns reduced gradients; with Adasum, which combines updates, each rank's local ones.
    """

    optimizer: Any
    traffic_is_recorded = False
    _hvd: Any = None

    def setup(self, model: nn.Sequential, spec: RunSpec, context: RankContext) -> None:
        options = options_with_defaults(spec)
        self._hvd = load_horovod()
        for name, variable in _OPTION_VARIABLES.items():
            if variable in spec.env:
                raise WorkerError(
                    f"the run's env sets {variable}, which options.{name} ({options[name]}) decides",
                    hint=f"sweep options.{name} instead",
                )
        _refuse_unsupported(spec, options, self._hvd)
        start_horovod(self._hvd, context, options["controller"], horovod_variables(options))
        super().setup(model, spec, context)
        self._hvd.broadcast_parameters(self.module.state_dict(), root_rank=0)
        # Not broadcast_optimizer_state: there is no state yet, and it would create some by a step with gradients of
        # zero, which decays weights and counts as Adam's first step.
        self.optimizer = self._hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=self.module.named_parameters(),
            compression=getattr(self._hvd.Compression, options["compression"]),
            backward_passes_per_step=spec.micro_batches,
            op={"average": self._hvd.Average, "adasum": self._hvd.Adasum}[options["op"]],
        )
        # Adasum combines updates that each replica computes from its own mean gradient: the factor is the same.
        self.loss_factor = float(spec.dp_degree)

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> nn.Module:
        strided = [name for name, parameter in module.named_parameters() if not parameter.is_contiguous()]
        if strided:
            raise unsupported(
                f"Horovod reduces contiguous tensors only, and {strided[0]} is stored otherwise",
                "set channels_last = false",
            )
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
    return {
        "HOROVOD_FUSION_THRESHOLD": str(int(float(options["fusion_threshold_mb"]) * 2**20)),
        "HOROVOD_CYCLE_TIME": str(float(options["cycle_time_ms"])),
        "HOROVOD_HIERARCHICAL_ALLREDUCE": str(int(options["hierarchical_allreduce"])),
    }


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
