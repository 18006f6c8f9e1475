"""The bound that one device's own rounding gives: it knows nothing but rounding, and it finds an error of 1 %."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from hpcbench.worker.verification.reference import TrainingRecord
from hpcbench.worker.verification.rounding import AS_IT_IS, FACTOR, ORDERS, bounds, distances
from tests.distributed import cases
from tests.distributed.cases import EXACT, Case, OfRank, check_rounding, make_case, one_device, run_parallel
from tests.distributed.pool import Pool
from tests.distributed.rounding import excesses
from tests.distributed.tensor_cases import small_vocabulary, tensor_case
from tests.distributed.test_channels import split_case
from tests.distributed.test_data_parallel import sharded_case
from tests.distributed.test_pipeline import pipeline_case
from tests.distributed.test_spatial import spatial_case

pytestmark = pytest.mark.slow

NARROW: dict[str, Any] = {"narrow": True, "precision": "fp32", "steps": 3}


@pytest.mark.parametrize("order", [one for one in ORDERS if one != AS_IT_IS])
@pytest.mark.parametrize(
    ("model", "dataset", "more"),
    [
        ("vit", "digits", {}),
        ("cosmoflow", "cosmoflow", {"input_size": 8, "model_options": {"dropout": 0.0}}),
    ],
)
def test_another_order_of_summation_changes_only_rounding(
    model: str, dataset: str, more: dict[str, Any], order: str
) -> None:
    """The change is tiny in fp64 and small in fp32, and above 0: the order has an effect."""
    given = {"strategy": "single", "batch_size": 3, **more}
    case = make_case(1, model, dataset, steps=1, **given)
    assert 0 < apart(case, "fp32", order) < 1e-2
    if order != "other kernels":
        assert 0 < apart(case, "fp64", order) < EXACT


def apart(case: Case, precision: str, order: str) -> float:
    one = one_device(dataclasses.replace(case, spec=msgspec.structs.replace(case.spec, precision=precision)))
    found = distances(cases._train(one, order), cases._train(one))
    return max(value for (kind, _), value in found.items() if kind == "first gradient")


def trained(loss: float, *weights: float) -> TrainingRecord:
    tensors = {f"w{number}": torch.tensor([weight, 1.0]) for number, weight in enumerate(weights)}
    return TrainingRecord([loss], tensors, tensors, tensors)


def test_the_bound_is_the_largest_distance_and_at_least_the_median_of_its_kind() -> None:
    exact, orders = trained(2.0, 0.5, 0.5, 0.5), [trained(2.0, 0.6, 0.5, 0.7), trained(2.0, 0.4, 0.5, 0.5)]
    found = bounds([distances(one, exact) for one in orders], 1e-6)
    assert found["loss", "step 1"] == FACTOR * 1e-6
    for kind in ("first gradient", "last gradient", "weight"):
        of_kind = [found[kind, f"w{number}"] for number in range(3)]
        assert of_kind == pytest.approx([FACTOR * 0.1, FACTOR * 0.1, FACTOR * 0.2], rel=1e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_values_that_are_not_finite_exceed_every_bound(wrong: float) -> None:
    exact = trained(2.0, 0.5)
    allowed = bounds([distances(trained(2.1, 0.6), exact)], 1e-6)
    assert excesses(trained(2.1, 0.6), exact, allowed) == []
    assert [one.kind for one in excesses(trained(2.0, wrong), exact, allowed)] == [
        "first gradient", "last gradient", "weight",
    ]  # fmt: skip
    assert excesses(trained(wrong, 0.5), exact, allowed)[0].name == "step 1"


class Enlarged(TorchFunctionMode):
    """Gradients of the weights of linear layers and convolutions are 1 % too large."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, torch.conv2d, torch.conv3d):
            x, weight, *more = args
            args = (x, weight * 1.01 - weight.detach() * 0.01, *more)
        return func(*args, **(kwargs or {}))


@contextmanager
def enlarged_before_update(last_half: bool = False) -> Iterator[None]:
    """Optimizers find all gradients 1 % too large, also those that a split backward pass computes itself.

    ``last_half``: those of the last half of the parameters, as where one process drives two devices.
    """

    def enlarge(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            parameters = group["params"]
            for parameter in parameters[len(parameters) // 2 if last_half else 0 :]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.01)

    hook = register_optimizer_step_pre_hook(enlarge)
    try:
        yield
    finally:
        hook.remove()


def run_enlarged(case: Case, group: dist.ProcessGroup) -> OfRank:
    """Rank 1 makes its own gradients 1 % too large."""
    enlarged = enlarged_before_update if case.spec.strategy == "zero_bubble" else Enlarged
    with small_vocabulary(), enlarged() if dist.get_rank(group) == 1 else nullcontext():
        return run_parallel(case, group)


TOKENS: dict[str, Any] = {"model": "gpt", "dataset": "tokens", "input_size": 8, "model_options": {"context": 8}}
TOKENS |= {"options": {"balance": "blocks"}}

PLANTED: dict[str, Callable[[], Case]] = {
    "ddp": partial(sharded_case, "ddp", 2, "resnet18", steps=3),
    "fsdp": partial(sharded_case, "fsdp", 2, "resnet18", steps=3),
    "spatial": partial(spatial_case, 2, "resnet18", "mnist", **NARROW),
    "filter": partial(split_case, "filter", "sharded", 2, **NARROW),
    "tensor with two replicas": partial(tensor_case, 4, dp_degree=2),
    "zero_bubble": partial(pipeline_case, "zero_bubble", 2, **TOKENS),
}
"""One of each family; ``test_model_kinds.py`` plants the error in every strategy, for ``verify`` to find."""


@pytest.mark.parametrize("key", PLANTED)
def test_a_gradient_error_of_1_percent_on_one_rank_is_detected(pool: Pool, key: str) -> None:
    """In the first step, with every seed; of weights that all ranks hold, by their difference."""
    case = PLANTED[key]()

    def run(one: Case) -> list[OfRank]:
        return pool.call(one.spec.ranks, run_enlarged, one)

    with small_vocabulary(), pytest.raises(AssertionError, match="kind='first gradient'|ranks hold different weights"):
        check_rounding(run, case)
