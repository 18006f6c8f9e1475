"""Every strategy of the registry steps on cuda as the oracle has it, without a wait of the host."""

from __future__ import annotations

from itertools import product

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.mesh import RankMesh
from tests.cuda.cases import MODELS, STEPPED, WORLDS, exclusion, gpu_run, ranks_to_step
from tests.cuda.checks import is_pipeline_of_ranks, memory_problems, step_problems
from tests.cuda.fake_gpu import step_on_gpu

MODELLED = {
    "ddp": ["reducer"], "zero1": ["reducer"], "fairscale_oss": ["reducer"],
    "fairscale_pipe": ["one_device"],
}  # fmt: skip
EXCLUDED = {
    ("filter", "transformer"), ("channel", "transformer"), ("spatial", "transformer"),
    ("tensor", "cnn"), ("tensor", "volumes"),
}  # fmt: skip


def phases_of(spec: RunSpec, rank: int) -> set[str]:
    """Return the parts of a step of ``rank``: an inner stage of a synchronous pipeline takes no samples."""
    is_inner = is_pipeline_of_ranks(spec) and 0 < RankMesh.of(spec).coordinates(rank).pp < spec.pp_degree - 1
    takes_samples = not is_inner or spec.strategy == "pipedream"
    return {"forward", "backward", "optimizer"} | ({"data"} if takes_samples else set())


@pytest.mark.parametrize(
    ("key", "kind", "ranks"),
    [
        (key, kind, ranks)
        for key, kind, ranks in product(STEPPED, MODELS, WORLDS)
        # One process is the same run in every world.
        if ranks == WORLDS[0] or gpu_run(key, kind, ranks) != gpu_run(key, kind, WORLDS[0])
    ],
)
def test_a_step_on_cuda_equals_the_predicted_calls_and_memory(key: str, kind: str, ranks: int) -> None:
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
        assert set(steps.phases) == phases_of(spec, rank)
        assert steps.device.index == rank % 8


def test_replicas_of_stages_that_share_layers() -> None:
    """Two replicas of a pipeline of two stages of two ranks: tensor, pipeline and data parallelism together."""
    spec = gpu_run("1f1b", "transformer", 8, dp_degree=2, tp_degree=2, pp_degree=2)
    assert exclusion(spec) is None
    by_rank = {rank: step_on_gpu(spec, rank) for rank in range(8)}
    for rank, steps in by_rank.items():
        assert step_problems(spec, rank, steps) == []
        assert memory_problems(spec, rank, steps) == []


@pytest.mark.parametrize(("key", "kind"), [("tensor", "transformer"), ("spatial", "cnn"), ("fsdp", "transformer")])
def test_collectives_have_one_tensor(key: str, kind: str) -> None:
    """Of a list of tensors NCCL would make copies: ``allgather_`` and ``reduce_scatter_`` take one."""
    options = {"sequence_parallel": True} if key == "tensor" else {}
    steps = step_on_gpu(gpu_run(key, kind, 8, options=options), 1)
    operations = steps.communication
    assert operations & {"_allgather_base_", "all_gather_into_tensor", "all_gather_into_tensor_out"}
    assert not operations & {"allgather_", "reduce_scatter_", "alltoall_"}
