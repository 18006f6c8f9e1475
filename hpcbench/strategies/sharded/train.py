"""torch's fully_shard (FSDP2; ZeRO-3, Rajbhandari et al. 2020; Zhao et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.strategies.data.train import DdpStrategy
from hpcbench.worker import strategy as base
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.strategy import DataParallelStrategy, make_optimizer, untied_blocks

TRAINS_ON_CPUS = hasattr(torch.cpu.Stream, "record_event")
"""Whether fully_shard of this torch does."""


class FsdpStrategy(DataParallelStrategy):
    """Parameters, gradients and optimizer state are sharded; a block's parameters are whole only while it is used.

    With ``shard_degree`` a group of that many neighbouring ranks holds one copy, and the groups are replicas of each
    other (hybrid sharding).
    """

    forward_is_collective = True

    runner: Any

    def move_to_device(self, module: nn.Module, device: torch.device) -> nn.Module:
        return module

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> nn.Module:
        if context.device == torch.device("cpu") and not TRAINS_ON_CPUS:
            raise unsupported(f"fully_shard of torch {torch.__version__} does not train on cpus, that of 2.8 does")
        base.refuse_strided_parameters(module, spec, "fully_shard takes contiguous parameters only")
        # The casts of all blocks together would be a whole model.
        self.arithmetic.keeps_casts = False
        self.loss_factor = float(spec.dp_degree)
        arguments: dict[str, Any] = {
            "mesh": make_shard_mesh(context, int(self.options["shard_degree"])),
            "reshard_after_forward": self.options["reshard_after_forward"],
        }
        if self.options["mixed_precision"]:
            refuse_batch_norm(module)
            arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        elif spec.precision == "bf16_params":
            # The shards are the master weights.
            module.float()
            arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        untied = {id(block) for block in untied_blocks(module)}
        for block in list(module.children()):
            # One after the other: the device holds the shards and one whole block.
            block.to(context.device)
            if id(block) in untied:
                fully_shard(block, **arguments)
        fully_shard(module, **arguments)
        return module

    def make_optimizer(self, spec: RunSpec, context: RankContext) -> torch.optim.Optimizer:
        # torch has no fused SGD of sharded tensors.
        return make_optimizer(spec, self.module, without=("fused",) if spec.optimizer == "sgd" else ())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.runner.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.runner.set_requires_gradient_sync(True)

    def weights(self) -> dict[str, Tensor]:
        whole = super().weights()
        if self.spec.precision == "bf16_params":
            # As the forward pass uses them.
            whole |= {name: whole[name].bfloat16() for name, _ in self.module.named_parameters(remove_duplicate=False)}
        return whole

    def whole_tensor(self, name: str, tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def refuse_batch_norm(module: nn.Module) -> None:
    """Raise ``WorkerError`` (``unsupported``): torch has no BatchNorm with bf16 weights and fp32 running statistics."""
    norms = (name for name, child in module.named_modules() if isinstance(child, nn.modules.batchnorm._BatchNorm))
    if (name := next(norms, None)) is not None:
        raise unsupported(
            f"fsdp with mixed_precision keeps bf16 weights, but BatchNorm ({name}) needs those of its statistics' type",
            'use precision = "bf16", or a model without BatchNorm',
        )


def make_shard_mesh(context: RankContext, shard_degree: int) -> DeviceMesh:
    """Create the mesh of the shards: one axis over all ranks, or (replicas, ``shard_degree``).

    Eight ranks with ``shard_degree`` 4; each row holds one copy of the model, each column is a set of replicas::

        [[0, 1, 2, 3],
         [4, 5, 6, 7]]
    """
    group = context.members()
    # The tensors of a mesh are numbers of ranks, also where a dry run makes all others fake.
    with _disable_current_modes():
        if shard_degree in (0, context.world_size):
            return DeviceMesh.from_group(group, context.device.type)
        ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, shard_degree)
        return DeviceMesh(context.device.type, ranks, mesh_dim_names=("replicate", "shard"))


class Zero1Strategy(DdpStrategy):
    """DDP with a sharded optimizer (ZeRO-1): each rank updates its shard of the parameters and broadcasts it."""

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> nn.Module:
        if self.options["parameters_as_bucket_view"]:
            base.refuse_strided_parameters(module, spec, "parameters_as_bucket_view makes parameters contiguous")
        return super().wrap(module, spec, context)

    def make_optimizer(self, spec: RunSpec, context: RankContext) -> Any:
        # torch.distributed.optim takes a second to import, which no other strategy should wait for.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        make: Any = ZeroRedundancyOptimizer
        optimizer_class, arguments = base.optimizer_class_and_arguments(spec, context.device)
        arguments |= {"parameters_as_bucket_view": self.options["parameters_as_bucket_view"]}
        return make(list(self.module.parameters()), optimizer_class, process_group=context.group, **arguments)


TRAININGS = {
    "zero1": Zero1Strategy,
    "fsdp": FsdpStrategy,
}
"""The training of each strategy."""
