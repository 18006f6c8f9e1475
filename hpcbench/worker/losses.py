"""What is minimised, by what the targets are: the same for every strategy and for the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor


def sample_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the samples' losses, in fp32 at least.

    * classes: outputs [n, classes], targets [n] (int64): cross-entropy;
    * tokens: outputs [n, length, vocabulary], targets [n, length] (int64): mean cross-entropy over the positions;
    * values: outputs and targets [n, values] (floating point): mean squared error over the values.
    """
    wide = outputs if outputs.dtype == torch.float64 else outputs.float()
    if targets.is_floating_point():
        return F.mse_loss(wide, targets.to(wide.dtype), reduction="sum") / targets[0].numel()
    if targets.dim() == 1:
        return F.cross_entropy(wide, targets, reduction="sum")
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum") / targets.shape[1]
