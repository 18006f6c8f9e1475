"""The strategy horovod computes what one process computes, on ranks that Horovod itself connects.

Horovod starts once in a process, for one world and with one set of its variables: hence the pools of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.verification.reference import TrainingRecord, max_relative_difference, train_reference
from tests.conftest import require_horovod
from tests.distributed.cases import (
    BATCH,
    CPU,
    EXACT,
    Case,
    OfRank,
    build,
    case_id,
    check,
    check_training,
    make_case,
    run_reference,
    short_epoch,
)
from tests.distributed.pool import Pool
from tests.distributed.test_data_parallel import PLAIN

pytestmark = [pytest.mark.slow, pytest.mark.strategy("horovod")]

CONVOLUTIONS = ("resnet18", "vgg11")
HALF = 1e-3
"""Gradients that travel as fp16 have 11 bits: 5e-4 of each of them, five times, at a learning rate of 0.01."""


@pytest.fixture(autouse=True, scope="module")
def _horovod() -> None:
    require_horovod()


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    torch.set_num_threads(1)
    found = {ranks: Pool(ranks) for ranks in (2, 4)}
    yield found
    for pool in found.values():
        pool.close()


def run(pools: dict[int, Pool], case: Case) -> list[OfRank]:
    return pools[case.spec.ranks].run(case)


def run_fresh(case: Case) -> list[OfRank]:
    """Run on new processes, in which Horovod reads its variables."""
    pool = Pool(case.spec.ranks)
    try:
        return pool.run(case)
    finally:
        pool.close()


def horovod_case(ranks: int, model: str, dataset: str, model_options: Any = None, steps: int = 5, **more: Any) -> Case:
    """Narrow, where the network has channels, unless ``narrow`` says otherwise."""
    given = {"batch_size": more.get("batch_size", BATCH), "narrow": more.pop("narrow", model in CONVOLUTIONS)}
    case = make_case(ranks, model, dataset, model_options, steps, **given)
    # A longer cycle than the default: ranks that wait for the reference to be computed ask each other less often.
    more["options"] = {"cycle_time_ms": 10.0, **more.get("options", {})}
    return dataclasses.replace(case, spec=msgspec.structs.replace(case.spec, strategy="horovod", **more))


UNEVEN = horovod_case(4, "resnet18", "digits", steps=1, narrow=False)
CASES = [
    horovod_case(2, "resnet18", "digits"),
    # The output layer uses the weights of the embedding: one gradient of two layers.
    horovod_case(2, "gpt", "tokens", steps=2, batch_size=2, input_size=8, model_options={"tied": True, "context": 8}),
    horovod_case(4, "vit", "digits", steps=2, batch_size=4),
    # The order of a sum of four gradients shows in fp32: see decision 7.
    horovod_case(4, "resnet18", "digits", precision="fp64"),
    dataclasses.replace(UNEVEN, samples=UNEVEN.spec.global_batch_size - 1),
    # Four of two samples each: a partial batch is cut into three, fewer than `backward_passes_per_step`.
    horovod_case(2, "vgg11", "digits", PLAIN, micro_batches=4),
    horovod_case(4, "vgg11", "digits", PLAIN, micro_batches=2),
    # A step with gradients of zero, which is how Horovod would make a state to broadcast, counts and decays.
    horovod_case(2, "vgg11", "digits", PLAIN, precision="fp64", optimizer="adamw", weight_decay=1e-3),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_horovod_ranks_train_as_one_device(pools: dict[int, Pool], case: Case) -> None:
    found = check_training(partial(run, pools), case)
    if case.steps == 5:
        assert found[-1].counts[2] == case.spec.batch_size - 1, "the third step's shares are uneven"


def test_fusion_and_cycle_time_change_no_number(pools: dict[int, Pool]) -> None:
    """The sum of two gradients is the same in any order, so not even the last bit may differ."""
    plain = run(pools, horovod_case(2, "resnet18", "digits"))
    options = {"fusion_threshold_mb": 0.25, "cycle_time_ms": 1.0}
    found = run_fresh(horovod_case(2, "resnet18", "digits", options=options))
    assert found[0].trained.losses == plain[0].trained.losses
    for name, tensor in plain[0].trained.state.items():
        assert torch.equal(found[0].trained.state[name], tensor), name


def test_fp16_on_the_way_stays_within_its_bound_and_is_lossy(pools: dict[int, Pool]) -> None:
    case = horovod_case(2, "vgg11", "digits", PLAIN, options={"compression": "fp16"})
    worst = check(run(pools, case), run_reference(case), HALF).worst_rel
    assert worst is not None
    assert worst > 1e-9, "nothing was rounded: was it compressed at all?"


def test_the_learning_rate_grows_with_the_replicas(pools: dict[int, Pool]) -> None:
    """Three steps an epoch: rates of 1, 1 1/3, 1 2/3, 2 and 2 times 0.01 are what the weights must show."""
    options = {"lr_scaling": True, "lr_warmup_epochs": 1.0}
    case = horovod_case(2, "vgg11", "digits", PLAIN, options=options, momentum=0.0, precision="fp64")
    expected, constant = with_rates(case, [0.01, 0.04 / 3, 0.05 / 3, 0.02, 0.02]), run_reference(case)
    check(run(pools, case), expected, EXACT)
    worst = max(max_relative_difference(expected.state[name], constant.state[name]) for name in expected.state)
    assert worst > 1e-4, "the rates make no difference that the comparison would see"


def with_rates(case: Case, rates: list[float]) -> TrainingRecord:
    """The reference, one step after another, each with its own rate. Without momentum no step knows of the last."""
    trained = TrainingRecord()
    with short_epoch(case.spec.dataset, case.samples):
        feed, model = make_feed(case.spec, CPU), build(case)
        for step, rate in enumerate(rates):
            one = train_reference(model, msgspec.structs.replace(case.spec, learning_rate=rate), feed, [step])
            trained.losses += one.losses
            trained.state, trained.gradients = one.state, one.gradients
            trained.first_gradients = trained.first_gradients or one.first_gradients
    return trained


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"op": "adasum"}, "Adasum over MPI alone"),
        ({"hierarchical_allreduce": True}, "over NCCL alone"),
    ],
)
def test_options_that_this_horovod_lacks_are_refused(
    pools: dict[int, Pool], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        pools[2].run(horovod_case(2, "resnet18", "digits", options=options))


def test_a_variable_does_not_overrule_an_option(pools: dict[int, Pool]) -> None:
    with pytest.raises(AssertionError, match=r"sets HOROVOD_CYCLE_TIME, which options.cycle_time_ms"):
        pools[2].run(horovod_case(2, "resnet18", "digits", env={"HOROVOD_CYCLE_TIME": "3"}))
