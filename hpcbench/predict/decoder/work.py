"""Work of a training step on its slowest GPUs: multiplications, bytes, messages and kernels, without any fitted figure.

Every quantity is a plain number. ``pricing`` turns them into time with arithmetic that holds for numbers and for arrays
of numbers, so that a fit can price all its runs at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcbench.predict.decoder.experts import (
    GATED_BYTES,
    PLAIN_BYTES,
    ExpertWork,
    expert_replicas,
    expert_shards,
    expert_work,
    held_parameters,
    host_ratio,
)
from hpcbench.predict.decoder.layout import CollectiveRates, GpuNode, Layout, check_layout, share_of_link, stage_layers
from hpcbench.predict.decoder.low_precision import cast_bytes, node_of_products
from hpcbench.predict.decoder.products import ProductTime, product, total
from hpcbench.predict.decoder.software import LOOPS
from hpcbench.strategies.decoder_shapes import DecoderShape

BF16, FP32 = 2, 4
NORM_AND_RESIDUAL_BYTES = 110
"""Bytes moved for each element of the hidden state by a layer's two normalisations, residual sums, forward and backward
(unfused kernels: about 22 reads or writes forward, 33 backward of 2 bytes)."""
QKV_BYTES = 20
CONTEXT_PASSES = 3.0
"""Passes of keys and values around a context group: forward, and backward again with their gradients."""
SCORE_BYTES = 32
"""Bytes for each attention score that is stored: products, masked softmax and dropout, forward and backward."""
LOGIT_BYTES = 54
"""Bytes for each logit: casts to fp32, maximum, exponent, sum, division, gradient, cast back."""
ACCUMULATE_BYTES = 10
OPTIMIZER_BYTES = 60
"""Bytes for each parameter: clipping, fused Adam in fp32, the copy to bf16, gradients set to zero."""
BUCKET_BYTES = 25e6
DISTURBED_BELOW = 0.95
USUAL_GATHER_RATE, USUAL_REDUCE_RATE = 225e9, 185e9


@dataclass(frozen=True)
class Work:
    """Work of a step, of one micro-batch for layers and stages. Seconds are at the device's peak.

    ``layer_*`` concern one layer, forward and backward, the mean one where some have experts: ``layer_exchange_s`` are
    messages to experts, ``layer_context_s`` the keys and values of other ranks of a context group. ``head_*`` concern
    the output head with the loss; ``reduce_*``, ``gather_*`` and ``data_*`` the gradients and parameters of data
    parallelism; ``shard_*`` fully sharded parameters. ``*_is_wide`` is 1 where the group leaves its node.
    """

    layer_matmul_s: float
    layer_tile_s: float
    layer_attention_s: float
    layer_memory_s: float
    head_matmul_s: float
    head_tile_s: float
    head_memory_s: float
    layer_exchange_s: float
    layer_wide_exchange_s: float
    layer_context_s: float
    context_is_wide: float
    layer_accumulate_s: float
    head_accumulate_s: float
    recompute_share: float
    head_width_ratio: float
    layers_first: float
    layers_middle: float
    layers_last: float
    layers_total: float
    chunks: float
    hidden_ratio: float
    accumulation: float
    pipeline: float
    is_pipelined: float
    is_tensor: float
    tensor: float
    layer_tensor_s: float
    head_tensor_s: float
    tensor_messages: float
    tensor_is_wide: float
    tensor_rate_ratio: float
    stage_send_s: float
    stage_sends: float
    is_host_contended: float
    host_ratio: float
    is_exposed: float
    reduce_s: float
    gather_s: float
    reduce_is_wide: float
    reduce_rate_ratio: float
    reduce_messages: float
    gather_messages: float
    data_nodes: float
    gather_is_wide: float
    gather_nodes: float
    shard_layer_s: float
    shard_is_wide: float
    shard_messages: float
    shard_log_nodes: float
    optimizer_s: float
    optimizer_tensors: float
    log_nodes: float
    data_node_share: float


def _row_parts(layout: Layout) -> tuple[float, ...]:
    """The rank's own shard of the rows is multiplied while the others arrive, then those before and after it."""
    if not LOOPS[layout.software].splits_products or layout.tensor == 1:
        return (1.0,)
    rest = 1.0 - 1.0 / layout.tensor
    return (1.0 / layout.tensor, rest) if layout.tensor == 2 else (1.0 / layout.tensor, rest / 2, rest / 2)


def _group_seconds(
    payload_bytes: float, group: int, per_node: int, node: GpuNode, stride: int = 1
) -> tuple[float, bool]:
    """Return the seconds at nominal rates of one pass around a ring, and whether it leaves the node.

    ``stride`` is the distance between neighbours: so many groups send at the same time.
    """
    if group <= 1:
        return 0.0, False
    moved = payload_bytes * (group - 1) / group
    if group <= per_node:
        return moved / (node.nvlink_bytes_s * share_of_link(node, group, stride)), False
    return moved / min(node.nvlink_bytes_s, node.nic_bytes_s * per_node), True


def step_work(shape: DecoderShape, layout: Layout, node: GpuNode, rates: CollectiveRates) -> Work:
    """Count the work of a step.

    ``rates`` are those of collectives over all GPUs of the job. Raises ConfigError where the shape cannot be divided.
    """
    check_layout(shape, layout)
    nodes = max(1.0, layout.gpus / node.gpus)
    return Work(
        **_compute_terms(shape, layout, node),
        **_stage_terms(shape, layout, node, rates),
        **_tensor_terms(shape, layout, node, rates),
        **_data_terms(shape, layout, node, rates),
        log_nodes=math.log2(nodes),
    )


def _compute_terms(shape: DecoderShape, layout: Layout, node: GpuNode) -> dict[str, float]:
    tensor = layout.tensor
    tokens = layout.tokens
    local_tokens = tokens / tensor
    parts = _row_parts(layout)
    layer_node = node_of_products(node, layout.precision)
    routed = shape.expert_share
    inner = GATED_BYTES if shape.gated else PLAIN_BYTES
    columns = shape.ffn * (2 if shape.gated else 1)
    mlp = [
        product(tokens, columns / tensor, shape.hidden, layer_node, parts),
        product(tokens, shape.hidden, shape.ffn / tensor, layer_node),
    ]
    products = total([*_attention_products(shape, layout, layer_node, parts), total(mlp).times(1 - routed)])
    layer_bytes = (1 - routed) * local_tokens * inner * shape.ffn
    layer_bytes += local_tokens * QKV_BYTES * (shape.attention_width + shape.kv_state_width)
    layer_bytes += (local_tokens if layout.sequence_parallel else tokens) * NORM_AND_RESIDUAL_BYTES * shape.hidden
    experts = ExpertWork(ProductTime(0.0, 0.0), 0.0, 0.0, 0.0)
    if routed:
        experts = expert_work(shape, layout, node, layer_node, parts)
        products = total([products, experts.products.times(routed)])
        layer_bytes += routed * experts.moved_bytes
    products_s = products.seconds
    head = product(tokens, shape.vocabulary / tensor, shape.hidden, node, parts)
    # Forward 2 * tokens * sequence * (queries + values) / 2 by the causal mask, backward 2.5 times that.
    attention_flops = 3.5 * tokens * layout.sequence * (shape.attention_width + shape.value_width) / tensor
    if not layout.fused_attention:
        # The mask saves nothing, and the backward pass has twice the products of the forward one.
        again = 1.0 if layout.recompute == "selective" else 0.0
        products_s += (3 + again) * 4.0 * tokens * layout.sequence * shape.attention_width / tensor / node.peak_flops
        attention_flops = 0.0
        layer_bytes += tokens * layout.sequence * shape.heads / tensor * SCORE_BYTES * (1 + again / 3)
    held = held_parameters(shape, layout)
    layer_bytes += _cast_operands(shape, layout) * cast_bytes(layout.precision)
    context_s, context_is_wide = _group_seconds(
        tokens * layout.context * shape.kv_state_width / tensor * BF16, layout.context,
        max(1, min(layout.context, node.gpus // min(tensor, node.gpus))), node, tensor,
    )  # fmt: skip
    hbm = node.memory_bytes_s
    return {
        "layer_matmul_s": products_s,
        "layer_tile_s": products.tile_s,
        "layer_attention_s": attention_flops / node.peak_flops,
        "layer_memory_s": layer_bytes / hbm,
        "head_matmul_s": head.seconds,
        "head_tile_s": head.tile_s,
        "head_memory_s": local_tokens * shape.vocabulary * LOGIT_BYTES / hbm,
        "layer_exchange_s": routed * experts.exchange_s,
        "layer_wide_exchange_s": routed * experts.wide_exchange_s,
        "layer_context_s": CONTEXT_PASSES * context_s,
        "context_is_wide": float(context_is_wide),
        "layer_accumulate_s": (held.common + held.experts) * ACCUMULATE_BYTES / hbm,
        "head_accumulate_s": shape.embedding_parameters / tensor * ACCUMULATE_BYTES / hbm,
        "recompute_share": {"none": 0.0, "selective": 0.5 * layout.fused_attention, "full": 1.0}[layout.recompute],
        "head_width_ratio": min(shape.head_width, 128) / 128,
        "is_exposed": float(not layout.overlap),
        "hidden_ratio": shape.hidden / 4096,
    }


def _attention_products(
    shape: DecoderShape, layout: Layout, node: GpuNode, parts: tuple[float, ...]
) -> list[ProductTime]:
    tokens, tensor, latent = layout.tokens, layout.tensor, shape.latent
    result = product(tokens, shape.hidden, shape.value_width / tensor, node)
    if latent is None:
        columns = (shape.attention_width + 2 * shape.kv_width) / tensor
        return [product(tokens, columns, shape.hidden, node, parts), result]
    # Each rank compresses its own tokens.
    compressed = latent.query_rank + latent.key_rank + latent.rotary_width
    keys = shape.heads * (latent.plain_width + latent.value_width) / tensor
    return [
        product(tokens / tensor, compressed, shape.hidden, node),
        product(tokens, shape.attention_width / tensor, latent.query_rank, node),
        product(tokens, keys, latent.key_rank, node),
        result,
    ]


def _cast_operands(shape: DecoderShape, layout: Layout) -> float:
    """Return the numbers that a layer casts for one micro-batch: inputs and output gradients of its products, and its
    weights once a step."""
    local, routed, experts = layout.tokens / layout.tensor, shape.expert_share, shape.experts
    inner = shape.ffn * shape.mlp_matrices
    attention = 2 * shape.hidden + shape.attention_width + shape.kv_state_width + shape.value_width
    mlp = (1 - routed) * (inner + 2 * shape.hidden)
    if experts is not None:
        chosen = experts.active * layout.expert_imbalance
        mlp += routed * (shape.mlp_matrices * (chosen * experts.ffn + experts.shared_ffn))
        mlp += routed * 2 * shape.hidden * (chosen + bool(experts.shared_ffn))
    held = held_parameters(shape, layout)
    return local * (attention + mlp) + (held.common + held.experts) / layout.accumulation


def _stage_terms(shape: DecoderShape, layout: Layout, node: GpuNode, rates: CollectiveRates) -> dict[str, float]:
    counts = stage_layers(shape, layout)
    is_pipelined = layout.pipeline > 1
    loop = LOOPS[layout.software]
    message = layout.tokens * shape.hidden * BF16 / (1 if loop.sends_whole else layout.tensor)
    crosses = layout.gpus > node.gpus
    inside = node.nvlink_bytes_s * share_of_link(node, 2, layout.tensor * layout.data_degree)
    # Pipelines on the network of the later playbook runs, slower than usual, hold the host up in tensor parallelism.
    is_disturbed = rates.all_gather < DISTURBED_BELOW * usual_gather_rate(layout.gpus / node.gpus)
    return {
        "layers_first": counts[0],
        "layers_middle": max(counts[1:-1], default=0),
        "layers_last": counts[-1],
        "layers_total": shape.layers,
        "chunks": layout.chunks,
        "accumulation": layout.accumulation,
        "pipeline": layout.pipeline,
        "is_pipelined": float(is_pipelined),
        "stage_send_s": message / (node.nic_bytes_s if crosses else inside) if is_pipelined else 0.0,
        "stage_sends": 2.0 if is_pipelined else 0.0,
        "host_ratio": host_ratio(shape, layout),
        "is_host_contended": float(loop.holds_host and is_pipelined and layout.tensor > 1 and crosses and is_disturbed),
    }


def _tensor_terms(shape: DecoderShape, layout: Layout, node: GpuNode, rates: CollectiveRates) -> dict[str, float]:
    """Sequence parallelism gathers and scatters the hidden state twice a layer in each direction, and may gather its
    inputs again in the backward pass."""
    tensor = layout.tensor
    seconds, is_wide = _group_seconds(layout.tokens * shape.hidden * BF16, tensor, min(tensor, node.gpus), node)
    passes = LOOPS[layout.software].tensor_passes
    return {
        "tensor": tensor,
        "is_tensor": float(tensor > 1),
        "layer_tensor_s": seconds * passes,
        "head_tensor_s": seconds * passes / 2,
        "tensor_messages": passes if tensor > 1 else 0.0,
        "tensor_is_wide": float(is_wide),
        "tensor_rate_ratio": rates.all_gather / usual_gather_rate(layout.gpus / node.gpus) if is_wide else 1.0,
    }


def _data_terms(shape: DecoderShape, layout: Layout, node: GpuNode, rates: CollectiveRates) -> dict[str, float]:
    """Gradients, gathered parameters, shards and the optimizer, for the stage with the most parameters."""
    tensor, replicas = layout.tensor, layout.replicas * layout.context
    counts = stage_layers(shape, layout)
    held = held_parameters(shape, layout)
    layer_parameters = held.common
    largest = max(
        count * layer_parameters
        + (stage == len(counts) - 1) * shape.embedding_parameters / tensor
        + (stage == 0 and not (shape.tied and layout.pipeline == 1)) * shape.embedding_parameters / tensor
        for stage, count in enumerate(counts)
    )
    is_sharded = layout.shards > 1
    loop = LOOPS[layout.software]
    splits_optimizer = layout.zero == 1 or loop.splits_optimizer
    stride = tensor * layout.shards
    per_node = max(1, min(replicas, node.gpus // min(stride, node.gpus)))
    # A ZeRO 1 step scatters the gradients in fp32 and gathers bf16 weights; the others all_reduce (two passes).
    payload = largest / layout.shards * (BF16 if is_sharded else loop.gradient_bytes)
    sharers = layout.optimizer_shards or replicas
    # Where groups share the optimizer, gradients are summed over all replicas, and gathering stays in a group.
    in_groups = splits_optimizer and sharers < replicas
    passes = 1.0 if splits_optimizer and not is_sharded and not in_groups else 2.0
    reduce_s, is_wide = _group_seconds(payload * passes, replicas, per_node, node, stride)
    gathered = largest * BF16 if splits_optimizer and not is_sharded else 0.0
    gather_s, gather_is_wide = _group_seconds(gathered, sharers, min(per_node, sharers), node, stride)
    scatters = splits_optimizer and not in_groups
    usual = usual_gather_rate(layout.gpus / node.gpus) if scatters else USUAL_REDUCE_RATE
    ratio = 1.0
    if is_wide and not is_sharded:
        ratio = (rates.reduce_scatter if scatters else rates.all_reduce) / usual
        reduce_s = payload * passes * (replicas - 1) / replicas / usual
        if gather_is_wide:
            gather_s = gathered * (sharers - 1) / sharers / usual
    shard_s, shard_is_wide = _group_seconds(
        layer_parameters * BF16, layout.shards, max(1, min(layout.shards, node.gpus // min(tensor, node.gpus))), node,
        tensor,
    )  # fmt: skip
    pieces = expert_shards(layout)
    held_experts, copies = max(counts) * held.experts, expert_replicas(layout)
    copies_per_node = max(1, min(copies, node.gpus // min(layout.expert * pieces, node.gpus)))
    # Seconds for a byte of each parameter. The ring of an expert has fewer of a node's network ports than the others.
    ring_s, ring_is_wide = _group_seconds(held_experts / pieces, copies, copies_per_node, node, layout.expert * pieces)
    if ring_is_wide and not is_sharded:
        ring_s = held_experts * (copies - 1) / copies / usual * (per_node / copies_per_node)
    reduce_s += ring_s * passes * (BF16 if is_sharded else loop.gradient_bytes)
    gather_s += ring_s * BF16 if splits_optimizer and not is_sharded else 0.0
    shard_s += _group_seconds(
        held.experts * BF16, pieces, max(1, min(pieces, node.gpus // min(layout.expert, node.gpus))), node,
        layout.expert,
    )[0]  # fmt: skip
    tensors = max(counts) * 6.0 + 2.0
    is_data = replicas > 1
    own_parameters = largest / (layout.shards if is_sharded else sharers if splits_optimizer else 1)
    own_parameters += held_experts / (pieces if is_sharded else copies if splits_optimizer else 1)
    return {
        "reduce_s": reduce_s,
        "gather_s": gather_s,
        "reduce_is_wide": float(is_wide or ring_is_wide),
        "reduce_rate_ratio": ratio,
        "reduce_messages": math.ceil(largest * BF16 / BUCKET_BYTES) if is_data and not is_sharded else 0.0,
        "gather_messages": tensors if is_data and layout.zero else 0.0,
        "data_nodes": max(1.0, replicas / per_node) if is_wide else 1.0,
        "gather_is_wide": float(gather_is_wide),
        "gather_nodes": max(1.0, sharers / per_node) if gather_is_wide else 1.0,
        "data_node_share": per_node / node.gpus,
        "shard_layer_s": shard_s * (3.0 if layout.reshard_after_forward else 2.0),
        "shard_is_wide": float(shard_is_wide),
        "shard_messages": 3.0 if is_sharded else 0.0,
        "shard_log_nodes": math.log2(max(1.0, layout.gpus / node.gpus)) if is_sharded else 0.0,
        "optimizer_s": own_parameters * OPTIMIZER_BYTES / node.memory_bytes_s,
        "optimizer_tensors": tensors,
    }


def usual_gather_rate(nodes: float) -> float:
    """Return the bus rate in bytes a second of an all_gather over all GPUs of so many nodes on an undisturbed network:
    the runs' own measurements, 222 GB/s on 2 nodes, 123 on 16, 75 on 32, 44 on 64."""
    return USUAL_GATHER_RATE / (1.0 + nodes / 16.0)
