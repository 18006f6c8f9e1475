"""torch's DistributedDataParallel (Li et al. 2020)."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.catalog import strategy
from hpcbench.worker.strategies.base import DataParallel, Place


class Ddp(DataParallel):
    """A replica per rank; gradients are all_reduced in buckets while the backward pass still runs.

    Buffers (BatchNorm's running statistics) are rank 0's: DDP broadcasts them before every forward pass.
    """

    runner: DistributedDataParallel

    def wrap(self, module: nn.Module, spec: RunSpec, place: Place) -> nn.Module:
        """``module`` in DDP, with the run's options."""
        options = {name: option.default for name, option in strategy("ddp").options.items()} | spec.options
        if options["static_graph"] and spec.micro_batches > 1:
            raise WorkerError(
                f"ddp with static_graph cannot accumulate gradients (micro_batches {spec.micro_batches}): "
                "torch's reducer fails in the first backward pass without synchronisation",
                status="unsupported",
                hint="set options.static_graph = false or micro_batches = 1",
            )
        self.loss_factor = float(spec.dp_degree)
        return DistributedDataParallel(
            module,
            device_ids=[place.device] if place.device.type == "cuda" else None,
            process_group=place.group,
            bucket_cap_mb=bucket_cap(float(options["bucket_cap_mb"])),
            gradient_as_bucket_view=options["gradient_as_bucket_view"],
            static_graph=options["static_graph"],
        )

    def without_sync(self) -> AbstractContextManager[None]:
        """Gradients stay local until the step's last micro-batch."""
        context: AbstractContextManager[None] = self.runner.no_sync()
        return context


def bucket_cap(bucket_cap_mb: float) -> float | None:
    """What DDP is to be told: nothing where the size is its own.

    It then makes the first bucket 1 MiB small, so that communication begins early; a size that it is told, be it the
    same one, counts for the first bucket too.
    """
    return None if bucket_cap_mb == strategy("ddp").options["bucket_cap_mb"].default else bucket_cap_mb
