"""Data parallelism with torch's DistributedDataParallel (DDP), its gradient compression hooks, and sharded optimizers.

Sources: Li et al. 2020 (DDP), Rajbhandari et al. 2020 (ZeRO-1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.parallel.catalog import get_strategy
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.strategies.base import WrapperStrategy, optimizer_class_and_arguments
from hpcbench.worker.strategies.fairscale_library import make_oss_optimizer


class DdpStrategy(WrapperStrategy):
    """A replica per rank; gradients are all-reduced in buckets during the backward pass.

    Buffers (BatchNorm's running statistics) are those of rank 0: DDP broadcasts them before every forward pass.
    """

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> nn.Module:
        # PowerSGD communicates from threads of the process group.
        self.traffic_is_recorded = self.options.get("compression") != "powersgd"
        runner = DistributedDataParallel(
            module,
            device_ids=[context.device] if context.device.type == "cuda" else None,
            process_group=context.group,
            bucket_cap_mb=ddp_bucket_cap(float(self.options["bucket_cap_mb"])),
            gradient_as_bucket_view=self.options["gradient_as_bucket_view"],
            static_graph=self.options.get("static_graph", False),
        )
        register_compression_hook(runner, self.options, context)
        return runner


def register_compression_hook(runner: DistributedDataParallel, options: dict[str, Any], context: RankContext) -> None:
    """Register the communication hook that ``options["compression"]`` names.

    Raises:
        WorkerError: ``unsupported`` for bf16 without NCCL, which torch's hook needs.
    """
    kind = options.get("compression", "none")
    if kind == "bf16" and context.device.type != "cuda":
        raise unsupported(
            f"torch's bf16 gradient compression needs NCCL on a cuda device; this run's is {context.device.type}",
            'set options.compression to "fp16", "powersgd" or "none"',
        )
    if kind == "powersgd":
        # The first steps are uncompressed, as in the paper; two are enough for a run that only measures.
        state = PowerSGDState(context.group, options["powersgd_rank"], start_powerSGD_iter=2, min_compression_rate=1)
        runner.register_comm_hook(
            state, powerSGD_hook if context.device.type == "cuda" else power_sgd_one_bucket_at_a_time
        )
    elif kind != "none":
        hook = default_hooks.fp16_compress_hook if kind == "fp16" else default_hooks.bf16_compress_hook
        runner.register_comm_hook(context.group, hook)


def power_sgd_one_bucket_at_a_time(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    """Run torch's PowerSGD hook over gloo.

    The hook starts further collectives when the first one of a bucket has ended. gloo's threads do so in a different
    order on each rank: with two buckets in flight the ranks would match the wrong collectives.
    """
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


def ddp_bucket_cap(bucket_cap_mb: float) -> float | None:
    """Return the ``bucket_cap_mb`` argument of DDP: ``None`` if the size is DDP's default.

    With its default DDP makes the first bucket only 1 MiB, so that communication begins early; an explicit size, even
    the same one, also applies to the first bucket.
    """
    return None if bucket_cap_mb == get_strategy("ddp").options["bucket_cap_mb"].default else bucket_cap_mb


class Zero1Strategy(DdpStrategy):
    """DDP with a sharded optimizer (ZeRO-1): each rank updates its shard of the parameters and broadcasts it."""

    def make_optimizer(self, spec: RunSpec, context: RankContext) -> torch.optim.Optimizer:
        # torch.distributed.optim takes a second to import, which no other strategy should wait for.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        make: Any = ZeroRedundancyOptimizer
        optimizer_class, arguments = optimizer_class_and_arguments(spec)
        optimizer: torch.optim.Optimizer = make(
            list(self.module.parameters()),
            optimizer_class,
            process_group=context.group,
            parameters_as_bucket_view=self.options["parameters_as_bucket_view"],
            **arguments,
        )
        return optimizer


class FairscaleOssStrategy(DdpStrategy):
    """DDP with fairscale's sharded optimizer (ZeRO-1)."""

    optimizer: Any

    def make_optimizer(self, spec: RunSpec, context: RankContext) -> Any:
        return make_oss_optimizer(self.module, spec, context, broadcast_fp16=self.options["broadcast_fp16"])
