"""Which gradients and parameters the replicas' libraries send together, and how many bytes that makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.tensors import HALF_BYTES, buffer_bytes, element_bytes, elements, parameter_bytes
from hpcbench.parallel.buckets import BUCKET_CAP_MB, FIRST_CAP_BYTES, MIB, buckets, total
from hpcbench.parallel.catalog import chosen_options
from hpcbench.parallel.gradients import owners, ready_order
from hpcbench.parallel.layers import LayerTable

_MAX_BROADCAST_BYTES = 250 * MIB
"""DDP broadcasts buffers together up to this size."""


def ddp_buckets(spec: RunSpec, table: LayerTable) -> list[list[int]]:
    """Places of the gradients in each of DDP's buckets, in the order in which they are sent.

    From the second step on: the first one, whose order DDP learns from, sends all gradients in one bucket.
    """
    order = ready_order(table, spec.precision)
    sizes = parameter_bytes(spec, table)
    cap_mb = float(chosen_options(spec)["bucket_cap_mb"])
    cap_bytes = int(cap_mb * MIB)
    first_bytes = FIRST_CAP_BYTES if cap_mb == BUCKET_CAP_MB else cap_bytes
    # What is filled from the last one on is filled in the order of readiness.
    filled = buckets([sizes[place] for place in reversed(order)], cap_bytes, first_bytes)
    last = len(order) - 1
    return [[order[last - place] for place in bucket] for bucket in filled]


def coalesced_buffer_bytes(spec: RunSpec, table: LayerTable) -> list[int]:
    """What DDP broadcasts of the buffers: those of one type together."""
    kinds: dict[int, list[int]] = {}
    for tensor, size in zip(table.buffers, buffer_bytes(spec, table), strict=True):
        kinds.setdefault(tensor.bytes_per_element, []).append(size)
    return [
        total(sizes[::-1], places)
        for sizes in kinds.values()
        for places in buckets(sizes[::-1], _MAX_BROADCAST_BYTES, _MAX_BROADCAST_BYTES)
    ]


def owned_places(spec: RunSpec, table: LayerTable) -> list[list[int]]:
    """Places of the parameters that each replica updates; of replicas beyond the last one of these: none."""
    counts = tuple(elements(tensor) for tensor in table.parameter_tensors)
    return _owners(counts, min(spec.dp_degree, len(counts)), spec.strategy == "zero1")


@lru_cache(maxsize=256)
def _owners(elements: tuple[int, ...], ranks: int, largest_first: bool) -> list[list[int]]:
    return owners(elements, ranks, largest_first)


def owner_bytes(spec: RunSpec, table: LayerTable, half: bool = False) -> list[int]:
    """Bytes of the parameters of each replica that owns any."""
    counts = [elements(tensor) * HALF_BYTES for tensor in table.parameter_tensors]
    sizes = counts if half else parameter_bytes(spec, table)
    return [total(sizes, places) for places in owned_places(spec, table) if places]


def owned_bytes(spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
    """Of every parameter: its bytes where ``rank`` owns it, 0 elsewhere."""
    owned = {place for places in owned_places(spec, table)[rank : rank + 1] for place in places}
    return [size if place in owned else 0 for place, size in enumerate(parameter_bytes(spec, table))]


def sddp_buckets(spec: RunSpec, table: LayerTable) -> tuple[list[list[int]], list[int]]:
    """fairscale's buckets, one an owner, and the places of the gradients that are reduced by themselves.

    A bucket takes an owner's gradients from the smallest one on while it stays below its size, that of the whole model
    at most.
    """
    counts = [elements(tensor) for tensor in table.parameter_tensors]
    sizes = parameter_bytes(spec, table)
    wide = sizes[0] // counts[0]
    room = min(int(float(chosen_options(spec)["reduce_buffer_mb"]) * MIB / wide), sum(counts))
    if room == 0 or spec.dp_degree == 1:
        return [], list(range(len(counts)))
    filled: list[list[int]] = []
    alone: list[int] = []
    for places in owned_places(spec, table):
        bucket: list[int] = []
        for place in sorted(places, key=counts.__getitem__):
            fits = total(counts, bucket) + counts[place] < room
            (bucket if fits else alone).append(place)
        if places:
            filled.append(bucket)
    return filled, alone


def sddp_reduced_bytes(spec: RunSpec, table: LayerTable) -> list[int]:
    """Payload of each reduction of a step."""
    filled, alone = sddp_buckets(spec, table)
    sizes = parameter_bytes(spec, table)
    if chosen_options(spec)["reduce_fp16"]:
        return [elements(tensor) * HALF_BYTES for tensor in table.parameter_tensors]
    return [*(total(sizes, bucket) for bucket in filled), *(sizes[place] for place in alone)]


def compressed_bytes(spec: RunSpec, table: LayerTable, places: Sequence[int]) -> list[int]:
    """What is sent of one bucket of gradients."""
    options, sizes = chosen_options(spec), parameter_bytes(spec, table)
    kind = options.get("compression", "none")
    if kind in ("fp16", "bf16"):
        return [sum(elements(table.parameter_tensors[place]) for place in places) * HALF_BYTES]
    if kind == "powersgd":
        tensors = [table.parameter_tensors[place] for place in places]
        wide = element_bytes(spec, tensors[0])
        return powersgd_bytes([tensor.shape for tensor in tensors], int(options["powersgd_rank"]), wide)
    return [total(sizes, places)]


def powersgd_bytes(shapes: Iterable[list[int]], rank: int, wide: int) -> list[int]:
    """What PowerSGD (Vogels et al. 2019, algorithm 1) sends of one bucket: plain tensors, factors P, factors Q.

    A gradient is seen as a matrix of its first extent times the others; one that its factors would not make smaller
    is sent as it is.
    """
    plain = left = right = 0
    for shape in shapes:
        rows, numbers = shape[0], prod(shape)
        columns = numbers // rows
        own = min(rank, rows, columns)
        if (rows + columns) * own < numbers:
            left += rows * own
            right += columns * own
        else:
            plain += numbers
    return [plain * wide, left * wide, right * wide]
