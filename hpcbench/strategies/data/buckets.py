"""Gradient buckets of the data-parallel libraries: their tensors, their bytes, and Horovod's fusion over time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import CostModel, unsharded_row_kernels
from hpcbench.predict.placement import place_group
from hpcbench.predict.tensor_sizes import HALF_BYTES, buffer_bytes, element_bytes, element_count, parameter_bytes
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.gradient_buckets import (
    DEFAULT_BUCKET_CAP_MB,
    FIRST_BUCKET_CAP_BYTES,
    MIB,
    assign_owners,
    fill_buckets,
    first_use_rows,
    gradient_ready_order,
    sum_bytes_at,
)
from hpcbench.strategies.layer_table import LayerTable

_MAX_BROADCAST_BYTES = 250 * MIB
"""DDP broadcasts buffers together up to this size."""


def ddp_buckets(spec: RunSpec, table: LayerTable) -> list[list[int]]:
    """Return the places of the gradients in each of DDP's buckets, in the order in which they are sent.

    From the second step on: the first one, whose order DDP learns from, sends all gradients in one bucket.
    """
    order = gradient_ready_order(table, spec.precision)
    sizes = parameter_bytes(spec, table)
    cap_mb = float(options_with_defaults(spec)["bucket_cap_mb"])
    cap_bytes = int(cap_mb * MIB)
    first_bytes = FIRST_BUCKET_CAP_BYTES if cap_mb == DEFAULT_BUCKET_CAP_MB else cap_bytes
    # What is filled from the last one on is filled in the order of readiness.
    filled = fill_buckets([sizes[place] for place in reversed(order)], cap_bytes, first_bytes)
    last = len(order) - 1
    return [[order[last - place] for place in bucket] for bucket in filled]


def coalesced_buffer_bytes(spec: RunSpec, table: LayerTable) -> list[int]:
    """Return the payloads of DDP's broadcasts of buffers: those of one type together."""
    kinds: dict[int, list[int]] = {}
    for tensor, size in zip(table.buffers, buffer_bytes(spec, table), strict=True):
        kinds.setdefault(tensor.bytes_per_element, []).append(size)
    return [
        sum_bytes_at(sizes[::-1], places)
        for sizes in kinds.values()
        for places in fill_buckets(sizes[::-1], _MAX_BROADCAST_BYTES, _MAX_BROADCAST_BYTES)
    ]


def half_precision_bytes(table: LayerTable) -> list[int]:
    """Return the bytes of each of the table's parameters in half precision."""
    return [element_count(tensor) * HALF_BYTES for tensor in table.parameter_tensors]


def owned_parameters(spec: RunSpec, table: LayerTable, *, largest_first: bool = False) -> list[list[int]]:
    """Return the places of the parameters that each replica updates; replicas beyond the list update none.

    Parameters are assigned in descending order of size (torch's ZeRO-1) or in the order of the model (fairscale).
    """
    counts = tuple(element_count(tensor) for tensor in table.parameter_tensors)
    return _assigned_owners(counts, min(spec.dp_degree, len(counts)), largest_first)


_assigned_owners = lru_cache(maxsize=256)(assign_owners)


def owned_bytes_by_replica(spec: RunSpec, table: LayerTable, half: bool = False) -> list[int]:
    """Return the bytes of the parameters of each replica that owns any."""
    sizes = half_precision_bytes(table) if half else parameter_bytes(spec, table)
    return [sum_bytes_at(sizes, places) for places in owned_parameters(spec, table) if places]


def rank_owned_bytes(spec: RunSpec, table: LayerTable, rank: int, *, largest_first: bool = False) -> list[int]:
    """Return by parameter its bytes where ``rank`` owns it, 0 elsewhere."""
    owned = {
        place
        for places in owned_parameters(spec, table, largest_first=largest_first)[rank : rank + 1]
        for place in places
    }
    return [size if place in owned else 0 for place, size in enumerate(parameter_bytes(spec, table))]


def sddp_buckets(spec: RunSpec, table: LayerTable) -> tuple[list[list[int]], list[int]]:
    """Return fairscale's buckets, one an owner, and the places of the gradients that are reduced by themselves.

    A bucket takes an owner's gradients from the smallest one on while it stays below its size, that of the whole model
    at most.
    """
    counts = [element_count(tensor) for tensor in table.parameter_tensors]
    number_bytes = element_bytes(spec, table.parameter_tensors[0])
    room = min(int(float(options_with_defaults(spec)["reduce_buffer_mb"]) * MIB / number_bytes), sum(counts))
    if room == 0 or spec.dp_degree == 1:
        return [], list(range(len(counts)))
    filled: list[list[int]] = []
    single: list[int] = []
    for places in owned_parameters(spec, table):
        bucket: list[int] = []
        for place in sorted(places, key=counts.__getitem__):
            fits = sum_bytes_at(counts, bucket) + counts[place] < room
            (bucket if fits else single).append(place)
        if places:
            filled.append(bucket)
    return filled, single


def sddp_reductions(spec: RunSpec, table: LayerTable) -> list[tuple[list[int], int]]:
    """Return the places and the payload of each reduction of a step; ``reduce_fp16`` has no buckets."""
    if options_with_defaults(spec)["reduce_fp16"]:
        return [([place], size) for place, size in enumerate(half_precision_bytes(table))]
    filled, single = sddp_buckets(spec, table)
    sizes = parameter_bytes(spec, table)
    return [(places, sum_bytes_at(sizes, places)) for places in [*filled, *([place] for place in single)]]


def compressed_bytes(spec: RunSpec, table: LayerTable, places: Sequence[int]) -> list[int]:
    """Return the payloads that are sent of one bucket of gradients."""
    options, sizes = options_with_defaults(spec), parameter_bytes(spec, table)
    kind = options.get("compression", "none")
    if kind in ("fp16", "bf16"):
        return [sum_bytes_at(half_precision_bytes(table), places)]
    if kind == "powersgd":
        tensors = [table.parameter_tensors[place] for place in places]
        number_bytes = element_bytes(spec, tensors[0])
        return powersgd_bytes([tensor.shape for tensor in tensors], int(options["powersgd_rank"]), number_bytes)
    return [sum_bytes_at(sizes, places)]


def powersgd_bytes(shapes: Iterable[list[int]], rank: int, number_bytes: int) -> list[int]:
    """Return PowerSGD's payloads of one bucket (Vogels et al. 2019, algorithm 1): plain tensors, factors P, factors Q.

    A gradient is seen as a matrix of its first extent times the others; one that its factors would not make smaller
    is sent as it is.
    """
    plain = left = right = 0
    for shape in shapes:
        rows, numbers = shape[0], prod(shape)
        columns = numbers // rows
        factor_rank = min(rank, rows, columns)
        if (rows + columns) * factor_rank < numbers:
            left += rows * factor_rank
            right += columns * factor_rank
        else:
            plain += numbers
    return [plain * number_bytes, left * number_bytes, right * number_bytes]


def sent_gradient_bytes(spec: RunSpec, table: LayerTable) -> list[int]:
    """Return the bytes that Horovod sends of each gradient."""
    is_half = options_with_defaults(spec)["compression"] == "fp16"
    return half_precision_bytes(table) if is_half else parameter_bytes(spec, table)


def fused_buckets(cost_model: CostModel, spec: RunSpec, table: LayerTable) -> list[list[int]]:
    """Return the places in ``parameter_tensors`` that Horovod fuses, in order."""
    options, group, blocks = options_with_defaults(spec), place_group(spec, "dp"), cost_model.machine.device == "cpu"
    cycle_s, threshold = float(options["cycle_time_ms"]) / 1e3, int(float(options["fusion_threshold_mb"]) * MIB)
    backward_s = [cost_model.kernel_s(kernels.backward) for kernels in unsharded_row_kernels(spec, table)]
    # By row the seconds after the begin of the backward pass at which its gradients are complete.
    ends_s, first_uses = list(accumulate(reversed(backward_s)))[::-1], first_use_rows(table)
    order = gradient_ready_order(table, spec.precision)

    def passing_s(size: int) -> float:
        return cost_model.collective("all_reduce", size, group).seconds if blocks else 0.0

    ready_s, sizes = [ends_s[first_uses[place]] for place in order], sent_gradient_bytes(spec, table)
    return simulate_fusion(order, ready_s, sizes, cycle_s, threshold, passing_s)


def simulate_fusion(
    order: Sequence[int],
    ready_s: Sequence[float],
    sizes: Sequence[int],
    cycle_s: float,
    threshold_bytes: int,
    passing_s: Callable[[int], float],
) -> list[list[int]]:
    """Return the places that are fused, in the order of the calls.

    The thread wakes up every ``cycle_s``, and fuses ready gradients up to the threshold; it then waits for the call.

    Args:
        order: places of the gradients, in the order in which they become ready.
        ready_s: seconds after the begin of the backward pass at which each of ``order`` is ready.
        sizes: bytes of the gradient at each place.
        passing_s: seconds that the thread waits for a call of so many bytes.
    """
    buckets: list[list[int]] = []
    now, start = 0.0, 0
    while start < len(order):
        late_s = ready_s[start] - now
        if late_s > 0:
            now += ceil(late_s / cycle_s) * cycle_s if cycle_s else late_s
        bucket, size = [order[start]], sizes[order[start]]
        for place, place_ready_s in zip(order[start + 1 :], ready_s[start + 1 :], strict=True):
            if place_ready_s > now or size + sizes[place] > threshold_bytes:
                break
            bucket.append(place)
            size += sizes[place]
        buckets.append(bucket)
        start += len(bucket)
        now += passing_s(size)
    return buckets
