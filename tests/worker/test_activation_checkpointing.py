"""Activation checkpointing from outside: the same numbers, the same names, less kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hpcbench.errors import WorkerError
from hpcbench.strategies.data.train import SingleStrategy
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_execution import wrap_blocks
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    saved_bytes: int
    """Kept for the backward passes, as far as autograd's hooks see it: not the blocks' inputs."""


def small() -> nn.Sequential:
    """BatchNorm, whose statistics a second pass must not move, and dropout, which must draw the same twice."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Dropout(0.5)),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    )


def train(**values: Any) -> Trained:
    spec = make_spec(batch_size=16, **values)
    strategy, feed = SingleStrategy(), make_feed(spec, CPU)
    strategy.setup(wrap_blocks(small(), spec), spec, RankContext(0, 1, CPU))
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = [strategy.step(feed, step).item() for step in range(3)]
    weights = {name: tensor.clone() for name, tensor in strategy.weights().items()}
    return Trained(losses, weights, strategy.gradients(), saved)


@pytest.mark.parametrize("values", [{}, {"micro_batches": 2}, {"precision": "bf16"}, {"channels_last": True}])
def test_recomputed_blocks_train_to_the_same_bit(values: Any) -> None:
    plain, recomputed = train(**values), train(activation_checkpointing=True, **values)
    assert recomputed.losses == plain.losses
    assert list(recomputed.weights) == list(plain.weights)
    for ours, theirs in ((recomputed.weights, plain.weights), (recomputed.gradients, plain.gradients)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert recomputed.saved_bytes < plain.saved_bytes / 2


def test_checkpointing_refuses_a_model_with_its_own_forward() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in [*self, *self]:
                x = block(x)
            return x

    with pytest.raises(WorkerError, match="Twice has a forward of its own"):
        wrap_blocks(Twice(nn.Linear(2, 2)), make_spec(activation_checkpointing=True))


def test_a_block_that_overwrites_its_input_is_recomputed_correctly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as in torchvision's VGG: the block is recomputed from its input."""

    def overwriting() -> nn.Sequential:
        torch.manual_seed(0)
        behind = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 10))
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Sigmoid(), behind)

    monkeypatch.setattr(f"{__name__}.small", overwriting)
    assert train(activation_checkpointing=True).losses == train().losses
