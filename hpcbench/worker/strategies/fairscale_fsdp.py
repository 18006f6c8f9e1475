"""fairscale's FullyShardedDataParallel (ZeRO-3), the ancestor of torch's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.worker.strategies.base import DataParallel, Place, chosen_options, make_optimizer
from hpcbench.worker.strategies.fairscale import fairscale, refuse_fp16
from hpcbench.worker.strategies.fairscale_cpu import replace_cuda_calls
from hpcbench.worker.strategies.fsdp import separable_blocks


class FairscaleFsdp(DataParallel):
    """Parameters, gradients and optimizer state are sharded; a block's parameters are whole only while it is used."""

    forward_is_collective = True

    def wrap(self, module: nn.Module, spec: RunSpec, place: Place) -> nn.Module:
        """``module``, its blocks and then the rest in FullyShardedDataParallel."""
        refuse_fp16(spec)
        self._wrapper = fairscale("nn.data_parallel").FullyShardedDataParallel
        options = chosen_options(spec)
        self.loss_factor = float(spec.dp_degree)
        self._group = place.members()
        arguments: dict[str, Any] = {
            "process_group": self._group,
            "process_group_reduce_scatter": self._group,
            "reshard_after_forward": options["reshard_after_forward"],
            "flatten_parameters": options["flatten_parameters"],
            "bucket_cap_mb": options["bucket_cap_mb"],
            "compute_device": place.device,
        }
        if place.device.type == "cpu":
            if options["bucket_cap_mb"]:
                raise WorkerError(
                    "fairscale's buckets are filled through a CUDA-only collective; this run's device is cpu",
                    status="unsupported",
                    hint="set options.bucket_cap_mb = 0",
                )
            replace_cuda_calls(self._wrapper)
        assert isinstance(module, nn.Sequential)
        apart = separable_blocks(module)
        for name, block in list(module.named_children()):
            if any(block is one for one in apart):
                module[int(name)] = self._wrapper(block, **arguments)
        # The model alone no longer has its parameters: the wrapper is what can be called.
        self.module = self._wrapper(module, **arguments)
        return self.module

    def make_optimizer(self, spec: RunSpec, place: Place) -> torch.optim.Optimizer:
        """Over this rank's shards."""
        return make_optimizer(spec, self.runner)

    def without_sync(self) -> AbstractContextManager[None]:
        """Gradients stay unreduced until the step's last micro-batch."""
        wrapped: Any = self.runner
        context: AbstractContextManager[None] = wrapped.no_sync()
        return context

    def weights(self) -> dict[str, Tensor]:
        """Gathered on every rank."""
        return {name: tensor.detach() for name, tensor in self.runner.state_dict().items()}

    def gradients(self) -> dict[str, Tensor]:
        """Gathered on every rank, one wrapped module after another."""
        found: dict[str, Tensor] = {}
        for path, wrapped in self.runner.named_modules():
            if isinstance(wrapped, self._wrapper):
                prefix = "".join(f"{part}." for part in path.split(".") if part.isdecimal())
                # A wrapper without parameters of its own still has an (empty) group of names.
                for names, parameter in zip(wrapped._param_name_groups, wrapped.params, strict=False):
                    found |= self._whole(prefix, names, parameter)
        return found

    def _whole(self, prefix: str, names: list[str], parameter: Any) -> dict[str, Tensor]:
        """Shards are equal chunks, the last ones padded; a flat parameter holds several tensors one after another."""
        if parameter.grad is None:
            return {}
        shards = [torch.empty_like(parameter.grad) for _ in range(self._group.size())]
        dist.all_gather(shards, parameter.grad.detach().contiguous(), group=self._group)
        flat = torch.cat([shard.flatten() for shard in shards])[: parameter._orig_size.numel()]
        if not hasattr(parameter, "get_param_views"):
            return {prefix + names[0]: flat.view(parameter._orig_size)}
        parts = torch.split(flat, parameter._param_numels)
        shapes = parameter._param_shapes
        return {prefix + name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
