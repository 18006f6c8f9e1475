"""How good the trained model is on samples that it has not seen."""

from __future__ import annotations

import torch
from torch import nn

from hpcbench.worker.data.feed import Feed


def accuracy(module: nn.Module, feed: Feed) -> float | None:
    """Share of held-out samples that ``module`` names right, in eval mode; ``None`` for a made-up data set."""
    batches = feed.held_out()
    if batches is None:
        return None
    was_training = module.training
    module.eval()
    right = total = 0
    with torch.no_grad():
        for inputs, labels in batches:
            right += int((module(inputs).argmax(dim=1) == labels).sum().item())
            total += len(labels)
    module.train(was_training)
    return right / total
