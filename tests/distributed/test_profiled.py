"""The split of real profiled steps on two ranks."""

from __future__ import annotations

import pytest

from hpcbench.results.schema import StepPhases
from hpcbench.strategies.data.train import ddp_bucket_cap
from tests.distributed.cases import Case
from tests.distributed.pool import Pool
from tests.worker.helpers import make_spec

pytestmark = pytest.mark.slow

LATE_S = 1.5
"""Far more than these steps take, so that the order holds on a busy machine."""


@pytest.mark.parametrize(("size", "told"), [(25.0, None), (24.0, 24.0), (1.0, 1.0)])
def test_the_default_bucket_size_is_left_to_ddp(size: float, told: float | None) -> None:
    assert ddp_bucket_cap(size) == told


def split_of_rank_0(pool: Pool, late_s: float) -> StepPhases:
    """All gradients in one bucket: its all_reduce begins when nothing is left to compute."""
    spec = make_spec(
        model="vgg11", model_options={"batch_norm": False}, strategy="ddp", tasks_per_node=2, dp_degree=2,
        batch_size=4, profile_steps=2, options={"bucket_cap_mb": 1000.0},
    )  # fmt: skip
    profiled = pool.run(Case(spec, samples=1500, steps=2, late_s=late_s))[0].profiled
    assert profiled is not None
    phases, warnings = profiled
    assert warnings == []
    assert phases is not None
    return phases


def test_waiting_for_a_late_rank_is_exposed_communication(pool: Pool) -> None:
    together, late = split_of_rank_0(pool, 0.0), split_of_rank_0(pool, LATE_S)
    for phases in (together, late):
        assert phases.comm_s is not None
        assert phases.exposed_comm_s is not None
        assert phases.compute_s is not None
        assert 0 < phases.exposed_comm_s <= phases.comm_s < phases.step_s
        assert phases.compute_s + phases.exposed_comm_s <= phases.step_s
        assert phases.forward_s is not None
        assert phases.backward_s is not None
        assert phases.backward_s > phases.exposed_comm_s, "DDP waits within the backward pass"
    assert late.exposed_comm_s is not None
    assert together.exposed_comm_s is not None
    assert late.exposed_comm_s > together.exposed_comm_s
