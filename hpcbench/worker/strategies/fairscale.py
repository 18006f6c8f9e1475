"""fairscale's OSS (ZeRO-1) and ShardedDataParallel (ZeRO-2); Rajbhandari et al. 2020.

fairscale 0.4.13 was written for torch 1.x; this module works around its incompatibilities with later versions."""

from __future__ import annotations

import importlib
import warnings
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.failure import install_hint
from hpcbench.worker.strategies.base import (
    DataParallelStrategy,
    chosen_options,
    optimizer_class_and_arguments,
)
from hpcbench.worker.strategies.data import DdpStrategy


def import_fairscale(module: str) -> ModuleType:
    """A module of fairscale; ``WorkerError`` (``unsupported``) with the command that installs it."""
    try:
        with warnings.catch_warnings():
            # Its decorators for autocast have moved since; they still work.
            warnings.simplefilter("ignore", FutureWarning)
            return importlib.import_module(f"fairscale.{module}")
    except Exception as error:
        raise WorkerError(
            f"this strategy needs fairscale: {type(error).__name__}: {error}",
            status="unsupported",
            hint=install_hint("fairscale"),
        ) from error


def make_oss_optimizer(module: nn.Module, spec: RunSpec, place: RankContext, **more: Any) -> Any:
    """fairscale's sharded optimizer over the parameters of ``module``."""
    kind, arguments = optimizer_class_and_arguments(spec)
    return import_fairscale("optim.oss").OSS(
        list(module.parameters()), optim=kind, group=place.group, **arguments, **more
    )


class FairscaleOssStrategy(DdpStrategy):
    """DDP; each rank keeps the optimizer state of its share of the parameters and broadcasts what it has updated."""

    def make_optimizer(self, spec: RunSpec, place: RankContext) -> torch.optim.Optimizer:
        """See ``make_oss_optimizer``."""
        made: torch.optim.Optimizer = make_oss_optimizer(
            self.module, spec, place, broadcast_fp16=chosen_options(spec)["broadcast_fp16"]
        )
        return made


class FairscaleSddpStrategy(DataParallelStrategy):
    """As OSS, and each gradient is reduced to the rank that owns its parameter, and kept there alone.

    With buckets, gradients are views of them for good: an optimizer that sets ``grad`` to ``None`` (torch's default
    since 2.0) cuts them off, and training goes on with wrong gradients. So the wrapper's own ``zero_grad`` is called.
    """

    def wrap(self, module: nn.Module, spec: RunSpec, place: RankContext) -> nn.Module:
        """``module`` in ShardedDataParallel."""
        refuse_fp16(spec)
        options = chosen_options(spec)
        self.loss_factor = float(spec.dp_degree)
        self._place = place
        self._oss = make_oss_optimizer(module, spec, place)
        wrapped: nn.Module = import_fairscale("nn.data_parallel").ShardedDataParallel(
            module,
            self._oss,
            process_group=place.group,
            # Counted in elements there.
            reduce_buffer_size=int(options["reduce_buffer_mb"] * 2**20 / next(module.parameters()).element_size()),
            reduce_fp16=options["reduce_fp16"],
        )
        return wrapped

    def make_optimizer(self, spec: RunSpec, place: RankContext) -> torch.optim.Optimizer:
        """The one that the wrapper was made with."""
        made: torch.optim.Optimizer = self._oss
        return made

    def clear_gradients(self) -> None:
        """Zeros in place, buckets included."""
        wrapped: Any = self.runner
        wrapped.zero_grad(set_to_none=False)

    def without_sync(self) -> AbstractContextManager[None]:
        """Gradients stay local until the step's last micro-batch."""
        wrapped: Any = self.runner
        context: AbstractContextManager[None] = wrapped.no_sync()
        return context

    def gradients(self) -> dict[str, Tensor]:
        """Broadcast by their owners."""
        owners = self._oss._param_to_rank
        group = self._place.members()
        found = {}
        for name, parameter in self.module.named_parameters():
            owner = owners[parameter]
            mine = owner == self._place.rank and parameter.grad is not None
            gradient = (
                parameter.grad.detach().clone() if mine and parameter.grad is not None else torch.zeros_like(parameter)
            )
            dist.broadcast(gradient, dist.get_global_rank(group, owner), group=group)
            found[name] = gradient.detach()
        return found


def refuse_fp16(spec: RunSpec) -> None:
    """Raise ``WorkerError`` (``unsupported``): shards would scale their losses apart."""
    if spec.precision == "fp16":
        raise WorkerError(
            f"{spec.strategy} with fp16 would need a loss scale that all shards agree on",
            status="unsupported",
            hint="use precision bf16",
        )
