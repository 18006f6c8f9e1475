"""fairscale's FullyShardedDataParallel (ZeRO-3), also on a CPU.

On a CPU its CUDA streams are replaced by streams without effect, for this process alone and only where torch has no
CUDA
device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.strategies.base import DataParallelStrategy, chosen_options, make_optimizer
from hpcbench.worker.strategies.fairscale import import_fairscale, refuse_fp16
from hpcbench.worker.strategies.fsdp import untied_blocks

CUDA_STREAM_NAMES = ("fp32_to_fp16", "all_gather", "post_backward")


class NoOpStream:
    """The only stream of a cpu."""

    def wait_stream(self, _other: Any) -> None:
        """Nothing runs beside this one."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoOpStream)

    def __hash__(self) -> int:
        return 0


def replace_cuda_streams(wrapper: Any) -> None:
    """Let ``wrapper`` (fairscale's class) find streams on a machine without CUDA. Twice is once."""
    assert not torch.cuda.is_available(), "the real streams are there"
    if hasattr(wrapper, "_setup_streams_for_cuda"):
        return
    only = NoOpStream()
    wrapper._setup_streams_for_cuda = wrapper._setup_streams

    def set_up(self: Any) -> None:
        # The children share this very dictionary with their root.
        if not self._streams and self._is_root:
            self._setup_streams_for_cuda()
            self._streams.update(dict.fromkeys(CUDA_STREAM_NAMES, only))

    wrapper._setup_streams = set_up
    torch.cuda.current_stream = lambda *_args, **_kwargs: only  # type: ignore[assignment]
    torch.cuda.stream = lambda *_args, **_kwargs: nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    torch.Tensor.record_stream = lambda *_args, **_kwargs: None  # type: ignore[method-assign]


class FairscaleFsdpStrategy(DataParallelStrategy):
    """Parameters, gradients and optimizer state are sharded; a block's parameters are whole only while it is used."""

    forward_is_collective = True

    def wrap(self, module: nn.Module, spec: RunSpec, place: RankContext) -> nn.Module:
        """``module``, its blocks and then the rest in FullyShardedDataParallel."""
        refuse_fp16(spec)
        self._wrapper = import_fairscale("nn.data_parallel").FullyShardedDataParallel
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
            replace_cuda_streams(self._wrapper)
        assert isinstance(module, nn.Sequential)
        apart = untied_blocks(module)
        for name, block in list(module.named_children()):
            if any(block is one for one in apart):
                module[int(name)] = self._wrapper(block, **arguments)
        # The model alone no longer has its parameters: the wrapper is what can be called.
        self.module = self._wrapper(module, **arguments)
        return self.module

    def make_optimizer(self, spec: RunSpec, place: RankContext) -> torch.optim.Optimizer:
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
