"""The simulation of delayed gradients: against arithmetic by hand, and against the plain training where nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.verification.reference import TrainingRecord, VerificationCheck, compare_training, train_reference
from hpcbench.worker.verification.reference_pipelines import train_delayed
from tests.distributed.cases import short_epoch
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")


class Numbers(DataFeed):
    """Inputs and targets of one number each."""

    def prepare(self, replica: int) -> None:
        pass

    def batch(self, step: int, replica: int) -> tuple[Tensor, Tensor]:
        chosen = self.sample_indices(step, replica).double()[:, None]
        return torch.cos(chosen), torch.sin(3 * chosen)


def numbers_spec(**more: Any) -> RunSpec:
    given = {"strategy": "pipedream", "pp_degree": 3, "tasks_per_node": 3, "precision": "fp64", "batch_size": 4,
             "learning_rate": 0.05, "momentum": 0.8, "weight_decay": 0.1}  # fmt: skip
    return make_spec(**{**given, **more})


def chain_of_products(weights: list[float]) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in weights))
    with torch.no_grad():
        for layer, weight in zip(model, weights, strict=True):
            layer.weight.fill_(weight)  # type: ignore[operator]
    return model


START = [0.7, -1.1, 0.9]


def by_hand(spec: RunSpec, batches: list[tuple[list[float], list[float]]], versions: list[list[int]]) -> list[float]:
    """Three weights after as many updates as ``batches``; ``versions[t][s]`` is the one of weight s in batch t."""
    history = [list(START)]
    speed = [0.0] * 3
    for (inputs, targets), used in zip(batches, versions, strict=True):
        a, b, c = (history[version][stage] for stage, version in enumerate(used))
        errors = [2 * (a * b * c * x - y) * x / len(inputs) for x, y in zip(inputs, targets, strict=True)]
        gradients = [b * c * sum(errors), a * c * sum(errors), a * b * sum(errors)]
        decayed = [g + spec.weight_decay * w for g, w in zip(gradients, history[-1], strict=True)]
        speed = [d if len(history) == 1 else spec.momentum * v + d for v, d in zip(speed, decayed, strict=True)]
        history.append([w - spec.learning_rate * v for w, v in zip(history[-1], speed, strict=True)])
    return history[-1]


@pytest.mark.parametrize(
    ("options", "micro_batches", "versions"),
    [
        ({}, 1, [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]),
        ({}, 2, [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]),
        ({"vertical_sync": True}, 1, [[0] * 3, [0] * 3, [0] * 3, [1] * 3, [2] * 3, [3] * 3]),
        ({"weight_versions": "2bw"}, 4, [[0] * 3, [0] * 3, [1] * 3]),
    ],
)
def test_simulated_weight_versions_are_those_by_hand(
    options: dict[str, Any], micro_batches: int, versions: list[list[int]]
) -> None:
    """Three stages; a step is one minibatch, two minibatches, or (2bw) one batch of four micro-batches."""
    spec = numbers_spec(options=options, micro_batches=micro_batches)
    feed = Numbers(spec, CPU)
    per_step = 2 if micro_batches == 2 else 1
    steps = range(len(versions) // per_step)
    trained = train_delayed(chain_of_products(START), spec, feed, steps, (1, 2))
    batches = []
    for step in steps:
        inputs, targets = feed.batch(step, 0)
        for part in torch.arange(4).chunk(per_step):
            batches.append((inputs[part, 0].tolist(), targets[part, 0].tolist()))
    expected = by_hand(spec, batches, versions)
    assert [trained.state[f"{place}.weight"].item() for place in range(3)] == pytest.approx(expected, abs=1e-13)


def small_network() -> nn.Sequential:
    """Three blocks for digits, BatchNorm in each."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 10)),
    ).double()


def small_spec(**more: Any) -> RunSpec:
    return make_spec(**{"strategy": "pipedream", "precision": "fp64", "weight_decay": 0.01, **more})


def close(ours: TrainingRecord, reference: TrainingRecord, tolerance: float = 1e-12) -> None:
    found = compare_training(ours, reference, VerificationCheck("as run", len(reference.losses), tolerance))
    assert found.passed, found


@pytest.mark.parametrize("replicas", [1, 2])
def test_delayed_training_of_one_stage_equals_plain_training(replicas: int) -> None:
    """Nothing is delayed; momentum, weight decay, and a last batch that is smaller."""
    spec = small_spec(dp_degree=replicas, batch_size=4)
    with short_epoch("digits", 3 * spec.global_batch_size - 1):
        feed = make_feed(spec, CPU)
        plain = train_reference(small_network(), spec, feed, range(5))
        close(train_delayed(small_network(), spec, feed, range(5), ()), plain)
