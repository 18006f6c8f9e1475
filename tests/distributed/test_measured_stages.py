"""``balance = "measured"``: all ranks cut where rank 0's measurement says, and the result predicts the step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.results.schema import PipelinePrediction
from hpcbench.strategies.pipeline.stage_balance import BlockProfile, BlockProfileRequest
from hpcbench.strategies.pipeline.stage_partition import BlockTimes
from hpcbench.strategies.pipeline.train.pipeline_strategy import PipelineStrategy
from hpcbench.worker import block_times
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime
from hpcbench.worker.verification.reference import (
    TrainingRecord,
    VerificationCheck,
    compare_training,
)
from hpcbench.worker.verification.reference_pipelines import resolve_reference_trainer
from hpcbench.worker.verification.verify import comparison_spec, train_strategy
from tests.distributed.cases import CPU, EXACT, make_case
from tests.distributed.pool import Pool

pytestmark = pytest.mark.slow

SECONDS = [5.0, 1.0, 1.0, 1.0, 1.0, 1.0]
"""Of the forward passes of vit's six blocks; backward passes take twice as long."""


def planned(spec: RunSpec, device: torch.device, shapes: nn.Sequential) -> BlockProfile:
    assert len(shapes) == len(SECONDS)
    request = BlockProfileRequest(
        model=spec.model, dataset=spec.dataset, micro_batch_size=1, input_size=None, model_options={},
        precision=spec.precision, channels_last=False, device=device.type,
    )  # fmt: skip
    blocks = [BlockTimes(seconds, 2 * seconds) for seconds in SECONDS]
    return BlockProfile(request=request, device_name="d", torch="t", threads=1, blocks=blocks)


def cut_and_train(
    spec: RunSpec, cache: str | None, group: dist.ProcessGroup
) -> tuple[list[int], PipelinePrediction, TrainingRecord, TrainingRecord | None]:
    """First blocks of the stages, the prediction, what was trained in fp64, and on rank 0 the reference.

    Without a ``cache`` rank 0 "measures" what the test says, and any other rank would fail.
    """
    os.environ["XDG_CACHE_HOME"] = cache or "nowhere"
    place = RankContext(dist.get_rank(group), spec.ranks, CPU, group)
    wide = comparison_spec(spec, "fp64")
    name, value = ("_BLOCK_BUDGET_S", 0.0) if cache else ("profile_blocks", planned if place.rank == 0 else None)
    with mock.patch.object(block_times, name, value):
        first = resolve_runtime(spec.strategy)()
        assert isinstance(first, PipelineStrategy)
        first.setup(build_model(spec), spec, place)
    again = resolve_runtime(spec.strategy)()
    assert isinstance(again, PipelineStrategy)
    again.setup(build_model(wide), wide, place)
    assert again.blocks == first.blocks, "verified with other stages than those that were measured"
    trained = train_strategy(again, make_feed(wide, CPU), (0, 1, 2), place)
    assert first.predicted is not None
    reference = None
    if place.rank == 0:
        reference = resolve_reference_trainer(spec.strategy)(build_model(wide), wide, make_feed(wide, CPU), (0, 1, 2))
    return [held.start for held in first.blocks], first.predicted, trained, reference


def measured_spec(strategy: str, batch_size: int) -> RunSpec:
    more: dict[str, Any] = {
        "strategy": strategy,
        "pp_degree": 2,
        "dp_degree": 1,
        "micro_batches": 2,
        "batch_size": batch_size,
    }
    return make_case(2, "vit", "digits", options={"balance": "measured"}, **more).spec


@pytest.mark.parametrize(
    ("strategy", "batch_size", "step_time_s", "bubble"), [("gpipe", 4, 45.0, 1 / 3), ("pipedream", 8, 30.0, 0.0)]
)
def test_all_ranks_cut_where_rank_0_has_measured(
    pool: Pool, strategy: str, batch_size: int, step_time_s: float, bubble: float
) -> None:
    """Two stages of 5 s forward and 10 s backward; gpipe fills and empties, pipedream does not."""
    found = pool.call(2, cut_and_train, measured_spec(strategy, batch_size), None)
    for cuts, predicted, _, _ in found:
        assert cuts == [0, 1]
        assert predicted.step_time_s == pytest.approx(step_time_s)
        assert predicted.bubble_fraction == pytest.approx(bubble)
        assert (predicted.cuts, predicted.stage_times_s) == ([1], [15.0, 15.0])
    _, _, trained, reference = found[0]
    assert reference is not None
    assert compare_training(trained, reference, VerificationCheck("as run", 3, EXACT)).passed


def test_blocks_are_really_measured(pool: Pool, tmp_path: Path) -> None:
    (cuts, predicted, *_), (others, *_) = pool.call(2, cut_and_train, measured_spec("1f1b", 12), str(tmp_path))
    assert cuts == others
    assert len(cuts) == 2
    assert predicted.step_time_s >= max(predicted.stage_times_s) * 2 > 0
    (file,) = (tmp_path / "hpcbench" / "chains").iterdir()
    assert msgspec.json.decode(file.read_bytes(), type=BlockProfile).request.micro_batch_size == 6


def fail(spec: RunSpec, group: dist.ProcessGroup) -> str:
    def cannot(*_: object, **__: object) -> BlockProfile:
        raise WorkerError("no such thing")

    place = RankContext(dist.get_rank(group), spec.ranks, CPU, group)
    with mock.patch.object(block_times, "profile_blocks", cannot), pytest.raises(WorkerError) as raised:
        resolve_runtime(spec.strategy)().setup(build_model(spec), spec, place)
    return raised.value.message


def test_a_failed_measurement_of_rank_0_ends_all_ranks(pool: Pool) -> None:
    assert pool.call(2, fail, measured_spec("gpipe", 16)) == ["balance = measured: no such thing"] * 2
