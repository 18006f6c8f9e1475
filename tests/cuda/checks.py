"""Checks of a step on a GPU against the oracle; each returns its problems in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import msgspec
import torch

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.machine import nominal_machine
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.mesh import RankMesh
from hpcbench.strategies.pipeline.exchange_order import Exchange, exchange_order
from hpcbench.strategies.pipeline.rank_cost import PipelineRank
from hpcbench.strategies.pipeline.schedules import FORWARD, UPDATE
from hpcbench.strategies.traffic import Traffic, merge_calls
from tests.cuda.cases import table_of
from tests.cuda.fake_gpu import GpuSteps
from tests.cuda.gpu_recorder import differing_calls
from tests.device_model.programs import pipeline_steps
from tests.predict.heard import heard_in_order

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


def order_problems(spec: RunSpec, by_rank: Mapping[int, GpuSteps]) -> list[str]:
    """Return where ranks that communicate with each other call in different orders, or in another than is priced."""
    problems = []
    for pair in combinations(by_rank, 2):
        problems += differing_calls(by_rank[pair[0]].order, by_rank[pair[1]].order, pair)
    if is_pipeline_of_ranks(spec):
        return problems + [
            text for rank, steps in by_rank.items() for text in pipeline_order_problems(spec, rank, steps)
        ]
    return problems + priced_order_problems(spec, by_rank)


def pipeline_order_problems(spec: RunSpec, rank: int, steps: GpuSteps) -> list[str]:
    """Return where ``rank`` exchanges messages, or sums gradients, in another order than that of the pipeline."""
    layers = tuple(sorted(RankMesh.of(spec).group(rank, "tp")))
    # Ranks that share layers have calls of their own, each of which waits for its result.
    calls = [call for call in steps.order if spec.tp_degree == 1 or call.ranks != layers]
    messages = [
        Message(call.operation.replace("allreduce_", "all_reduce"), None, call.payload_bytes)
        if call.peer is None
        else Message("send" if call.operation == "send" else "receive", call.peer, 0)
        for call in calls
    ]
    expected = expected_messages(spec, rank)
    if messages == expected:
        return []
    pairs = enumerate(zip(messages, expected, strict=False))
    number = next((number for number, pair in pairs if pair[0] != pair[1]), min(len(messages), len(expected)))
    own, right = (entries[number : number + 2] for entries in (messages, expected))
    return [f"rank {rank} exchanges {own} from number {number} on, and the order of the pipeline is {right}"]


def priced_order_problems(spec: RunSpec, by_rank: Mapping[int, GpuSteps]) -> list[str]:
    """Return where the rank that the oracle prices calls in another order. It prices the one with the most calls."""
    priced = heard_in_order(spec, table_of(spec), nominal_machine(load_cluster("slurmbox")[0]))
    alike = [rank for rank, steps in by_rank.items() if steps.calls == merge_calls(priced)]
    if not alike:
        return [f"the oracle prices {len(priced)} calls in order, which no rank of {list(by_rank)} makes"]
    recorded = by_rank[alike[0]].traffic
    differing = [number for number, pair in enumerate(zip(priced, recorded, strict=True)) if pair[0] != pair[1]]
    if not differing:
        return []
    return [
        f"call {differing[0]} of rank {alike[0]} is {recorded[differing[0]]}, the oracle prices {priced[differing[0]]}"
    ]


def is_pipeline_of_ranks(spec: RunSpec) -> bool:
    """Return whether ranks of the run send messages to each other."""
    return spec.pp_degree > 1 and spec.devices_per_task == 1


class Message(NamedTuple):
    """One side of a message between stages, or a sum of gradients over replicas."""

    operation: str
    peer: int | None
    """The other rank of a message."""
    payload_bytes: int
    """Of a sum; 0 for a message, whose bytes are in the traffic."""


def expected_messages(spec: RunSpec, rank: int) -> list[Message]:
    """Return the messages and sums of gradients of ``rank`` in a steady step.

    Of an exchange the sends come first. The order is that for which ``tests/device_model`` finds no hang. A chunk's
    gradients are sent with its last backward pass, and those of ``pipedream`` with each update.
    """
    members, pipeline = RankMesh.of(spec).group(rank, "pp"), PipelineRank(spec, table_of(spec), rank)
    stage_rank = members.index(rank)
    layout, steps = pipeline_steps(spec.strategy, spec.pp_degree, spec.micro_batches)
    actions = steps[-1][stage_rank]
    last_backward = {action.chunk: action for action in actions if action.kind not in (FORWARD, UPDATE)}
    sums_after = set(last_backward.values())
    if spec.strategy == "pipedream":
        sums_after = {action for action in actions if action.kind == UPDATE}
    expected: list[Message] = []
    for entry in exchange_order(steps[-1], layout)[stage_rank]:
        if isinstance(entry, Exchange):
            for receives, message in sorted((message.target == stage_rank, message) for message in entry.messages):
                peer = members[message.source if receives else message.target]
                expected.append(Message("receive" if receives else "send", peer, 0))
        elif entry in sums_after:
            buckets = pipeline.bucket_traffic(pipeline.parameter_bytes(entry.chunk))
            expected += [Message(call.operation, None, call.payload_bytes) for call in buckets]
    return expected


def _difference(calls: list[Traffic], others: list[Traffic]) -> list[str]:
    return [f"{call.count} x {call.operation} of {call.payload_bytes}" for call in calls if call not in others]
