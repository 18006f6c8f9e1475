"""torch's fully_shard (FSDP2; ZeRO-3, Rajbhandari et al. 2020; Zhao et al. 2023)."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.strategies.base import DataParallelStrategy, chosen_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class FsdpStrategy(DataParallelStrategy):
    """Parameters, gradients and optimizer state are sharded; a block's parameters are whole only while it is used.

    With ``shard_degree`` the shards are held by groups of that many neighbouring ranks, and the groups are replicas of
    each other (hybrid sharding).
    """

    forward_is_collective = True

    def wrap(self, module: nn.Module, spec: RunSpec, place: RankContext) -> nn.Module:
        """``module``, every block that has parameters of its own sharded, then what is left."""
        if spec.precision == "fp16":
            raise WorkerError(
                "fsdp with fp16 would need a loss scale that all shards agree on",
                status="unsupported",
                hint="use precision bf16",
            )
        options = chosen_options(spec)
        self.loss_factor = float(spec.dp_degree)
        arguments: dict[str, Any] = {
            "mesh": make_shard_mesh(place, options["shard_degree"]),
            "reshard_after_forward": options["reshard_after_forward"],
        }
        if options["mixed_precision"]:
            refuse_batch_norm(module)
            arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in untied_blocks(module):
            fully_shard(block, **arguments)
        fully_shard(module, **arguments)
        return module

    def without_sync(self) -> AbstractContextManager[None]:
        """Gradients stay unreduced until the step's last micro-batch."""
        return _without_gradient_sync(cast("FSDPModule", self.runner))

    def weights(self) -> dict[str, Tensor]:
        """Gathered on every rank, one tensor after another."""
        return {name: full_tensor(tensor) for name, tensor in self.module.state_dict().items()}

    def gradients(self) -> dict[str, Tensor]:
        """Gathered on every rank, one tensor after another."""
        named = self.module.named_parameters()
        return {name: full_tensor(parameter.grad) for name, parameter in named if parameter.grad is not None}


def refuse_batch_norm(module: nn.Module) -> None:
    """Raise ``WorkerError`` (``unsupported``): torch has none with bf16 weights and fp32 running statistics."""
    found = (name for name, one in module.named_modules() if isinstance(one, nn.modules.batchnorm._BatchNorm))
    if (name := next(found, None)) is not None:
        raise WorkerError(
            f"fsdp with mixed_precision keeps bf16 weights, but BatchNorm ({name}) needs those of its statistics' type",
            status="unsupported",
            hint='use precision = "bf16", or a model without BatchNorm',
        )


def make_shard_mesh(place: RankContext, shard_degree: int) -> DeviceMesh:
    """One axis over all ranks, or two: replicas, then ``shard_degree`` ranks that hold one copy together."""
    kind, size = place.device.type, place.world_size
    group = place.members()
    if shard_degree in (0, size):
        return DeviceMesh.from_group(group, kind)
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, shard_degree)
    return DeviceMesh(kind, ranks, mesh_dim_names=("replicate", "shard"))


def untied_blocks(module: nn.Module) -> list[nn.Module]:
    """Blocks whose parameters no other block uses: tied weights must stay together in the root's group."""
    users = Counter(id(parameter) for block in module.children() for parameter in set(block.parameters()))
    return [
        block
        for block in module.children()
        if (own := list(block.parameters())) and all(users[id(parameter)] == 1 for parameter in own)
    ]


def full_tensor(tensor: Tensor) -> Tensor:
    """``tensor`` without shards. A collective where it has some."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


@contextmanager
def _without_gradient_sync(runner: FSDPModule) -> Iterator[None]:
    runner.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        runner.set_requires_gradient_sync(True)
