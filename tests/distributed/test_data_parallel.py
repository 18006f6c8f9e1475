"""A data-parallel run computes what one process computes: losses, weights, running statistics.

Narrow networks, but for two steps of whole ones.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from hpcbench.worker.verification.reference import max_relative_difference
from tests.distributed.cases import (
    BATCH,
    EXACT,
    Case,
    OfRank,
    check,
    check_rounding,
    full_batch,
    make_case,
    run_reference,
)
from tests.distributed.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.strategy("ddp")]

make_narrow = functools.partial(make_case, narrow=True)

PLAIN = {"batch_norm": False}
NORMED: list[tuple[str, str, Any]] = [
    ("resnet18", "digits", None),
    ("resnet18", "mnist", None),
    ("resnet18", "cifar10", None),
    ("vgg11", "digits", None),
    ("vgg11", "cifar10", None),
]
PLAINS: list[tuple[str, str, Any]] = [
    ("vgg11", "digits", PLAIN),
    ("vgg11", "mnist", PLAIN),
    ("vgg11", "cifar10", PLAIN),
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", ["resnet18", "vgg11"])
def test_whole_networks_in_default_buckets_equal_the_reference(pool: Pool, model: str, ranks: int) -> None:
    """DDP makes its buckets anew after the first step."""
    case = make_case(ranks, model, "digits", steps=2, precision="fp64")
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize("model", ["resnet18", "vgg11"])
def test_whole_networks_in_fp32_stay_within_rounding(pool: Pool, model: str) -> None:
    case = make_case(2, model, "digits")
    check_rounding(pool.run, case)


@pytest.mark.parametrize(("model", "dataset", "model_options"), NORMED + PLAINS)
def test_two_ddp_ranks_equal_the_reference(pool: Pool, model: str, dataset: str, model_options: Any) -> None:
    case = make_narrow(2, model, dataset, model_options)
    found = check_rounding(pool.run, case)
    assert [one.counts for one in found] == [[8, 8, 8, 8, 8], [8, 8, 7, 8, 8]], "the third step's shares are uneven"


# Of four gradients the sum depends on the order, and a network with BatchNorm makes 1e-3 of the last bit within five
# steps in fp32: `test_the_order_of_a_sum` below shows it in one process. So five steps are proved in fp64, where the
# same growth ends far below 1e-9, and the fp32 arithmetic itself over the first step and its update.


@pytest.mark.parametrize(
    ("model", "dataset", "model_options"),
    [("resnet18", "digits", None), ("resnet18", "cifar10", None), ("vgg11", "digits", None)],
)
def test_four_ddp_ranks_equal_the_reference_in_fp64(pool: Pool, model: str, dataset: str, model_options: Any) -> None:
    case = make_narrow(4, model, dataset, model_options, precision="fp64", batch_size=4)
    found = pool.run(case)
    assert [one.counts[2] for one in found] == [4, 4, 4, 3]
    check(found, run_reference(case), EXACT)


@pytest.mark.parametrize(("model", "dataset", "model_options"), NORMED)
def test_four_ranks_equal_the_reference_over_one_step(pool: Pool, model: str, dataset: str, model_options: Any) -> None:
    case = make_narrow(4, model, dataset, model_options, steps=1)
    check_rounding(pool.run, case)


@pytest.mark.parametrize(("model", "dataset", "model_options"), NORMED)
def test_four_ddp_ranks_equal_the_reference_over_an_uneven_step(
    pool: Pool, model: str, dataset: str, model_options: Any
) -> None:
    case = make_narrow(4, model, dataset, model_options, steps=1)
    case = dataclasses.replace(case, samples=case.spec.global_batch_size - 1)
    found = check_rounding(pool.run, case)
    assert [one.counts for one in found] == [[8], [8], [8], [7]]


@pytest.mark.parametrize(("model", "dataset", "model_options"), NORMED)
def test_four_ranks_equal_the_reference_where_the_order_of_the_sum_is_the_same(
    pool: Pool, model: str, dataset: str, model_options: Any
) -> None:
    """Five steps in fp32, uneven ones among them: replicas, buckets and updates are right but for that order."""
    case = dataclasses.replace(make_narrow(4, model, dataset, model_options), in_rank_order=True)
    found = check_rounding(pool.run, case)
    assert [one.counts[2] for one in found] == [8, 8, 8, 7]


@pytest.mark.parametrize(("model", "dataset", "model_options"), PLAINS)
def test_four_ranks_without_batch_norm_equal_the_reference(
    pool: Pool, model: str, dataset: str, model_options: Any
) -> None:
    case = make_narrow(4, model, dataset, model_options)
    check_rounding(pool.run, case)


def test_four_ranks_equal_the_reference_in_fp32_where_the_network_does_not_amplify(pool: Pool) -> None:
    case = make_narrow(4, "vgg11", "mnist", batch_size=32)
    check_rounding(pool.run, case)


def test_the_order_of_a_sum() -> None:
    """Why four ranks over five steps in fp32 have no bound of a few roundings: one process exceeds it by itself."""
    case = make_narrow(4, "resnet18", "cifar10")
    forwards, backwards = run_reference(case), run_reference(case, backwards=True)
    worst = max(max_relative_difference(backwards.state[name], forwards.state[name]) for name in forwards.state)
    # Kernels of other processors amplify the last bit less: measured were 73 and more than 1,000 times it.
    assert worst > 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.1}])
def test_options_of_ddp_change_no_number(pool: Pool, options: dict[str, Any]) -> None:
    case = make_narrow(2, "resnet18", "digits", options=options)
    check_rounding(pool.run, case)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_ddp_gradient_accumulation_equals_the_reference(pool: Pool, micro_batches: int) -> None:
    case = make_narrow(2, "resnet18", "digits", micro_batches=micro_batches)
    check_rounding(pool.run, case)


def test_gradient_accumulation_on_four_ddp_ranks_equals_the_reference(pool: Pool) -> None:
    case = make_narrow(4, "resnet18", "mnist", micro_batches=2, precision="fp64", batch_size=4)
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize("dataset", ["digits", "cifar10"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_without_batch_norm_it_also_equals_the_full_batch(pool: Pool, ranks: int, dataset: str) -> None:
    case = make_narrow(ranks, "vgg11", dataset, PLAIN)
    check_rounding(pool.run, case, full_batch)


def test_gradient_accumulation_without_batch_norm_equals_the_full_batch(pool: Pool) -> None:
    case = make_narrow(2, "vgg11", "digits", PLAIN, micro_batches=4)
    check_rounding(pool.run, case, full_batch)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_ddp_with_adam_and_adamw_equals_the_reference(pool: Pool, optimizer: str) -> None:
    case = make_narrow(2, "resnet18", "digits", precision="fp64", optimizer=optimizer, weight_decay=1e-3)
    check(pool.run(case), run_reference(case), EXACT)


def test_a_wrong_divisor_of_the_loss_is_detected(pool: Pool) -> None:
    """The bound is not so wide that dividing an uneven batch by the full batch's size would pass."""

    def run(case: Case) -> list[OfRank]:
        found = pool.run(case)
        found[0].trained.losses[2] *= (2 * BATCH - 1) / (2 * BATCH)
        return found

    with pytest.raises(AssertionError, match="kind='loss', name='step 3'"):
        check_rounding(run, make_narrow(2, "resnet18", "digits"))
