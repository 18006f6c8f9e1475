"""Messages of a stage equal the oracle's, call by call; kept activations equal the schedule's."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.layer_table import LayerTable, LayerTableRequest
from hpcbench.strategies.pipeline.cost import PipelineCost
from hpcbench.strategies.pipeline.rank_cost import PipelineRank
from hpcbench.strategies.pipeline.train.pipeline_strategy import PipelineStrategy
from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.layers import make_layer_table
from hpcbench.worker.models.build import build_model
from tests.distributed.cases import CPU
from tests.distributed.fake import fake_traffic
from tests.distributed.pool import Pool
from tests.distributed.recording import record_traffic
from tests.distributed.tensor_cases import small_vocabulary

pytestmark = pytest.mark.slow


def spec_of(strategy: str, stages: int, model: str = "vgg11", dataset: str = "digits", **more: Any) -> RunSpec:
    given: dict[str, Any] = {"batch_size": 8, "micro_batches": 3, "tasks_per_node": stages * more.get("dp_degree", 1)}
    return RunSpec(model=model, dataset=dataset, strategy=strategy, pp_degree=stages, **{**given, **more})


def table_of(spec: RunSpec) -> LayerTable:
    request = LayerTableRequest(
        model=spec.model, dataset=spec.dataset, input_size=spec.input_size, model_options=spec.model_options
    )
    return make_layer_table(request)


@small_vocabulary()
def measured(spec: RunSpec, group: dist.ProcessGroup) -> list[Traffic]:
    strategy, feed = PipelineStrategy(), make_feed(spec, CPU)
    strategy.setup(build_model(spec), spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group))
    strategy.step(feed, 0)
    return record_traffic(lambda: strategy.step(feed, 1))


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("gpipe", 2),
        spec_of("1f1b", 4),
        spec_of("interleaved_1f1b", 2, precision="fp64"),
        spec_of("zero_bubble", 2, dp_degree=2),
        spec_of("model", 2, "resnet18", options={"cuts": "4"}),
        spec_of(
            "1f1b", 2, "gpt", "tokens", dp_degree=2, input_size=4, batch_size=2, micro_batches=2,
            model_options={"tied": True, "context": 4},
        ),
        spec_of("gpipe", 3, options={"stage_replicas": "2-1"}),
        spec_of(
            "zero_bubble", 2, "gpt", "tokens", tp_degree=2, tasks_per_node=4, input_size=4, batch_size=3,
            micro_batches=2, model_options={"context": 4},
        ),
        spec_of(
            "1f1b", 2, "gpt", "tokens", tp_degree=2, tasks_per_node=4, input_size=4, batch_size=4, micro_batches=2,
            model_options={"context": 4, "dropout": 0.1}, options={"recompute": "always", "cuts": "3"},
        ),
        spec_of(
            "zero_bubble", 2, "gpt", "tokens", tp_degree=2, tasks_per_node=4, input_size=4, batch_size=4,
            micro_batches=2, model_options={"context": 4}, options={"recompute": "except_last", "cuts": "3"},
        ),
    ],
    ids=lambda spec: f"{spec.strategy}-{spec.model}-{spec.ranks}-{spec.options.get('recompute', '')}",
)  # fmt: skip
@small_vocabulary()
def test_pipeline_ranks_pass_the_predicted_traffic(pool: Pool, spec: RunSpec) -> None:
    """Micro-batches of 8 samples are 3, 3 and 2; the sends differ accordingly."""
    table = table_of(spec)
    found = pool.call(spec.ranks, measured, spec)
    assert found == [PipelineCost().traffic(spec, table, rank) for rank in range(spec.ranks)]


@pytest.mark.parametrize("strategy", ["model", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize(("replicas", "rank"), [(8, 0), (8, 13), (8, 63), (128, 0), (128, 509), (128, 1023)])
def test_fake_pipeline_ranks_of_large_worlds_pass_the_predicted_traffic(
    strategy: str, replicas: int, rank: int
) -> None:
    """The first stage, one inside, the last; `digits` has no two batches for 1,024 ranks."""
    # Two chunks a stage: vgg11 has blocks for four stages.
    stages = 4 if strategy == "interleaved_1f1b" else 8
    spec = spec_of(
        strategy, stages, dataset="cifar10", nodes=replicas, tasks_per_node=8, dp_degree=replicas * 8 // stages,
        micro_batches=1 if strategy == "model" else 4,
    )  # fmt: skip
    assert fake_traffic(spec, rank) == PipelineCost().traffic(spec, table_of(spec), rank)


class _Kept:
    """Bytes of the distinct storages that autograd keeps, at most; ``own`` and tokens (views of a batch) left out."""

    def __init__(self, own: list[Tensor]) -> None:
        self._own = {one.untyped_storage().data_ptr() for one in own}
        self._alive: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self.peak = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in self._own:
            kept = tensor.detach()
            self._alive[id(kept)] = (weakref.ref(kept), storage.data_ptr(), storage.nbytes())
            return kept
        return tensor

    def look(self, _action: object) -> None:
        self._alive = {key: one for key, one in self._alive.items() if one[0]() is not None}
        self.peak = max(self.peak, sum(dict(one[1:] for one in self._alive.values()).values()))


@small_vocabulary()
def peak_kept(spec: RunSpec, group: dist.ProcessGroup) -> int:
    strategy, feed = PipelineStrategy(), make_feed(spec, CPU)
    strategy.setup(build_model(spec), spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group))
    kept = _Kept([*strategy.module.parameters(), *strategy.module.buffers()])
    strategy.runtime.hooks.after = kept.look
    with saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        strategy.step(feed, 0)
    return kept.peak


def kept_bytes(spec: RunSpec, table: LayerTable, rank: int) -> int:
    pipeline = PipelineRank(spec, table, rank)
    return pipeline.alive_bytes(pipeline.actions)


@pytest.mark.parametrize("schedule", ["model", "gpipe", "1f1b"])
@small_vocabulary()
def test_a_stage_keeps_the_predicted_activations(pool: Pool, schedule: str) -> None:
    """A transformer's blocks keep what they are given themselves, so the copy that was received is in their rows. The
    formula has the output beside it, which no layer keeps, but the micro-batch does until its backward pass."""
    spec = spec_of(
        schedule, 4, "gpt", "tokens", batch_size=8, micro_batches=8, input_size=16, model_options={"context": 16}
    )
    table = table_of(spec)
    boundary = 128 * 16 * 4 + 16 * 8
    for rank, found in enumerate(pool.call(4, peak_kept, spec)):
        alive = {"model": 1, "gpipe": 8, "1f1b": 4 - rank}[schedule]
        promised = kept_bytes(spec, table, rank)
        assert found <= promised <= found + alive * boundary


@small_vocabulary()
def test_tensor_parallel_stages_keep_the_predicted_activations(pool: Pool) -> None:
    """Heads and features are shared, norms and what is between blocks is not."""
    spec = spec_of(
        "1f1b", 2, "gpt", "tokens", tp_degree=2, tasks_per_node=4, batch_size=4, micro_batches=4, input_size=16,
        model_options={"context": 16},
    )  # fmt: skip
    table = table_of(spec)
    boundary = 128 * 16 * 4 + 16 * 8
    for rank, found in enumerate(pool.call(4, peak_kept, spec)):
        alive = 2 - rank // 2
        promised = kept_bytes(spec, table, rank)
        assert found <= promised <= found + alive * boundary
