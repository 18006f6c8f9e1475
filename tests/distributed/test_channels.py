"""Strategies ``filter`` and ``channel`` and their hybrids train what one process trains.

Narrow networks, but where one amplifies rounding or the soak tests train whole ones.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_execution import wrap_blocks
from hpcbench.worker.strategy import resolve_runtime
from hpcbench.worker.training_loop import held_out_accuracy
from tests.distributed import cases
from tests.distributed.cases import (
    CPU,
    EXACT,
    Case,
    OfRank,
    build,
    case_id,
    check,
    check_exactly,
    check_rounding,
    make_case,
    run_parallel,
    run_reference,
)  # fmt: skip
from tests.distributed.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.strategy("filter", "channel")]

WHOLE_MODEL = 1e-10
"""In fp64, of loss, gradients and weights of one step, each tensor by its own size."""

ALL = [(strategy, form) for strategy in ("filter", "channel") for form in ("sharded", "gathered")]
SHARDED = [("filter", "sharded"), ("channel", "sharded")]
PLAIN = {"batch_norm": False}


def split_case(
    strategy: str, form: str, tp: int, model: str = "vgg11", dataset: str = "digits", dp: int = 1, **more: Any
) -> Case:
    """Four samples a replica; the third batch has one less."""
    options = {"form": form, **more.pop("options", {})}
    given = {"strategy": strategy, "dp_degree": dp, "tp_degree": tp, "options": options, "replicated": False}
    return make_case(tp * dp, model, dataset, **{**given, "batch_size": 4, "steps": 3, **more})


def one_step(strategy: str, form: str, tp: int, model: str, dataset: str = "digits", **more: Any) -> Case:
    given = {"precision": "fp64", "steps": 1, "narrow": True}
    return split_case(strategy, form, tp, model, dataset, **{**given, **more})


class Widening(nn.Sequential):
    """A stranger to the shipped models: grouped convolutions, an odd number of channels, mean over pixels."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 7, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(7, 14, 5, padding=2, groups=7),
            nn.BatchNorm2d(14, affine=False),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(14, 10, 3, groups=2, bias=False),
            Residual(10),
            nn.Flatten(),
            nn.ReLU(),
            nn.Linear(40, 9),
            nn.BatchNorm1d(9),
            nn.Linear(9, 10),
        )


class Residual(nn.Module):
    """Half of the input, and what a convolution makes of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x)) + 0.5 * x


def stranger(spec: RunSpec) -> nn.Sequential:
    torch.manual_seed(spec.seed)
    return Widening().to(torch.float64 if spec.precision == "fp64" else torch.float32)


def run_stranger(case: Case, group: dist.ProcessGroup) -> OfRank:
    with mock.patch.object(cases, "build_model", stranger):
        return run_parallel(case, group)


def check_stranger(pool: Pool, case: Case, tolerance: float = EXACT) -> list[OfRank]:
    """The stranger in place of the case's model."""
    with mock.patch.object(cases, "build_model", stranger):
        expected = run_reference(case)
    found = pool.call(case.spec.ranks, run_stranger, case)
    check(found, expected, tolerance)
    return found


@pytest.mark.parametrize(
    "case",
    [
        *(one_step(*form, 3, "mobilenetv2", "cifar10", input_size=16, narrow=False) for form in ALL),
        *(one_step(*form, 4, "cosmoflow", "cosmoflow", input_size=8) for form in ALL),
        *(one_step(*form, 2, "resnet50") for form in SHARDED),
        # Statistics are each replica's own; those of the first one count.
        *(one_step(*form, 2, "resnet18", dp=2) for form in SHARDED),
    ],
    ids=case_id,
)
def test_whole_models_split_by_channels_equal_one_device(pool: Pool, case: Case) -> None:
    check_exactly(pool.run(case), run_reference(case), WHOLE_MODEL)


@pytest.mark.parametrize(
    "case",
    [
        *(split_case(*form, 2, dp=2, model_options=PLAIN, narrow=True) for form in ALL),
        # Without BatchNorm over four samples, which makes much of the roundings of partial sums.
        *(split_case(*form, 2, model_options=PLAIN, precision="bf16", steps=1, narrow=True) for form in ALL),
    ],
    ids=case_id,
)
def test_channel_split_training_stays_within_rounding(pool: Pool, case: Case) -> None:
    check_rounding(pool.run, case)


@pytest.mark.parametrize(("strategy", "form"), ALL)
def test_channel_and_data_hybrids_equal_one_device_per_micro_batch(pool: Pool, strategy: str, form: str) -> None:
    """Each replica's share in two micro-batches, of which the last step's are uneven."""
    case = split_case(strategy, form, 2, dp=2, precision="fp64", micro_batches=2, batch_size=8)
    found = check_stranger(pool, case)
    assert [one.counts for one in found] == [[8, 8, 8], [8, 8, 8], [8, 8, 7], [8, 8, 7]]


@pytest.mark.parametrize(
    "case",
    [
        split_case("filter", "sharded", 3, precision="fp64", activation_checkpointing=True),
        split_case("channel", "gathered", 3, precision="fp64", activation_checkpointing=True),
        split_case("channel", "sharded", 3, precision="fp64", channels_last=True),
        split_case("filter", "gathered", 3, precision="fp64", channels_last=True),
        split_case("channel", "sharded", 3, precision="fp64", optimizer="adam", weight_decay=1e-3),
        *(split_case(*form, 4, precision="fp64", options={"split_last": True}, batch_size=8) for form in ALL),
    ],
    ids=case_id,
)
def test_options_change_no_channel_split_number(pool: Pool, case: Case) -> None:
    check_stranger(pool, case)


def train_and_evaluate(case: Case, group: dist.ProcessGroup) -> tuple[float | None, dict[str, Tensor]]:
    """Return a rank's evaluation after a step, and the weights that it would save."""
    place = RankContext(dist.get_rank(group), case.spec.ranks, CPU, group)
    strategy, feed = resolve_runtime(case.spec.strategy)(), make_feed(case.spec, CPU)
    strategy.setup(wrap_blocks(build(case), case.spec), case.spec, place)
    strategy.step(feed, 0)
    found = held_out_accuracy(strategy.module, feed)
    strategy.step(feed, 1)
    return found, {name: tensor.clone() for name, tensor in strategy.weights().items()}


@pytest.mark.parametrize(("strategy", "form"), ALL)
def test_every_rank_holds_the_same_model(pool: Pool, strategy: str, form: str) -> None:
    """Parts and what is replicated alike, within a replica to the last bit; evaluation sees the whole model."""
    case = split_case(strategy, form, 2, dp=2, narrow=True)
    (accuracy_of_rank_0, weights), *others = pool.call(4, train_and_evaluate, case)
    assert accuracy_of_rank_0 is not None
    assert list(weights) == list(build(case).state_dict())
    for place, (accuracy_of_rank, theirs) in enumerate(others, start=1):
        parameters = {name for name, _ in build(case).named_parameters()}
        for name, tensor in weights.items():
            if place == 1 or name in parameters:
                assert torch.equal(theirs[name], tensor), name
        if place == 1:
            assert accuracy_of_rank == accuracy_of_rank_0
