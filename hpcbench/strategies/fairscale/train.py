"""fairscale's OSS, ShardedDataParallel and FullyShardedDataParallel.

FullyShardedDataParallel uses CUDA streams. On a CPU they are replaced by streams without effect, in this process only
and only where torch has no CUDA device.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.strategies.data.train import DdpStrategy
from hpcbench.worker import strategy as base
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_parallel_layers import all_gather_single
from hpcbench.worker.strategy import import_fairscale


def make_oss_optimizer(module: nn.Module, spec: RunSpec, context: RankContext, **options: Any) -> Any:
    """Create fairscale's sharded optimizer (OSS) over the parameters of ``module``."""
    optimizer_class, arguments = base.optimizer_class_and_arguments(spec, context.device)
    return import_fairscale("optim.oss").OSS(
        list(module.parameters()), optim=optimizer_class, group=context.group, **arguments, **options
    )


class FairscaleOssStrategy(DdpStrategy):
    """DDP with fairscale's sharded optimizer (ZeRO-1)."""

    optimizer: Any

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> nn.Module:
        base.refuse_strided_parameters(module, spec, "fairscale's OSS moves parameters into flat buffers")
        return super().wrap(module, spec, context)

    def make_optimizer(self, spec: RunSpec, context: RankContext) -> Any:
        return make_oss_optimizer(self.module, spec, context, broadcast_fp16=self.options["broadcast_fp16"])


class FairscaleSddpStrategy(base.WrapperStrategy):
    """Each rank owns a part of the optimizer state; each gradient is reduced to the rank that owns its parameter.

    With buckets, gradients are permanent views of them: an optimizer that sets ``grad`` to ``None`` (torch's default
    since 2.0) detaches them, and training continues with wrong gradients. So the wrapper's own ``zero_grad`` is called.
    """

    optimizer: Any

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> Any:
        self._oss = make_oss_optimizer(module, spec, context)
        buffer_bytes = float(self.options["reduce_buffer_mb"]) * 2**20
        return import_fairscale("nn.data_parallel").ShardedDataParallel(
            module,
            self._oss,
            process_group=context.group,
            # In elements.
            reduce_buffer_size=int(buffer_bytes / next(module.parameters()).element_size()),
            reduce_fp16=self.options["reduce_fp16"],
        )

    def make_optimizer(self, spec: RunSpec, context: RankContext) -> Any:
        return self._oss

    def clear_gradients(self) -> None:
        self.runner.zero_grad(set_to_none=False)

    def gradients(self) -> dict[str, Tensor]:
        owners, group = self._oss._param_to_rank, self.context.members()
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            gradient = torch.zeros_like(parameter)
            if owners[parameter] == self.context.rank and parameter.grad is not None:
                gradient = parameter.grad.clone()
            dist.broadcast(gradient, dist.get_global_rank(group, owners[parameter]), group=group)
            gradients[name] = gradient.detach()
        return gradients


CUDA_STREAM_NAMES = ("fp32_to_fp16", "all_gather", "post_backward")


class NoOpStream:
    """Stands in for a CUDA stream on a CPU, where operations run in program order."""

    def wait_stream(self, _other: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoOpStream)

    def __hash__(self) -> int:
        return 0


def replace_cuda_streams(wrapper: Any) -> None:
    """Let ``wrapper`` (fairscale's class) work on a machine without CUDA. A second call has no effect."""
    assert not torch.cuda.is_available(), "this machine has real streams"
    if hasattr(wrapper, "_setup_streams_for_cuda"):
        return
    stream = NoOpStream()
    wrapper._setup_streams_for_cuda = wrapper._setup_streams

    def setup_streams(self: Any) -> None:
        # The children share this very dictionary with their root.
        if not self._streams and self._is_root:
            self._setup_streams_for_cuda()
            self._streams.update(dict.fromkeys(CUDA_STREAM_NAMES, stream))

    wrapper._setup_streams = setup_streams
    torch.cuda.current_stream = lambda *_args, **_kwargs: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda *_args, **_kwargs: nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    torch.Tensor.record_stream = lambda *_args, **_kwargs: None  # type: ignore[method-assign]


def refuse_partly_frozen_blocks(model: nn.Module, untied: set[int]) -> None:
    """Raise ``WorkerError`` (``unsupported``) if parameters that are flattened into one are frozen in part.

    Each block of ``untied``, by its id, is flattened by itself, the others together.
    """
    named: dict[tuple[int, bool], str] = {}
    for block_name, block in model.named_children():
        unit = id(block) if id(block) in untied else 0
        for name, parameter in block.named_parameters(block_name):
            named[unit, parameter.requires_grad] = name
            if other := named.get((unit, not parameter.requires_grad)):
                message = f"fairscale_fsdp flattens {other} and {name} into one parameter, but one of them is frozen"
                raise unsupported(message, "set options.flatten_parameters = false, or freeze whole blocks")


class FairscaleFsdpStrategy(base.WrapperStrategy):
    """Parameters, gradients and optimizer state are sharded; a block's parameters are whole only while it is used."""

    widest = "fp32"

    forward_is_collective = True

    def move_to_device(self, module: nn.Module, device: torch.device) -> nn.Module:
        return module

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> Any:
        # The casts of all blocks together would be a whole model.
        self.arithmetic.keeps_casts = False
        self._wrapper = import_fairscale("nn.data_parallel").FullyShardedDataParallel
        self._group = context.members()
        arguments: dict[str, Any] = {
            "process_group": self._group,
            "process_group_reduce_scatter": self._group,
            "reshard_after_forward": self.options["reshard_after_forward"],
            "flatten_parameters": self.options["flatten_parameters"],
            "bucket_cap_mb": self.options["bucket_cap_mb"],
            "compute_device": context.device,
        }
        if context.device.type == "cpu":
            if self.options["bucket_cap_mb"]:
                message = "fairscale's buckets are filled through a CUDA-only collective; this run's device is cpu"
                raise unsupported(message, "set options.bucket_cap_mb = 0")
            replace_cuda_streams(self._wrapper)
        assert isinstance(module, nn.Sequential)
        untied = {id(block) for block in base.untied_blocks(module)}
        if self.options["flatten_parameters"]:
            refuse_partly_frozen_blocks(module, untied)
        for name, block in list(module.named_children()):
            # One after the other: the device holds the shards and one whole block.
            block.to(context.device)
            if id(block) in untied:
                module[int(name)] = self._wrapper(block, **arguments)
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(context.device)
        # The wrapper takes the parameters out of ``module``, which can no longer be called itself.
        self.module = self._wrapper(module, **arguments)
        return self.module

    def make_optimizer(self, spec: RunSpec, context: RankContext) -> torch.optim.Optimizer:
        return base.make_optimizer(spec, self.runner)

    def gradients(self) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for path, wrapped in self.runner.named_modules():
            if isinstance(wrapped, self._wrapper):
                prefix = "".join(f"{part}." for part in path.split(".") if part.isdecimal())
                # A wrapper without parameters of its own still has an (empty) group of names.
                for names, parameter in zip(wrapped._param_name_groups, wrapped.params, strict=False):
                    gradients |= self._gather_gradients(prefix, names, parameter)
        return gradients

    def _gather_gradients(self, prefix: str, names: list[str], parameter: Any) -> dict[str, Tensor]:
        """Gather the gradients of a sharded parameter.

        Shards are equal chunks, the last ones padded; a flat parameter holds several tensors one after another.
        """
        if parameter.grad is None:
            return {}
        shards = parameter.grad.new_empty(self._group.size() * parameter.grad.numel())
        all_gather_single(shards, parameter.grad.detach().flatten(), group=self._group)
        flat = shards[: parameter._orig_size.numel()]
        if not hasattr(parameter, "get_param_views"):
            return {prefix + names[0]: flat.view(parameter._orig_size)}
        parts = torch.split(flat, parameter._param_numels)
        shapes = parameter._param_shapes
        return {prefix + name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}


TRAININGS = {
    "fairscale_oss": FairscaleOssStrategy,
    "fairscale_sddp": FairscaleSddpStrategy,
    "fairscale_fsdp": FairscaleFsdpStrategy,
}
"""The training of each strategy."""
