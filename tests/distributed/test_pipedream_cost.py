"""Messages, weight versions and activations of a PipeDream stage equal the oracle's."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.pipeline.cost import PipedreamCost
from hpcbench.strategies.pipeline.entry import pipedream_staleness
from hpcbench.strategies.pipeline.rank_cost import PipelineRank
from hpcbench.strategies.pipeline.schedules import Action
from hpcbench.strategies.pipeline.train.pipedream import PipedreamStrategy
from hpcbench.strategies.pipeline.weight_versions import stage_actions_over_steps
from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from tests.distributed.cases import CPU
from tests.distributed.fake import fake_traffic
from tests.distributed.pool import Pool
from tests.distributed.recording import record_traffic
from tests.distributed.tensor_cases import small_vocabulary
from tests.distributed.test_pipeline_cost import _Kept, spec_of, table_of

pytestmark = [pytest.mark.slow, pytest.mark.strategy("pipedream")]

BUFFERED: dict[str, Any] = {"options": {"weight_versions": "2bw"}}


def started(spec: RunSpec, place: RankContext) -> PipedreamStrategy:
    strategy = PipedreamStrategy()
    strategy.setup(build_model(spec), spec, place)
    return strategy


def traffic(spec: RunSpec, group: dist.ProcessGroup) -> list[Traffic]:
    strategy, feed = started(spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group)), make_feed(spec, CPU)
    for step in range(2):
        strategy.step(feed, step)
    return record_traffic(lambda: strategy.step(feed, 2))


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("pipedream", 4),
        spec_of("pipedream", 2, micro_batches=1, dp_degree=2, precision="fp64"),
        spec_of("pipedream", 2, dp_degree=2, **BUFFERED),
    ],
    ids=["4 stages", "2x2", "2x2, 2bw"],
)
def test_pipedream_ranks_pass_the_predicted_traffic(pool: Pool, spec: RunSpec) -> None:
    """An update per minibatch is an all_reduce of every bucket per minibatch; what is sent ahead is of other sizes."""
    table = table_of(spec)
    found = pool.call(spec.ranks, traffic, spec)
    assert found == [PipedreamCost().traffic(spec, table, rank) for rank in range(spec.ranks)]


@pytest.mark.parametrize(("replicas", "rank"), [(8, 0), (8, 13), (8, 63), (128, 0), (128, 509), (128, 1023)])
def test_fake_pipedream_ranks_of_large_worlds_pass_the_predicted_traffic(replicas: int, rank: int) -> None:
    """The first stage, one inside, the last; 64 and 1,024 ranks."""
    spec = spec_of(
        "pipedream", 8, dataset="cifar10", nodes=replicas, tasks_per_node=8, dp_degree=replicas, batch_size=8
    )
    assert fake_traffic(spec, rank) == PipedreamCost().traffic(spec, table_of(spec), rank)


@small_vocabulary()
def held(spec: RunSpec, group: dist.ProcessGroup) -> tuple[int, int, int, list[float]]:
    """Return the maxima over 5 steps: weight versions, bytes of older ones, bytes of activations; and the losses."""
    strategy, feed = started(spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group)), make_feed(spec, CPU)
    kept = _Kept([*strategy.module.parameters(), *strategy.module.buffers()])
    buffers = {one.untyped_storage().data_ptr() for one in strategy.module.buffers()}
    stashed = 0
    around = strategy.runtime.hooks.after

    def look(action: Action) -> None:
        nonlocal stashed
        around(action)
        live = {one.untyped_storage().data_ptr() for one in strategy.module.parameters()}
        older = [one for versions in strategy._stash._older.values() for one in versions]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in older}
        stashed = max(stashed, sum(size for address, size in storages.items() if address not in live))
        kept._own = {*live, *storages, *buffers}
        kept.look(action)

    strategy.runtime.hooks.after = look
    with saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        losses = [strategy.step(feed, step).item() for step in range(5)]
    return strategy.peak_versions, stashed, kept.peak, losses


@pytest.mark.parametrize(
    ("options", "versions", "alive"),
    [({}, [4, 3, 2, 1], [4, 3, 2, 1]), ({"vertical_sync": True}, [4] * 4, [4, 3, 2, 1]),
     ({"weight_versions": "2bw"}, [2] * 4, [4, 3, 2, 1])],
    ids=["stash", "vertical_sync", "2bw"],
)  # fmt: skip
@small_vocabulary()
def test_weight_versions_and_live_activations_are_the_predicted_ones(
    pool: Pool, options: dict[str, Any], versions: list[int], alive: list[int]
) -> None:
    """Weights to the byte; activations as in ``test_pipeline_cost``: the output, too, stays with the micro-batch."""
    spec = spec_of(
        "pipedream", 4, "gpt", "tokens", batch_size=4, micro_batches=4, input_size=8, model_options={"context": 8},
        options=options,
    )  # fmt: skip
    table, boundary = table_of(spec), 128 * 8 * 4 + 8 * 8
    found = pool.call(4, held, spec)
    assert [most for most, *_ in found] == versions
    for rank, (_, stashed, activations, losses) in enumerate(found):
        promised = PipedreamCost().memory(spec, table, rank)
        assert stashed == promised.stashed_bytes == (versions[rank] - 1) * promised.parameters_bytes
        pipeline = PipelineRank(spec, table, rank)
        actions = stage_actions_over_steps(pipeline.layout, pipedream_staleness(spec), rank, 4, 3)
        assert activations <= pipeline.alive_bytes(actions) <= activations + alive[rank] * boundary
        assert (losses == [0.0] * 5) is (rank < 3), "the last stage alone knows a loss"
