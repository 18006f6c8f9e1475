"""Checks of a step on a GPU against the oracle; each returns its problems in words."""

from __future__ import annotations

import re

import msgspec
import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.traffic import Traffic
from tests.cuda.cases import table_of
from tests.cuda.fake_gpu import GpuSteps

PRODUCT_TYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "bf16_params": torch.bfloat16,
}  # fmt: skip
"""The type in which a run of each precision multiplies. tf32 is stored as fp32."""

LOSS_SCALING = "fp16's loss scaling reads whether a gradient overflowed"
ALLOWED_SITES = {"fp16": {"hpcbench/worker/model_execution.py: the host reads a value of a tensor": LOSS_SCALING}}
"""Sites, without their line, at which a step of a precision may wait for the device, with the reason."""
OSS_WAIT = "fairscale's OSS waits for the device before it broadcasts the updated shards"
ALLOWED_WAITS = {key: {"cudaDeviceSynchronize": (1, OSS_WAIT)} for key in ("fairscale_oss", "fairscale_sddp")}
"""Calls of CUDA's runtime in a step of a strategy, with the reason."""

HALF_MESSAGES = ("resnet18",)
"""Models whose blocks hand bf16 on under autocast; the oracle counts messages between stages as fp32. Blocks of
transformers hand on a sum that is fp32."""

MEMORY_TOLERANCE = 0.1
"""Share of the oracle's peak."""


def step_problems(spec: RunSpec, rank: int, steps: GpuSteps) -> list[str]:
    """Return what a step of ``rank`` does that it should not, against what the oracle predicts of it."""
    sites, waits = ALLOWED_SITES.get(spec.precision, {}), ALLOWED_WAITS.get(spec.strategy, {})
    problems = [f"host waits at {site}" for site in steps.host_sync_sites if re.sub(r":\d+:", ":", site) not in sites]
    problems += [
        f"the host calls {name} {count} times in a step"
        for name, count in steps.runtime_waits.items()
        if count != waits.get(name, (0, ""))[0]
    ]
    problems += [f"stray tensor at {site}" for site in steps.stray]
    expected = expected_traffic(spec, rank)
    if steps.calls != expected:
        missing, extra = _difference(expected, steps.calls), _difference(steps.calls, expected)
        problems.append(f"traffic of rank {rank}: the oracle has {missing}, the step {extra}")
    if steps.product_types - {PRODUCT_TYPES[spec.precision]}:
        problems.append(f"{spec.precision} multiplies in {sorted(map(str, steps.product_types))}")
    if len(steps.step_times_s) != 1 or steps.step_times_s[0] <= 0:
        problems.append(f"the clock counts steps of {steps.step_times_s} s")
    return problems + counter_problems(steps)


def counter_problems(steps: GpuSteps) -> list[str]:
    """Return which counters around the timed loop are wrong. Without NVML there is no energy."""
    problems = []
    if steps.watched is None or steps.watched.wall_s < sum(steps.step_times_s):
        problems.append(f"the host's counters are {steps.watched}")
    if steps.energy_j is not None:
        problems.append(f"{steps.energy_j} J without NVML")
    if steps.allocated_bytes:
        problems.append(f"{steps.allocated_bytes} bytes are allocated outside of fake tensors")
    return problems


def expected_traffic(spec: RunSpec, rank: int) -> list[Traffic]:
    """Return the oracle's traffic of ``rank``, with messages as large as autocast makes them."""
    traffic = resolve_cost(spec.strategy).traffic(spec, table_of(spec), rank)
    is_lowered = spec.precision in ("bf16", "fp16") and spec.model in HALF_MESSAGES
    if not (is_lowered and is_pipeline_of_ranks(spec)):
        return traffic
    return [
        msgspec.structs.replace(call, payload_bytes=call.payload_bytes // 2) if call.operation == "send" else call
        for call in traffic
    ]


def memory_problems(spec: RunSpec, rank: int, steps: GpuSteps) -> list[str]:
    """Return whether the live bytes of ``rank`` at their peak are others than the oracle's, which are one device's."""
    ratio = steps.peak_bytes / resolve_cost(spec.strategy).memory(spec, table_of(spec), rank).total_bytes
    if spec.devices_per_task > 1 or abs(ratio - 1.0) <= MEMORY_TOLERANCE:
        return []
    return [f"peak of rank {rank} in {steps.peak_layer}: {steps.peak_bytes} bytes, {ratio:.2f} of the oracle's"]


def is_pipeline_of_ranks(spec: RunSpec) -> bool:
    """Return whether ranks of the run send messages to each other."""
    return spec.pp_degree > 1 and spec.devices_per_task == 1


def _difference(calls: list[Traffic], others: list[Traffic]) -> list[str]:
    return [f"{call.count} x {call.operation} of {call.payload_bytes}" for call in calls if call not in others]
