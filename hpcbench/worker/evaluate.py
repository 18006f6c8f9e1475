"""How good the trained model is on samples that it has not seen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hpcbench.config.spec import RunSpec
from hpcbench.results.schema import Evaluation
from hpcbench.worker.compiling import uncompiled
from hpcbench.worker.data.feed import Feed
from hpcbench.worker.loop import Evaluate, Progress
from hpcbench.worker.strategies.base import Strategy


def accuracy(module: nn.Module, feed: Feed) -> float | None:
    """Share of held-out targets that ``module`` names right, in eval mode.

    ``None`` for a made-up data set, and where the targets are values, which are never right or wrong.
    """
    batches = feed.held_out()
    if batches is None:
        return None
    was_training = module.training
    module.eval()
    right = total = 0
    # Other batch sizes would be compiled anew, and crowd out training's graphs.
    with torch.no_grad(), uncompiled():
        for inputs, targets in batches:
            if targets.is_floating_point():
                break
            right += int((module(inputs).argmax(dim=-1) == targets).sum().item())
            total += targets.numel()
    module.train(was_training)
    return right / total if total else None


def make_evaluate(
    strategy: Strategy, feed: Feed, spec: RunSpec, progress: Progress, rank: int, any_rank: Callable[[bool], bool]
) -> Evaluate | None:
    """What the loop calls between timed steps; ``None`` where there is nothing to evaluate on.

    Rank 0 evaluates and the others wait for what it says, or compute along where the shards of all are needed.
    """
    if feed.held_out() is None:
        return None

    def evaluate(step: int) -> bool:
        reached = False
        if rank == 0 or strategy.forward_is_collective:
            train_time_s = progress.train_time_s()
            found = accuracy(strategy.module, feed)
            if found is not None and rank == 0:
                progress.evaluations.append(Evaluation(step=step, train_time_s=train_time_s, accuracy=found))
                reached = spec.target_accuracy is not None and found >= spec.target_accuracy
        return any_rank(reached)

    return evaluate
