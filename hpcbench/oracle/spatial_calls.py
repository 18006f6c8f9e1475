"""What ``spatial`` passes around every row of the table: halos, statistics and the switch to whole layers."""

from __future__ import annotations

from collections.abc import Iterator

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.moves import NOTHING, Around, Move
from hpcbench.oracle.tensors import FP32_BYTES, FP64_BYTES, HALF_BYTES, parameter_bytes
from hpcbench.parallel.buckets import MIB, buckets
from hpcbench.parallel.catalog import chosen_options
from hpcbench.parallel.halo import Message, halo, own_box, volume
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.spatial import CONVOLUTIONS, GLOBAL_POOLS, NORMS, POOLS, WINDOWED, Split, window_layer
from hpcbench.parallel.traffic import Traffic


def around(spec: RunSpec, split: Split, number: int, place: int) -> Around:
    """What the rank at ``place`` does before and after the row of that number. Halos come in the order of messages."""
    row = split.rows[number]
    if number == split.end:
        return _switch(spec, split)
    if number > split.end:
        return NOTHING
    if row.kind in WINDOWED:
        needs = halo(window_layer(row), split.grid, place)
        back = needs.receives if has_input_gradient(split, number) else ()
        unit = samples_of(spec) * sent_bytes(spec) * row.input_shape[0]
        return NOTHING._replace(enter=_sends(needs.sends, unit), enter_backward=_sends(back, unit))
    if row.kind in NORMS and chosen_options(spec)["batch_norm"] != "local":
        payload = 2 * row.input_shape[0] * stored_bytes(spec)
        gathered = _call("all_gather", spec.sp_degree, payload)
        summed = _call("all_reduce", spec.sp_degree, payload)
        has_gradient = has_input_gradient(split, number)
        return NOTHING._replace(enter=[_bare(gathered)], enter_backward=[_bare(summed)] if has_gradient else [])
    return NOTHING


def _switch(spec: RunSpec, split: Split) -> Around:
    """One sum per channel, or the largest part of what arrives."""
    channels = split.rows[split.end - 1].output_shape[0]
    if is_reduced(spec, split):
        total = _bare(_call("all_reduce", spec.sp_degree, samples_of(spec) * channels * stored_bytes(spec)))
        return NOTHING._replace(leave=[total], is_left_again=_is_kept_from(split, split.end + 1))
    widest = volume(own_box(split.extents, split.grid, 0))
    payload = samples_of(spec) * channels * widest * sent_bytes(spec)
    gathered = Move("all_gather", payload * spec.sp_degree, _call("all_gather", spec.sp_degree, payload))
    narrowed = Move("narrow", payload, None)
    return Around([], [gathered], [narrowed], [], is_left_again=_is_kept_from(split, split.end))


def _is_kept_from(split: Split, number: int) -> bool:
    """Whether a block that is computed again comes as far as row ``number``: it ends with what is kept last."""
    block, kinds = split.rows[split.end].block, POOLS | GLOBAL_POOLS
    later = [row for row in split.rows[number:] if row.block == block]
    return any(row.activation_bytes or row.parameters or row.kind in kinds for row in later)


def gradient_buckets(spec: RunSpec, table: LayerTable, split: Split | None) -> Iterator[tuple[list[int], int]]:
    """Places of the tensors in each, and among how many ranks: cut layers' all that share them, others' replicas."""
    sizes, cap = parameter_bytes(spec, table), max(int(float(chosen_options(spec)["bucket_cap_mb"]) * MIB), 1)
    names = [one.name for one in table.parameter_tensors]
    cut = [False] * len(names) if split is None else split.are_cut(names)
    for is_cut, ranks in ((True, spec.sp_degree * spec.dp_degree), (False, spec.dp_degree)):
        places = [place for place, one in enumerate(cut) if one == is_cut]
        if ranks > 1:
            for bucket in buckets([sizes[place] for place in places], cap):
                yield [places[one] for one in bucket], ranks


def has_input_gradient(split: Split, number: int) -> bool:
    """Not where the samples themselves go in."""
    row = split.rows[number]
    if row.kind in CONVOLUTIONS:
        return row.backward_flops > row.forward_flops
    return any(before.parameters for before in split.rows[:number])


def is_reduced(spec: RunSpec, split: Split) -> bool:
    """Whether the switch is a mean of which every rank has a part."""
    return split.by_mean and chosen_options(spec)["global_pool"] == "reduce"


def samples_of(spec: RunSpec) -> int:
    """Of a micro-batch."""
    return spec.batch_size // spec.micro_batches


def stored_bytes(spec: RunSpec) -> int:
    """Of a parameter, and of a sum."""
    return FP64_BYTES if spec.precision == "fp64" else FP32_BYTES


def sent_bytes(spec: RunSpec) -> int:
    """Of a number in a feature map."""
    return HALF_BYTES if spec.precision in ("bf16", "fp16") else stored_bytes(spec)


def _sends(messages: tuple[Message, ...], unit: int) -> list[Move]:
    sizes = [unit * volume(message.box) for message in messages]
    return [Move("send", size, _call("send", 2, size)) for size in sizes]


def _bare(call: Traffic) -> Move:
    return Move(call.operation, 0, call)


def _call(operation: str, ranks: int, payload_bytes: int) -> Traffic:
    return Traffic(operation=operation, group_size=ranks, payload_bytes=payload_bytes)
