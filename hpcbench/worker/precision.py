"""In which arithmetic a run computes, and what a device cannot do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hpcbench.errors import WorkerError


class Arithmetic:
    """Autocast and loss scaling of one run. fp64 and fp32 need neither; bf16 and fp16 keep fp32 weights.

    Raises ``WorkerError`` (``unsupported``) for tf32 and fp16 on a cpu.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        if precision in ("tf32", "fp16") and device.type != "cuda":
            raise WorkerError(
                f"precision {precision} needs a cuda device; this run's is {device.type}",
                status="unsupported",
                hint="fp64, fp32 and bf16 run on a cpu",
            )
        # cuDNN computes float32 convolutions in tf32 unless told not to: fp32 must mean fp32.
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        self._lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._device = device.type
        self._scaler = torch.amp.GradScaler("cuda") if precision == "fp16" else None

    def autocast(self) -> AbstractContextManager[None]:
        """The context of the forward pass."""
        if self._lower is None:
            return nullcontext()
        context: AbstractContextManager[None] = torch.autocast(self._device, dtype=self._lower)
        return context

    def backward(self, loss: Tensor) -> None:
        """Gradients of ``loss``, scaled for fp16 so that small ones do not vanish."""
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """One optimizer step; fp16 leaves it out where a gradient overflowed."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()
