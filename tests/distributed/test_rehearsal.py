"""A rehearsed step passes what the real one would: every strategy's formula, on real ranks that compute nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.roofline import DeviceCompute
from hpcbench.parallel.traffic import Traffic
from hpcbench.worker.emulation_mode import EmulationMode
from tests.distributed.cases import CPU, make_case
from tests.distributed.pool import Pool
from tests.distributed.recording import record_traffic
from tests.distributed.test_traffic import expected, started

pytestmark = pytest.mark.slow

QUICK = DeviceCompute(peak_flops_per_s={"fp32": 1e18}, memory_bandwidth_bytes_per_s=1e18, launch_s=0.0)

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("ddp", "resnet18", {}),
    ("zero1", "resnet18", {}),
    ("fsdp", "gpt", {"input_size": 8}),
    ("fairscale_oss", "vit", {}),
    ("fairscale_sddp", "vit", {}),
    ("fairscale_fsdp", "vit", {}),
    ("filter", "vgg11", {"tp_degree": 2, "dp_degree": 1}),
    ("channel", "vgg11", {"tp_degree": 2, "dp_degree": 1}),
    ("spatial", "vgg11", {"sp_degree": 2, "dp_degree": 1, "input_size": 16}),
    ("tensor", "vit", {"tp_degree": 2, "dp_degree": 1}),
    ("1f1b", "resnet18", {"pp_degree": 2, "dp_degree": 1, "micro_batches": 2}),
    ("zero_bubble", "vit", {"pp_degree": 2, "dp_degree": 1, "micro_batches": 2}),
]


def rehearsed(spec: RunSpec, group: dist.ProcessGroup) -> list[Traffic]:
    strategy, feed = started(spec, group, steps=0)
    mode = EmulationMode(QUICK, spec.precision, spec.model, CPU)

    def step(number: int) -> None:
        with mode:
            strategy.step(feed, number)

    for number in range(3):
        step(number)
    return record_traffic(lambda: step(3))


@pytest.mark.parametrize(("key", "model", "more"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_emulated_ranks_pass_the_predicted_traffic(pool: Pool, key: str, model: str, more: dict[str, Any]) -> None:
    dataset = "tokens" if model == "gpt" else "mnist"
    spec = make_case(2, model, dataset, strategy=key, **{"batch_size": 4, "input_size": 8, **more}).spec
    for rank, found in enumerate(pool.call(2, rehearsed, spec)):
        assert found == expected(spec, rank), rank
