"""Data parallelism with torch's DistributedDataParallel (Li et al. 2020) and its gradient compression hooks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.catalog import get_strategy
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.strategies.base import DataParallelStrategy, chosen_options


class DdpStrategy(DataParallelStrategy):
    """A replica per rank; gradients are all_reduced in buckets while the backward pass still runs.

    Buffers (BatchNorm's running statistics) are rank 0's: DDP broadcasts them before every forward pass.
    """

    runner: DistributedDataParallel

    def wrap(self, module: nn.Module, spec: RunSpec, place: RankContext) -> nn.Module:
        """``module`` in DDP, with the run's options."""
        options = chosen_options(spec)
        self.loss_factor = float(spec.dp_degree)
        # PowerSGD goes on in threads of the process group.
        self.traffic_is_seen = options.get("compression") != "powersgd"
        wrapped = DistributedDataParallel(
            module,
            device_ids=[place.device] if place.device.type == "cuda" else None,
            process_group=place.group,
            bucket_cap_mb=ddp_bucket_cap(float(options["bucket_cap_mb"])),
            gradient_as_bucket_view=options["gradient_as_bucket_view"],
            static_graph=options.get("static_graph", False),
        )
        register_compression_hook(wrapped, options, place)
        return wrapped

    def without_sync(self) -> AbstractContextManager[None]:
        """Gradients stay local until the step's last micro-batch."""
        context: AbstractContextManager[None] = self.runner.no_sync()
        return context


def register_compression_hook(wrapped: DistributedDataParallel, options: dict[str, Any], place: RankContext) -> None:
    """Register the communication hook that ``options`` ask for.

    ``WorkerError`` (``unsupported``) for bf16 without NCCL, which torch's hook needs.
    """
    kind = options.get("compression", "none")
    if kind == "bf16" and place.device.type != "cuda":
        raise WorkerError(
            f"torch's bf16 gradient compression needs NCCL on a cuda device; this run's is {place.device.type}",
            status="unsupported",
            hint='set options.compression to "fp16", "powersgd" or "none"',
        )
    if kind == "powersgd":
        # The first steps go uncompressed, as its authors do it; two are enough for a run that only measures.
        rank = options["powersgd_rank"]
        state = PowerSGDState(place.group, rank, start_powerSGD_iter=2, min_compression_rate=1)
        wrapped.register_comm_hook(
            state, powerSGD_hook if place.device.type == "cuda" else power_sgd_one_bucket_at_a_time
        )
    elif kind != "none":
        hook = default_hooks.fp16_compress_hook if kind == "fp16" else default_hooks.bf16_compress_hook
        wrapped.register_comm_hook(place.group, hook)


def power_sgd_one_bucket_at_a_time(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    """PowerSGD over gloo.

    Its hook starts further collectives when the first of a bucket has ended. gloo's threads do so in an order of their
    own on each rank, so with two buckets under way the ranks would send each other the wrong ones.
    """
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


def ddp_bucket_cap(bucket_cap_mb: float) -> float | None:
    """What DDP is to be told: nothing where the size is its own.

    It then makes the first bucket 1 MiB small, so that communication begins early; a size that it is told, be it the
    same one, counts for the first bucket too.
    """
    return None if bucket_cap_mb == get_strategy("ddp").options["bucket_cap_mb"].default else bucket_cap_mb
