"""Every strategy of the registry steps on cuda as the oracle has it, without a wait of the host."""

from __future__ import annotations

import pytest

from hpcbench.parallel.catalog import STRATEGIES
from tests.cuda.cases import MODELS, WORLDS, exclusion, gpu_run, ranks_to_step
from tests.cuda.checks import memory_problems, order_problems, step_problems
from tests.cuda.fake_gpu import step_on_gpu

MODELLED = {"ddp": ["reducer"], "zero1": ["reducer"], "fairscale_oss": ["reducer"], "horovod": ["horovod"]}
EXCLUDED = {
    ("filter", "transformer"), ("channel", "transformer"), ("spatial", "transformer"),
    ("tensor", "cnn"), ("tensor", "volumes"),
}  # fmt: skip


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("key", STRATEGIES)
def test_step(key: str, kind: str, ranks: int) -> None:
    spec = gpu_run(key, kind, ranks)
    if (key, kind) in EXCLUDED:
        assert exclusion(spec)
        return
    assert exclusion(spec) is None
    by_rank = {rank: step_on_gpu(spec, rank) for rank in ranks_to_step(spec)}
    for rank, steps in by_rank.items():
        assert step_problems(spec, rank, steps) == []
        assert memory_problems(spec, rank, steps) == []
        assert steps.modelled == MODELLED.get(key, [])
        assert set(steps.phases) == {"data", "forward", "backward", "optimizer"}
        assert steps.device.index == rank % 8
    assert order_problems(spec, by_rank) == []
