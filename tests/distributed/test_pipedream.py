"""PipeDream on two and four ranks computes what its simulation in one process computes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
import torch.distributed as dist
from torch import nn

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.bounds import Check
from hpcbench.parallel.catalog import STRATEGIES, excluded_by, resolve_runtime
from hpcbench.parallel.versions import Delay
from hpcbench.worker.compare import Trained, compare
from hpcbench.worker.data.feed import make_feed
from hpcbench.worker.models.build import build_model
from hpcbench.worker.reference_pipedream import train_pipedream_reference
from hpcbench.worker.strategies.base import Place
from hpcbench.worker.strategies.pipedream import Pipedream
from hpcbench.worker.verify import train
from tests.distributed.cases import (
    CPU,
    EXACT,
    TOLERANCE,
    Case,
    OfRank,
    check,
    make_case,
    run_parallel,
    run_reference,
)
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed


def pipedream_case(stages: int, model: str = "vit", dataset: str = "digits", replicas: int = 1, **more: Any) -> Case:
    """Steps of 8 samples in 2 minibatches; the third step of an epoch has one sample fewer."""
    given = {
        "strategy": "pipedream", "pp_degree": stages, "dp_degree": replicas, "micro_batches": 2, "replicated": False,
        "weight_decay": 0.01,
    }  # fmt: skip
    return make_case(stages * replicas, model, dataset, **{**given, **more})


VERSIONS: list[dict[str, Any]] = [{}, {"vertical_sync": True}, {"weight_versions": "2bw"}]


@pytest.mark.parametrize("options", VERSIONS)
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_equal_the_simulation(pool: Pool, stages: int, options: dict[str, Any]) -> None:
    case = pipedream_case(stages, options=options)
    check(pool.run(case), run_reference(case), TOLERANCE)


@pytest.mark.parametrize(
    ("stages", "model", "options"), [(2, "resnet18", {}), (4, "mobilenetv2", {"weight_versions": "2bw"})]
)
def test_batch_norm_in_fp64(pool: Pool, stages: int, model: str, options: dict[str, Any]) -> None:
    """Running statistics too, which have seen the minibatches that a stage was ahead."""
    case = pipedream_case(stages, model, options=options, precision="fp64", steps=3)
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("options", VERSIONS)
def test_any_number_of_minibatches_in_a_step(pool: Pool, micro_batches: int, options: dict[str, Any]) -> None:
    """With one in a step, stages are up to three steps ahead."""
    case = pipedream_case(4, options=options, micro_batches=micro_batches)
    check(pool.run(case), run_reference(case), TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"weight_versions": "2bw"}])
def test_replicas(pool: Pool, options: dict[str, Any]) -> None:
    case = pipedream_case(2, replicas=2, options=options)
    found = pool.run(case)
    assert [one.counts[2] for one in found] == [8, 8, 7, 7]
    check(found, run_reference(case), TOLERANCE)


@pytest.mark.parametrize(
    "more",
    [
        {"options": {"recompute": "always"}},
        {"options": {"cuts": "1,2,5"}},
        {"optimizer": "adam", "precision": "fp64"},
        {"activation_checkpointing": True},
    ],
)
def test_what_else_a_run_may_ask_for(pool: Pool, more: dict[str, Any]) -> None:
    case = pipedream_case(4, **more)
    check(pool.run(case), run_reference(case), TOLERANCE)


class OtherVersions(Pipedream):
    """Takes another version than its options say."""

    def setup(self, model: nn.Sequential, spec: RunSpec, place: Place) -> None:
        super().setup(model, spec, place)
        self._stash._delay = Delay(spec.pp_degree, vertical_sync=True)


def run_other(case: Case, group: dist.ProcessGroup) -> OfRank:
    wrong = STRATEGIES["pipedream"]._replace(runtime=f"{__name__}:OtherVersions")
    with mock.patch.dict(STRATEGIES, {"pipedream": wrong}):
        return run_parallel(case, group)


def test_a_wrong_version_is_seen(pool: Pool) -> None:
    case = pipedream_case(2)
    with pytest.raises(AssertionError, match="passed=False"):
        check(pool.call(2, run_other, case), run_reference(case), TOLERANCE)


def versions_and_losses(case: Case, steps: int, group: dist.ProcessGroup) -> tuple[int, int, list[float]]:
    """The most versions that a stage has held, bytes of all of them now, and its parts of the losses."""
    place = Place(dist.get_rank(group), case.spec.ranks, CPU, group)
    strategy, feed = Pipedream(), make_feed(case.spec, CPU)
    strategy.setup(build_model(case.spec), case.spec, place)
    losses = [strategy.step(feed, step).item() for step in range(steps)]
    held = [one.data_ptr() for versions in strategy._stash._older.values() for one in versions]
    live = [one.data_ptr() for one in strategy.module.parameters()]
    return strategy.peak_versions, len({*held, *live}) // max(1, len(live)), losses


@pytest.mark.parametrize(
    ("options", "peak"), [({}, [4, 3, 2, 1]), ({"vertical_sync": True}, [4] * 4), ({"weight_versions": "2bw"}, [2] * 4)]
)
def test_as_many_versions_as_the_formula_says(pool: Pool, options: dict[str, Any], peak: list[int]) -> None:
    case = pipedream_case(4, options={"cuts": "1,2,3", **options})
    found = pool.call(4, versions_and_losses, case, 5)
    assert [most for most, _, _ in found] == peak
    assert [copies for _, copies, _ in found] == peak
    assert all(losses == [0.0] * 5 for _, _, losses in found[:3]), "only the last stage knows a loss"


def test_steps_that_do_not_follow_one_another(pool: Pool) -> None:
    """As ``verify`` takes the partial batch last: what is forwarded ahead must be of the step that really comes."""
    case = pipedream_case(4)
    spec = msgspec.structs.replace(case.spec, micro_batches=1)
    found = pool.call(4, train_steps, spec, (0, 1, 4))
    feed = make_feed(spec, CPU)
    expected = train_pipedream_reference(build_model(spec), spec, feed, (0, 1, 4))
    assert compare(found[0], expected, Check("as run", 3, TOLERANCE)).passed


def train_steps(spec: RunSpec, steps: tuple[int, ...], group: dist.ProcessGroup) -> Trained:
    place = Place(dist.get_rank(group), spec.ranks, CPU, group)
    strategy = resolve_runtime(spec.strategy)()
    strategy.setup(build_model(spec), spec, place)
    return train(strategy, make_feed(spec, CPU), steps, place)


def test_what_it_cannot_do() -> None:
    def reason(**more: Any) -> str | None:
        return excluded_by(pipedream_case(2, "gpt", "tokens", **more).spec)

    assert reason() is None
    assert "compile = false" in str(reason(compile=True))
    assert "tied weights" in str(reason(model_options={"tied": True}))
    assert "vertical_sync adds nothing" in str(reason(options={"vertical_sync": True, "weight_versions": "2bw"}))
    assert "fp16" in str(reason(precision="fp16"))
