"""torch's own schedules on the same stages give the same gradients; a pipeline that is stuck says where."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.pipeline.train.pipeline_strategy import PipelineStrategy
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_execution import summed_loss
from hpcbench.worker.models.build import build_model
from tests.distributed.cases import CPU
from tests.distributed.pool import Pool

pytestmark = pytest.mark.slow


def spec_of(strategy: str, stages: int, model: str, dataset: str, **more: Any) -> RunSpec:
    return RunSpec(
        model=model, dataset=dataset, strategy=strategy, pp_degree=stages, tasks_per_node=stages, batch_size=8,
        micro_batches=4, precision="fp64", **more,
    )  # fmt: skip


def set_up(spec: RunSpec, group: dist.ProcessGroup, wait_s: float = 300.0) -> PipelineStrategy:
    strategy = PipelineStrategy()
    strategy.setup(build_model(spec), spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group, wait_s))
    return strategy


def loss_of(count: int, output: Tensor, target: Tensor) -> Tensor:
    return summed_loss(output, target) / count


def differences(spec: RunSpec, group: dist.ProcessGroup) -> dict[str, float]:
    """Return for every gradient of this rank our value minus torch's."""
    ours, theirs = set_up(spec, group), set_up(spec, group)
    feed = make_feed(spec, CPU)
    ours.step(feed, 0)
    inputs, targets = feed.batch(0, 0)
    stages: list[Any] = [
        PipelineStage(theirs.module.chunk(number), number, theirs.layout.chunks, CPU, group=group)
        for number in theirs.layout.chunks_of(theirs.group.place)
    ]
    arguments: dict[str, Any] = {"loss_fn": partial(loss_of, len(inputs)), "scale_grads": False}
    if spec.strategy == "interleaved_1f1b":
        schedule: Any = ScheduleInterleaved1F1B(stages, spec.micro_batches, **arguments)
    else:
        kind: Any = ScheduleGPipe if spec.strategy == "gpipe" else Schedule1F1B
        schedule = kind(stages[0], spec.micro_batches, **arguments)
    is_first, is_last = ours.group.place == 0, ours.group.place == ours.group.size - 1
    schedule.step(*([inputs] if is_first else []), **({"target": targets} if is_last else {}))
    found = zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True)
    gradients = ((name, a.grad, b.grad) for (name, a), b in found)
    return {name: (a - b).abs().max().item() for name, a, b in gradients if a is not None and b is not None}


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("gpipe", 2, "resnet18", "digits"),
        spec_of("1f1b", 4, "mobilenetv2", "digits"),
        spec_of("zero_bubble", 4, "gpt", "tokens", input_size=8, model_options={"context": 8}),
        spec_of("interleaved_1f1b", 2, "gpt", "tokens", input_size=8, model_options={"context": 8}),
    ],
    ids=lambda spec: f"{spec.strategy}-{spec.model}",
)
def test_gradients_equal_those_of_torchs_own_schedules(pool: Pool, spec: RunSpec) -> None:
    found = pool.call(spec.ranks, differences, spec)
    assert sum(len(of_rank) for of_rank in found) == len(list(build_model(spec).parameters()))
    assert max(one for of_rank in found for one in of_rank.values()) <= 1e-12
