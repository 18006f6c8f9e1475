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

from hpcbench.strategies.catalog import PROBES, STRATEGIES
from hpcbench.worker.verification.reference import TrainingRecord
from hpcbench.worker.verification.rounding import AS_IT_IS, FACTOR, ORDERS, bounds, distances
from tests.conftest import require_horovod
from tests.distributed import cases
from tests.distributed.cases import EXACT, Case, OfRank, check_rounding, make_case, one_device, run_parallel
from tests.distributed.pool import Pool
from tests.distributed.rounding import excesses
from tests.distributed.tensor_cases import small_vocabulary, tensor_case
from tests.distributed.test_channels import split_case
from tests.distributed.test_data_parallel import sharded_case
from tests.distributed.test_horovod import horovod_case
from tests.distributed.test_pipedream import pipedream_case
from tests.distributed.test_pipeline import pipeline_case
from tests.distributed.test_spatial import spatial_case

pytestmark = pytest.mark.slow

NARROW: dict[str, Any] = {"narrow": True, "precision": "fp32", "steps": 3}


@pytest.mark.parametrize("order", [one for one in ORDERS if one != AS_IT_IS])
@pytest.mark.parametrize(
    ("model", "dataset", "more"),
    [
        ("resnet18", "digits", {}),
        ("vit", "digits", {}),
        ("cosmoflow", "cosmoflow", {"input_size": 8, "model_options": {"dropout": 0.0}}),
    ],
)
def test_another_order_of_summation_changes_only_rounding(
    model: str, dataset: str, more: dict[str, Any], order: str
) -> None:
    """The change is tiny in fp64 and small in fp32, and above 0: the order has an effect."""
    given = {"strategy": "single", "batch_size": 3, "narrow": model == "resnet18", **more}
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


def run_enlarged(case: Case, group: dist.ProcessGroup | None) -> OfRank:
    """Rank 1 makes its own gradients 1 % too large, or the second device of a single process."""
    if group is None:
        with enlarged_before_update(last_half=True):
            return run_parallel(case, None)
    enlarged = enlarged_before_update if case.spec.strategy == "zero_bubble" else Enlarged
    with small_vocabulary(), enlarged() if dist.get_rank(group) == 1 else nullcontext():
        return run_parallel(case, group)


def fairscale_pipe_case() -> Case:
    """Two stages of one process, on the cpu twice."""
    return make_case(
        1, "vgg11", "digits", {"batch_norm": False}, steps=3, strategy="fairscale_pipe", pp_degree=2, dp_degree=1,
        devices_per_task=2, micro_batches=4, replicated=False, narrow=True,
    )  # fmt: skip


TOKENS: dict[str, Any] = {"model": "gpt", "dataset": "tokens", "input_size": 8, "model_options": {"context": 8}}
TOKENS |= {"options": {"balance": "blocks"}}

PLANTED: dict[str, Callable[[], Case]] = {
    "ddp": partial(sharded_case, "ddp", 2, "resnet18", steps=3),
    "ddp on four ranks": partial(sharded_case, "ddp", 4, "vgg11", steps=3),
    "zero1": partial(sharded_case, "zero1", 2, "resnet18", steps=3),
    "fairscale_oss": partial(sharded_case, "fairscale_oss", 2, "resnet18", steps=3),
    "fairscale_sddp": partial(sharded_case, "fairscale_sddp", 2, "resnet18", steps=3),
    "fsdp": partial(sharded_case, "fsdp", 2, "resnet18", steps=3),
    "fairscale_fsdp": partial(sharded_case, "fairscale_fsdp", 2, "resnet18", steps=3),
    "horovod": partial(horovod_case, 2, "resnet18", "digits", steps=3),
    "spatial": partial(spatial_case, 2, "resnet18", "mnist", **NARROW),
    "spatial with two replicas": partial(spatial_case, 2, "resnet18", "mnist", dp=2, **NARROW),
    "filter": partial(split_case, "filter", "sharded", 2, **NARROW),
    "filter with two replicas": partial(split_case, "filter", "sharded", 2, dp=2, **NARROW),
    "channel": partial(split_case, "channel", "gathered", 2, **NARROW),
    "tensor": partial(tensor_case, 2),
    "tensor with two replicas": partial(tensor_case, 4, dp_degree=2),
    **{
        key: partial(pipeline_case, key, 2, **TOKENS)
        for key in ("model", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
    },
    "1f1b with two replicas": partial(pipeline_case, "1f1b", 2, replicas=2, **TOKENS),
    "pipedream": partial(pipedream_case, 2, steps=3),
    "fairscale_pipe": fairscale_pipe_case,
}


def test_an_error_is_planted_in_every_strategy() -> None:
    assert {make().spec.strategy for make in PLANTED.values()} == STRATEGIES.keys() - PROBES.keys() - {"single"}


@pytest.fixture(scope="module")
def horovod_pool() -> Iterator[Pool]:
    """Processes of its own: Horovod starts once in a process, for one world."""
    require_horovod()
    ranks = Pool(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("key", PLANTED)
def test_a_gradient_error_of_1_percent_on_one_rank_is_detected(
    request: pytest.FixtureRequest, pool: Pool, key: str
) -> None:
    """In the first step, with every seed; of weights that all ranks hold, by their difference."""
    case = PLANTED[key]()
    ranks = request.getfixturevalue("horovod_pool") if key == "horovod" else pool

    def run(one: Case) -> list[OfRank]:
        return ranks.call(one.spec.ranks, run_enlarged, one) if one.spec.ranks > 1 else [run_enlarged(one, None)]

    with small_vocabulary(), pytest.raises(AssertionError, match="kind='first gradient'|ranks hold different weights"):
        check_rounding(run, case)
