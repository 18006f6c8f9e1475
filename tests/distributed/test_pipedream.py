"""PipeDream on two and four ranks computes what its simulation in one process computes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.catalog import exclusion_reason
from hpcbench.strategies.pipeline.train import TRAININGS
from hpcbench.strategies.pipeline.train.pipedream import PipedreamStrategy
from hpcbench.strategies.pipeline.weight_versions import Staleness
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime
from hpcbench.worker.verification.reference import TrainingRecord, VerificationCheck, compare_training
from hpcbench.worker.verification.reference_pipelines import train_pipedream_reference
from hpcbench.worker.verification.verify import train_strategy
from tests.distributed.cases import (
    CPU,
    EXACT,
    Case,
    OfRank,
    case_id,
    check,
    check_training,
    make_case,
    run_parallel,
    run_reference,
)
from tests.distributed.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.strategy("pipedream")]


STACK_CUTS = {2: "2", 4: "1,2,4"}
"""Of ``small_stack``: every stage has weights and, but for the last of two, BatchNorm."""


def small_stack(spec: RunSpec, _model_folder: str | None = None) -> nn.Sequential:
    """Five blocks with BatchNorm that train in no time; all stages but the first begin with a layer in place."""
    torch.manual_seed(spec.seed)

    def block(inner: int, pool: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(pool)]

    model = nn.Sequential(
        nn.Sequential(*block(1, 1)),
        nn.Sequential(nn.ReLU(inplace=True), *block(4, 2)),
        nn.Sequential(nn.ReLU(inplace=True), *block(4, 1)),
        nn.Flatten(),
        nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(64), nn.Linear(64, 10)),
    )
    return model.to(torch.float64 if spec.precision == "fp64" else torch.float32)


def pipedream_case(stages: int, model: str = "vit", dataset: str = "digits", replicas: int = 1, **more: Any) -> Case:
    """Steps of 8 samples in 2 minibatches; the third step of an epoch has one sample fewer."""
    given = {
        "strategy": "pipedream", "pp_degree": stages, "dp_degree": replicas, "micro_batches": 2, "replicated": False,
        "weight_decay": 0.01,
    }  # fmt: skip
    return make_case(stages * replicas, model, dataset, **{**given, **more})


def stack_case(stages: int, options: dict[str, Any] | None = None, **more: Any) -> Case:
    """Return a case of ``small_stack`` in fp64, with momentum."""
    cuts = {"cuts": STACK_CUTS[stages]}
    return pipedream_case(stages, "vgg11", options={**cuts, **(options or {})}, precision="fp64", **more)


def run_stack(case: Case, group: dist.ProcessGroup) -> OfRank:
    """Run ``run_parallel`` with ``small_stack``."""
    with mock.patch("tests.distributed.cases.build_model", small_stack):
        return run_parallel(case, group)


def check_stack(pool: Pool, case: Case) -> list[OfRank]:
    """The ranks compute what the simulation does."""
    found = pool.call(case.spec.ranks, run_stack, case)
    with mock.patch("tests.distributed.cases.build_model", small_stack):
        check(found, run_reference(case), EXACT)
    return found


VERSIONS: list[dict[str, Any]] = [{}, {"vertical_sync": True}, {"weight_versions": "2bw"}]


STACKS = [
    # Running statistics of BatchNorm too, which have seen the minibatches that a stage was ahead.
    *(stack_case(stages, options) for stages in (2, 4) for options in VERSIONS),
    # Stages are up to three steps ahead if a step is one minibatch.
    *(stack_case(4, options, micro_batches=count) for count in (1, 4) for options in VERSIONS),
    *(stack_case(2, options, replicas=2) for options in (VERSIONS[0], VERSIONS[-1])),
    stack_case(4, {"recompute": "always"}),
    stack_case(4, optimizer="adam"),
]


@pytest.mark.parametrize("case", STACKS, ids=case_id)
def test_stages_equal_the_simulation(pool: Pool, case: Case) -> None:
    check_stack(pool, case)


@pytest.mark.parametrize(
    "case",
    [
        pipedream_case(2, "resnet18", precision="fp64", steps=4),
        pipedream_case(2, activation_checkpointing=True, precision="fp64", steps=3),
        pipedream_case(4, steps=4),
    ],
    ids=case_id,
)
def test_shipped_models_equal_the_simulation(pool: Pool, case: Case) -> None:
    check_training(pool.run, case)


class OtherVersions(PipedreamStrategy):
    """Takes another version than its options say."""

    def setup(self, model: nn.Sequential, spec: RunSpec, place: RankContext) -> None:
        super().setup(model, spec, place)
        self._stash._staleness = Staleness(spec.pp_degree, vertical_sync=True)


def run_other(case: Case, group: dist.ProcessGroup) -> OfRank:
    with mock.patch.dict(TRAININGS, {"pipedream": OtherVersions}):
        return run_stack(case, group)


def test_a_wrong_weight_version_is_detected(pool: Pool) -> None:
    case = stack_case(2)
    found = pool.call(2, run_other, case)
    with mock.patch("tests.distributed.cases.build_model", small_stack):
        expected = run_reference(case)
    with pytest.raises(AssertionError, match="passed=False"):
        check(found, expected, EXACT)


def test_pipedream_steps_need_not_be_consecutive(pool: Pool) -> None:
    """``verify`` takes the partial batch last: forward passes ahead belong to the next real step."""
    case = pipedream_case(4, precision="fp64")
    spec = msgspec.structs.replace(case.spec, micro_batches=1)
    found = pool.call(4, train_steps, spec, (0, 1, 4))
    feed = make_feed(spec, CPU)
    expected = train_pipedream_reference(build_model(spec), spec, feed, (0, 1, 4))
    assert compare_training(found[0], expected, VerificationCheck("as run", 3, EXACT)).passed


def train_steps(spec: RunSpec, steps: tuple[int, ...], group: dist.ProcessGroup) -> TrainingRecord:
    place = RankContext(dist.get_rank(group), spec.ranks, CPU, group)
    strategy = resolve_runtime(spec.strategy)()
    strategy.setup(build_model(spec), spec, place)
    return train_strategy(strategy, make_feed(spec, CPU), steps, place)


def test_unsupported_options_have_a_reason() -> None:
    def reason(**more: Any) -> str | None:
        return exclusion_reason(pipedream_case(2, "gpt", "tokens", **more).spec)

    assert reason() is None
    assert reason(compile=True) is None
    assert "tied weights" in str(reason(model_options={"tied": True}))
    assert "vertical_sync adds nothing" in str(reason(options={"vertical_sync": True, "weight_versions": "2bw"}))
    assert "fp16" in str(reason(precision="fp16"))
