"""Which random numbers the ranks of a tensor-parallel run share, and which are their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.tensor.train import TensorParallelStrategy
from hpcbench.strategies.tensor.train.layers import rank_local_rng
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_execution import wrap_blocks
from hpcbench.worker.models.build import build_model
from tests.distributed.cases import CPU
from tests.distributed.pool import Pool
from tests.distributed.tensor_cases import small_vocabulary, tensor_case

pytestmark = [pytest.mark.slow, pytest.mark.strategy("tensor")]

DROPS = {"context": 9, "dropout": 0.3}
SEQUENCE = {"sequence_parallel": True}


def train(spec: RunSpec, group: dist.ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return replicated tensors after two steps, and the dropped positions of the last block."""
    with small_vocabulary():
        strategy = TensorParallelStrategy()
        strategy.setup(
            wrap_blocks(build_model(spec), spec), spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group)
        )
        feed, dropped = make_feed(spec, CPU), dict[str, Tensor]()
        last = strategy.module.get_submodule("4.dropout2")
        last.register_forward_hook(lambda _module, _given, output: dropped.update(here=output.detach() == 0))
        for step in range(2):
            strategy.step(feed, step)
        named = strategy.module.named_parameters()
        whole = {
            name: one.detach()
            for name, one in named
            if name.rpartition(".")[2]
            not in getattr(strategy.module.get_submodule(name.rpartition(".")[0]), "shards", {})
        }
        return whole, dropped


@pytest.mark.parametrize("more", [{}, {"options": SEQUENCE}, {"options": SEQUENCE, "dp_degree": 1}])
def test_replicated_tensors_stay_equal_under_dropout(pool: Pool, more: dict[str, Any]) -> None:
    """Heads are uneven on three ranks, so one draws more numbers than the others."""
    spec = tensor_case(3, model_options=DROPS, **more).spec
    (first, _), *others = pool.call(3, train, spec)
    assert len(first) > 20
    for other, _ in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_replicated_activations_lose_the_same_and_own_tokens_not(pool: Pool) -> None:
    (_, one), (_, two) = pool.call(2, train, tensor_case(2, model_options=DROPS).spec)
    assert one["here"].any()
    assert torch.equal(one["here"], two["here"])
    spec = tensor_case(2, model_options=DROPS, options=SEQUENCE, input_size=8).spec
    (_, one), (_, two) = pool.call(2, train, spec)
    assert one["here"].shape == two["here"].shape
    assert not torch.equal(one["here"], two["here"])


@pytest.mark.parametrize("options", [{}, SEQUENCE])
def test_a_block_computed_again_loses_the_same(pool: Pool, options: dict[str, Any]) -> None:
    """So training is the same to the last bit."""
    given: dict[str, Any] = {"model_options": DROPS, "options": options, "precision": "fp64"}
    plain = pool.call(2, train, tensor_case(2, **given).spec)
    again = pool.call(2, train, tensor_case(2, activation_checkpointing=True, **given).spec)
    for (one, _), (two, _) in zip(plain, again, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_own_draws_leave_the_generator_as_on_all_other_ranks() -> None:
    drawn, after = [], []
    for place in (0, 1):
        torch.manual_seed(7)
        with rank_local_rng(place, CPU):
            drawn.append(torch.rand(4))
            torch.rand(place)
        after.append(torch.rand(4))
    assert not torch.equal(*drawn)
    assert torch.equal(*after)
