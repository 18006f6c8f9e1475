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
        allow_tf32(precision == "tf32")
        self._lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._device = device.type
        self._scaler = torch.amp.GradScaler("cuda") if precision == "fp16" else None
        self._asked = self._made = 0
        self._counted: torch.optim.Optimizer | None = None

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
        """One optimizer step; fp16 leaves it out where a gradient overflowed.

        Afterwards gradients are those that the step used: a scaler divides them in place. It reads from the device
        whether one overflowed, so fp16 waits once a step, within the step's time.
        """
        if self._scaler is None:
            optimizer.step()
            return
        if self._counted is not optimizer:
            self._counted = optimizer
            optimizer.register_step_post_hook(self._count)
        self._asked += 1
        self._scaler.step(optimizer)
        self._scaler.update()

    def notes(self) -> list[str]:
        """Warnings about the updates so far."""
        left_out = self._asked - self._made
        if not left_out:
            return []
        return [
            f"{left_out} of {self._asked} updates (warm-up included) were left out: a gradient overflowed in fp16, "
            "and its scale was lowered"
        ]

    def _count(self, *_step: object) -> None:
        self._made += 1


def allow_tf32(allowed: bool) -> None:
    """Whether float32 products and convolutions may be computed in tf32 on cuda.

    cuDNN's convolutions are unless told not to: fp32 must mean fp32. Set by torch's older switches: what they set is
    read alike through the newer ``fp32_precision``, while the older ones raise on what was set through that.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
