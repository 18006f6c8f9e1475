"""The recorder of a step on a GPU: places of tensors, waits of the host, and types of products."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hpcbench.worker.dry_run.step_recorder import UNNAMED_FILES, StepRecorder, calling_site, device_of
from hpcbench.worker.measure.layer_trace import COMM_NAMESPACES

UNNAMED_FILES.append(__file__)
_AT = torch.ops.aten
PRODUCTS = frozenset({
    _AT.mm, _AT.addmm, _AT.bmm, _AT.baddbmm, _AT.convolution, _AT.convolution_backward,
    _AT._scaled_dot_product_flash_attention, _AT._scaled_dot_product_efficient_attention,
    _AT._scaled_dot_product_cudnn_attention,
})  # fmt: skip
"""Operators whose type autocast lowers: those that tensor cores compute."""
_MAKES_ON_HOST = frozenset({
    _AT.empty, _AT.zeros, _AT.ones, _AT.full, _AT.arange, _AT.empty_strided, _AT.rand, _AT.randn, _AT.scalar_tensor,
})  # fmt: skip


class GpuRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """Adds to a step's record what only a device of its own type and number shows."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.communication: set[str] = set()
        """Names of the operators by which this rank communicates."""
        self.stray: dict[str, None] = {}
        """``file:line: reason`` where a tensor of another GPU, or of the host with a dimension, was made in a step."""
        self.product_types: set[torch.dtype] = set()
        """Types of the results of matrix products, convolutions and attention."""

    def begin_step(self) -> None:
        super().begin_step()
        self.communication.clear()
        self.stray.clear()
        self.product_types.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COMM_NAMESPACES:
            self.communication.add(func.__name__.partition(".")[0])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "prim" or out is NotImplemented or not self._is_in_step:
            return out
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in results:
            self._check_place(func, tensor)
        if results and func.overloadpacket in PRODUCTS:
            # Further results, such as attention's sums, are of another type.
            self.product_types.add(results[0].dtype)
        return out

    def _read_value(self, tensor: Tensor) -> Any:
        value = super()._read_value(tensor)
        # Of what loss scaling reads 1 would mean an overflow, and the update would be left out.
        is_overflow = device_of(tensor) == self.device and _is_called_by(torch.amp.GradScaler._maybe_opt_step)
        return 0.0 if is_overflow else value

    def _check_place(self, func: Any, tensor: Tensor) -> None:
        device = device_of(tensor)
        if device.type == self.device.type and device != self.device:
            self.stray[f"{calling_site()}: {func} makes a tensor on {device}, not on {self.device}"] = None
        elif device.type == "cpu" and tensor.dim() > 0 and func.overloadpacket in _MAKES_ON_HOST:
            self.stray[f"{calling_site()}: {func} makes a tensor of {tuple(tensor.shape)} on the host"] = None


def _is_called_by(function: Any) -> bool:
    """Return whether ``function`` is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None
