"""Training with bf16 parameters and fp32 master weights: ``precision = "bf16_params"``.

Parameters, gradients and activations are bf16; the optimizer updates an fp32 copy of each, since a bf16 number
would lose every update below 1/256 of its size (Micikevicius et al. 2018, section 3.1)::

    bf16 gradient --> fp32 gradient --> update of the fp32 master --> bf16 parameter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcbench.parallel.gradient_buckets import MASTER_UPDATE_CAP_BYTES, fill_buckets

_DTYPES = {"fp64": torch.float64, "bf16_params": torch.bfloat16}


def storage_dtype(precision: str) -> torch.dtype:
    """Return the dtype of parameters and inputs: autocast computes lower precisions from fp32."""
    return _DTYPES.get(precision, torch.float32)


class _Fp32StatisticsMixin(nn.modules.batchnorm._BatchNorm):
    """BatchNorm of bf16 activations with bf16 weights and fp32 running statistics, whose kernel takes fp32 weights."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """Normalise as torch's BatchNorm does, with the weights cast."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        is_counted = self.training and self.track_running_stats
        if is_counted and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum: Any = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked) if is_counted and self.num_batches_tracked else 0.0
        uses_batch = self.training or self.running_mean is None
        kept = (self.running_mean, self.running_var) if is_counted or not uses_batch else (None, None)
        weight, bias = (None if tensor is None else tensor.float() for tensor in (self.weight, self.bias))
        return F.batch_norm(input, *kept, weight, bias, uses_batch, momentum, self.eps)


_BATCH_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"_Fp32Statistics{kind.__name__}", (_Fp32StatisticsMixin, kind), {})
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}


def use_bf16_parameters(model: nn.Module) -> None:
    """Round the fp32 parameters of ``model`` to bf16, in place. Buffers keep their dtype."""
    for module in model.modules():
        module.__class__ = _BATCH_NORMS.get(type(module), type(module))
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)


class MasterWeights(torch.optim.Optimizer):
    """An optimizer of bf16 parameters that updates fp32 copies of them.

    Parameters are updated in parts of ``MASTER_UPDATE_CAP_BYTES``, so that fp32 gradients of one part exist at a time.

    Args:
        parameters: The model's parameters.
        make: Creates the optimizer of a list of fp32 tensors; called once for every part.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], make: Callable[[list[Tensor]], torch.optim.Optimizer]
    ) -> None:
        super().__init__(parameters, {})
        sizes = [parameter.numel() * 4 for parameter in parameters]
        self._parts: list[tuple[list[nn.Parameter], list[Tensor], torch.optim.Optimizer]] = []
        for places in fill_buckets(sizes, MASTER_UPDATE_CAP_BYTES, MASTER_UPDATE_CAP_BYTES):
            part = [parameters[place] for place in places]
            masters = [parameter.detach().to(torch.float32) for parameter in part]
            self._parts.append((part, masters, make(masters)))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the masters by the parameters' gradients, and round them into the parameters."""
        for parameters, masters, optimizer in self._parts:
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
            optimizer.step()
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad = None
                parameter.copy_(master)
