"""Models and data sets: one set for each model is trained as the worker trains it; a pair that does not fit has a reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime
from hpcbench.worker.verification.reference import train_reference
from hpcbench.workloads.models import MODELS
from tests.worker.helpers import DECODERS, make_spec

CPU = torch.device("cpu")
COUNTED_ONLY = {
    "gpt_350m", "gpt_760m", "gpt_1_3b", "gpt_2_7b", "gpt_6_7b", "gpt_13b", "gpt_17b", *DECODERS[1:],
}  # fmt: skip
"""Too large to be trained in a test: planned and counted."""
TRAINED = [
    ("cosmoflow", "cosmoflow", 16), ("cosmoflow", "cosmoflow_256", 16), ("cosmoflow", "cosmoflow_512", 16),
    ("llama", "tokens", 16), ("gpt", "tokens", 16), ("gpt_125m", "tokens", 16),
    ("mobilenetv2", "digits", None), ("mobilenetv2", "imagenet", 64), ("resnet18", "mnist", None),
    ("resnet18", "highres", 96), ("resnet50", "cifar10", None), ("resnet152", "imagenet", 64), ("vgg11", "digits", None),
    ("vgg11", "highres", 96), ("vgg16", "cifar10", None), ("vit", "mnist", None), ("vit_b16", "imagenet", 64),
    ("vit_l16", "imagenet", 32),
]  # fmt: skip
"""Model, data set and input size (None: the data set's own): every model, every data set, small and large forms."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread, as a rank of a test does: more are slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_model_that_a_test_can_hold_is_trained() -> None:
    assert {model for model, *_ in TRAINED} == MODELS.keys() - COUNTED_ONLY


@pytest.mark.parametrize(
    ("model", "dataset", "reason"),
    [
        ("cosmoflow", "digits", "cosmoflow takes volumes; digits holds images"),
        ("cosmoflow", "tokens", "cosmoflow takes volumes; tokens holds tokens"),
        ("gpt_17b", "imagenet", "gpt_17b takes tokens; imagenet holds images"),
        ("llama_8b", "cosmoflow_512", "llama_8b takes tokens; cosmoflow_512 holds volumes"),
        ("vgg16", "cosmoflow_256", "vgg16 takes images; cosmoflow_256 holds volumes"),
        ("vit", "tokens", "vit takes images; tokens holds tokens"),
        ("vit_b16", "digits", "vit_b16 needs an input of 16 or more; digits has 8"),
        ("vit_b16", "mnist", None),
    ],
)
def test_infeasible_pairs_have_a_reason(model: str, dataset: str, reason: str | None) -> None:
    point = {"model": model, "dataset": dataset, "strategy": "single", "batch_size": 2}
    resolved = resolve_point(point, PartitionLimits("here"))
    assert (resolved.reason if isinstance(resolved, InfeasiblePoint) else None) == reason


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dataset", "input_size"), TRAINED)
def test_a_model_trains_all_of_its_parameters(model: str, dataset: str, input_size: int | None) -> None:
    spec = make_spec(model=model, dataset=dataset, input_size=input_size, batch_size=2)
    strategy = resolve_runtime(spec.strategy)()
    feed = make_feed(spec, CPU)
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    named = dict(strategy.module.named_parameters())
    ends = {name: named[name].detach().clone() for name in (next(iter(named)), next(reversed(named)))}
    losses = [strategy.step(feed, step).item() for step in range(2)]
    assert all(math.isfinite(loss) for loss in losses)
    assert set(strategy.gradients()) == set(named), "every parameter takes part"
    for name, before in ends.items():
        assert not torch.equal(before, named[name]), name


# One model of each family: data, options, optimizer, learning rate, steps, and what is left of the loss.
FAMILIES = [
    ("resnet18", "digits", {}, "sgd", 0.01, 20, 0.5),
    ("vgg11", "digits", {}, "sgd", 0.01, 20, 0.5),
    ("mobilenetv2", "digits", {}, "sgd", 0.05, 30, 0.7),
    ("vit", "digits", {}, "adam", 0.001, 30, 0.5),
    ("cosmoflow", "cosmoflow", {"dropout": 0.0}, "adam", 0.0003, 40, 0.5),
    ("gpt", "tokens", {}, "adam", 0.003, 15, 0.7),
    ("llama", "tokens", {}, "adam", 0.003, 15, 0.7),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dataset", "options", "optimizer", "rate", "steps", "left"), FAMILIES)
def test_the_loss_falls_for_every_model_family(
    model: str, dataset: str, options: dict[str, float], optimizer: Any, rate: float, steps: int, left: float
) -> None:
    size = None if dataset == "digits" else 16
    spec = make_spec(
        model=model, dataset=dataset, input_size=size, model_options=options, batch_size=32 if size is None else 8,
        optimizer=optimizer, learning_rate=rate,
    )  # fmt: skip
    feed = make_feed(spec, CPU)
    losses = train_reference(build_model(spec), spec, feed, range(steps)).losses
    assert sum(losses[-4:]) / 4 < left * losses[0], losses
