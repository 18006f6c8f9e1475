"""A model that no host of these tests holds, over 64 GPUs: its step, and its memory against the oracle's."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from tests.cuda.cases import exclusion
from tests.cuda.checks import memory_problems, step_problems
from tests.cuda.fake_gpu import step_on_gpu

RANKS = 64
CASES: dict[str, dict[str, Any]] = {
    "fsdp": {"dp_degree": RANKS, "activation_checkpointing": True},
    "tensor": {"tp_degree": 8, "dp_degree": RANKS // 8},
}
"""13 billion parameters with Adam are 205 GB."""


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("strategy", CASES)
def test_a_gpt_13b_step_on_64_gpus_equals_the_prediction(strategy: str) -> None:
    spec = RunSpec(
        model="gpt_13b", dataset="tokens", strategy=strategy, nodes=8, tasks_per_node=8, batch_size=1,
        optimizer="adam", **CASES[strategy],
    )  # fmt: skip
    assert exclusion(spec) is None
    by_rank = {rank: step_on_gpu(spec, rank) for rank in (0, RANKS // 2 + 1, RANKS - 1)}
    for rank, steps in by_rank.items():
        assert step_problems(spec, rank, steps) == []
        assert memory_problems(spec, rank, steps) == []
        # Built part by part: the whole model was never on the device.
        assert steps.setup_peak_bytes <= steps.peak_bytes
