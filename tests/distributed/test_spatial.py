"""Whole models under spatial parallelism and its hybrid compute what one device computes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hpcbench.worker.models.torchvision_models import SMALL_IMAGE_EDGE
from hpcbench.worker.verification.reference import TrainingRecord, lossy_tolerance
from tests.distributed.cases import EXACT, Case, case_id, check, check_rounding, make_case, run_reference
from tests.distributed.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.strategy("spatial")]

BOUND = 1e-10
"""Of the loss and the gradients of the first step in fp64, where nothing but the order of sums differs."""
PLAIN = {"batch_norm": False}


def spatial_case(ranks: int, model: str, dataset: str = "digits", dp: int = 1, **more: Any) -> Case:
    """``ranks`` share each of ``dp`` samples' images; fp64, one step and a narrow network unless said otherwise.

    Networks of large images are torchvision's, which have their width.
    """
    given: dict[str, Any] = {"strategy": "spatial", "dp_degree": dp, "sp_degree": ranks, "batch_size": 4}
    given |= {"precision": "fp64", "steps": 1, "narrow": more.get("input_size", 0) < SMALL_IMAGE_EDGE}
    return make_case(ranks * dp, model, dataset, **{**given, **more})


def grid(text: str, **more: Any) -> dict[str, Any]:
    return {"grid": text, **more}


def gradients_differ(ours: dict[str, Tensor], whole: dict[str, Tensor]) -> float:
    """Relative to each tensor's own size. Of a bias before BatchNorm, whose gradient is 0, there is rounding alone."""
    assert ours.keys() == whole.keys()
    floor = 1e-3 * max(one.abs().max().item() for one in whole.values())
    return max(
        ((ours[name] - one).abs().max() / max(one.abs().max().item(), floor)).item() for name, one in whole.items()
    )


def check_first_step(pool: Pool, case: Case) -> TrainingRecord:
    """Loss and every gradient, and all ranks' weights alike."""
    ranks, expected = pool.run(case), run_reference(case)
    found = ranks[0].trained
    assert abs(found.losses[0] - expected.losses[0]) <= BOUND * abs(expected.losses[0])
    assert gradients_differ(found.first_gradients, expected.first_gradients) <= BOUND
    check(ranks, expected, EXACT)
    return found


SMALL_VOLUME: dict[str, Any] = {"model": "cosmoflow", "dataset": "cosmoflow", "input_size": 10, "batch_size": 2}
STILL_VOLUME: dict[str, Any] = {**SMALL_VOLUME, "model_options": {"dropout": 0.0}}


CASES = [
    spatial_case(2, "resnet50", "imagenet", input_size=48, batch_size=2),
    spatial_case(2, "vgg16", "cifar10", batch_size=2),
    spatial_case(4, "mobilenetv2", "imagenet", input_size=40, batch_size=2, options=grid("1x4"),
                 model_options={"dropout": 0.0}),
    spatial_case(4, **STILL_VOLUME, options=grid("1x2x2")),
    spatial_case(2, "resnet18", dp=2, options=grid("1x2"), micro_batches=2, batch_size=8),
    spatial_case(2, "vgg11", dp=2, options={"bucket_cap_mb": 0.05}),
    spatial_case(2, dp=2, **STILL_VOLUME),
    spatial_case(4, "resnet18", "mnist", batch_size=2, options={"overlap": False, "global_pool": "gather"}),
    spatial_case(4, "resnet18", "mnist", batch_size=2, options={"until": 4, "grid": "1x4", "bucket_cap_mb": 0.05}),
    # Halos are exchanged once more when a block is computed again; running statistics move once.
    spatial_case(2, "resnet18", activation_checkpointing=True, options=grid("1x2")),
    spatial_case(4, "resnet18", options=grid("2x2"), channels_last=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_models_equal_the_single_device(pool: Pool, case: Case) -> None:
    check_first_step(pool, case)


def test_statistics_of_a_part_are_another_function(pool: Pool) -> None:
    case = spatial_case(2, "resnet18", options={"batch_norm": "local"})
    found = check(pool.run(case), run_reference(case), lossy_tolerance(case.spec))
    assert found.worst_rel is not None
    assert found.worst_rel > EXACT, "the same as over the group: was the option heeded?"


@pytest.mark.parametrize(
    "case",
    [
        spatial_case(4, "vgg11", model_options=PLAIN, precision="fp32", steps=5),
        spatial_case(2, dp=2, **STILL_VOLUME, precision="fp32", steps=5),
        spatial_case(2, "resnet18", "mnist", precision="fp32", steps=3),
        # Without BatchNorm, which makes too much of what is rounded: sums of parts are, where the whole is not.
        spatial_case(2, "vgg11", model_options=PLAIN, precision="bf16"),
    ],
    ids=case_id,
)
def test_spatial_training_stays_within_rounding(pool: Pool, case: Case) -> None:
    check_rounding(pool.run, case)


def test_dropout_after_the_gather_point_is_equal_on_all_ranks(pool: Pool) -> None:
    """Replicated weights would drift apart otherwise."""
    case = spatial_case(2, dp=1, **SMALL_VOLUME, steps=3)
    assert all(one.differs_from_rank_0 == 0 for one in pool.run(case))
