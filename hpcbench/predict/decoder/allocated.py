"""Memory that a rank's tensors hold: weights, gradients, optimizer, activations, and temporaries of the peak.

Bytes are counted tensor by tensor, as a caching allocator has handed them out (``max_memory_allocated``).
``occupied_bytes`` adds the allocator's reserve beyond them, and the memory of a process outside of it.

Activations of a layer follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4, with rotary embeddings, gated MLPs,
grouped keys and fused attention added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hpcbench.predict.decoder.experts import HeldParameters, expert_replicas, expert_shards, held_parameters
from hpcbench.predict.decoder.layout import Layout, check_layout, stage_layers
from hpcbench.predict.decoder.low_precision import copied_weight_bytes, operand_bytes
from hpcbench.predict.decoder.software import LOOPS
from hpcbench.strategies.decoder_shapes import DecoderShape

GIB = 2.0**30
HALF, FULL, MASK = 2, 4, 1
"""Bytes of a number in bf16 or fp16, in fp32, and of a dropout mask's."""
LOGIT_BYTES = HALF + FULL
"""Bytes of a logit at the peak: its value, and the softmax in fp32 that becomes the gradient in place."""

RESERVED_SHARE = 1.05
"""Bytes that an allocator reserves for each byte that tensors hold, about."""
CONTEXT_BYTES, COMMUNICATOR_BYTES = 2**29, 2**28
"""Bytes of a CUDA context with its modules, and of NCCL's buffers for a group of ranks, about."""
SAFE_SHARE = 0.9
"""Share of a device's memory above which an allocator may have to free its cache and wait: a published run of 80
billion parameters took three times its time so."""


@dataclass(frozen=True)
class AllocatedMemory:
    """Bytes of one pipeline rank at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept by all micro-batches in flight until their backward pass."""
    working: float
    """Temporaries of the layer or the loss that runs: recomputed activations, gradients, gathered weights, logits."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


def allocated_memory(shape: DecoderShape, layout: Layout, *, ends_only: bool = False) -> list[AllocatedMemory]:
    """Return the memory of every pipeline rank, first to last; of the first and the last alone with ``ends_only``.

    Raises ConfigError where the shape cannot be divided so.
    """
    check_layout(shape, layout)
    last, of_layer = layout.pipeline - 1, _of_layer(shape, layout)
    return [
        _rank_memory(shape, layout, stage, layers, of_layer)
        for stage, layers in enumerate(stage_layers(shape, layout))
        if not ends_only or stage in (0, last)
    ]


def occupied_bytes(allocated: float, layout: Layout) -> float:
    """Return the bytes of a device that a process occupies whose tensors hold ``allocated``: as nvidia-smi shows it."""
    degrees = (layout.data_degree, layout.tensor, layout.pipeline, layout.context, layout.expert)
    groups = sum(degree > 1 for degree in degrees)
    return allocated * RESERVED_SHARE + CONTEXT_BYTES + groups * COMMUNICATOR_BYTES


class _LayerMemory(NamedTuple):
    """Parameters of a rank's mean layer, and bytes of its activations: those kept for the backward pass of one
    micro-batch (the layer's input alone if all is recomputed), and those while that pass runs."""

    held: HeldParameters
    kept: float
    working: float


def _of_layer(shape: DecoderShape, layout: Layout) -> _LayerMemory:
    whole = _layer_bytes(shape, layout)
    return _LayerMemory(
        held_parameters(shape, layout, vectors=True),
        _norm_tokens(layout) * shape.hidden * HALF if layout.recompute == "full" else whole,
        working_bytes_of_layer(shape, layout, whole),
    )


def _rank_memory(
    shape: DecoderShape, layout: Layout, stage: int, layers: int, of_layer: _LayerMemory
) -> AllocatedMemory:
    loop = LOOPS[layout.software]
    is_last = stage == layout.pipeline - 1
    held, kept, working = of_layer
    common = _common_parameters(shape, layout, stage, layers * held.common) / layout.shards
    pieces = expert_shards(layout)
    experts = layers * held.experts / pieces
    everyone, copies = layout.replicas * layout.context, expert_replicas(layout)
    is_shared = layout.zero or loop.splits_optimizer
    sharers = (layout.optimizer_shards or everyone) if is_shared else 1
    if is_last:
        working = max(working, layout.tokens * shape.vocabulary / layout.tensor * LOGIT_BYTES)
    if layout.shards > 1:
        # The layer that runs and the one that is gathered, and the gradients of one.
        working += 3 * HALF * (held.common + held.experts)
    activations = layers * kept * in_flight(layout, stage)
    if is_last:
        # The last norm keeps its input and its output.
        activations += 2 * _norm_tokens(layout) * shape.hidden * HALF * in_flight(layout, stage)
    copied = copied_weight_bytes(layout.precision) * layers * (held.common / layout.shards + held.experts / pieces)
    return AllocatedMemory(
        weights=loop.weight_bytes * (common + experts) + copied,
        gradients=loop.kept_gradient_bytes * (common + experts),
        optimizer=loop.optimizer_bytes * (common / sharers + experts / (copies if is_shared else 1)),
        activations=activations,
        working=working,
    )


def _common_parameters(shape: DecoderShape, layout: Layout, stage: int, of_layers: float) -> float:
    """Parameters of a rank but its experts before they are sharded: a tied embedding is on the first and on the last
    stage."""
    is_last = stage == layout.pipeline - 1
    embeddings = (stage == 0) + (is_last and not (shape.tied and layout.pipeline == 1))
    positions = shape.learned_positions * shape.hidden if stage == 0 else 0
    return of_layers + embeddings * shape.embedding_parameters / layout.tensor + positions


def in_flight(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage keeps, counted by all its layers.

    1F1B keeps ``p - s`` of them. Interleaving keeps ``2 (p - s - 1) + (v - 1) p + 1`` of its ``v`` chunks (Narayanan et
    al. 2021, arXiv 2104.04473, section 2.2).
    """
    if layout.chunks == 1:
        return min(layout.accumulation, layout.pipeline - stage)
    warm = 2 * (layout.pipeline - stage - 1) + (layout.chunks - 1) * layout.pipeline + 1
    return min(layout.accumulation * layout.chunks, warm) / layout.chunks


def _layer_bytes(shape: DecoderShape, layout: Layout) -> float:
    own, split = _norm_tokens(layout), layout.tokens / layout.tensor
    gathered = layout.tokens if layout.tensor > 1 and not layout.recompute_gathers else own
    is_rotary = shape.learned_positions == 0 and layout.fused_attention
    operand = operand_bytes(layout.precision)
    # Two norms keep their inputs; the products behind them keep their outputs.
    norms = 2 * shape.hidden * (HALF * own + operand * gathered)
    # Queries, keys and values, rotated copies of the first two, and the attention's result.
    attention = HALF * (shape.attention_width + shape.kv_state_width + shape.value_width) * split
    attention += HALF * (shape.attention_width + shape.kv_width) * split * (is_rotary and shape.latent is None)
    if layout.precision != "bf16":
        attention += operand * shape.value_width * split
    if shape.latent is not None:
        # Both compressed states before and after their norms.
        attention += 2 * HALF * (shape.latent.query_rank + shape.latent.key_rank) * split
    if layout.fused_attention:
        # The logarithm of the sum of each row's exponents.
        attention += FULL * shape.heads * split
    else:
        masks = MASK * shape.hidden * 2 * own
        # Selective recomputation drops the softmax, its dropout's mask and result.
        scores = 0.0 if layout.recompute == "selective" else shape.heads * layout.sequence * split
        attention += masks + (2 * HALF + MASK) * scores
    return norms + attention + _inner_values(shape, layout, operand)


def _inner_values(shape: DecoderShape, layout: Layout, operand: float) -> float:
    """Bytes of a mean layer's MLP or experts: the outputs of the first products in bf16, and of the activation.

    A routed token has its hidden state beside them, sorted by expert, and its router's probabilities.
    """
    split, experts = layout.tokens / layout.tensor, shape.experts
    of_element = HALF * (shape.mlp_matrices - 1) + operand
    dense = of_element * shape.ffn * split
    if experts is None:
        return dense
    routed, share = split * experts.active * layout.expert_imbalance, shape.expert_share
    inside = routed * (of_element * experts.ffn + operand * shape.hidden) + split * experts.count * FULL
    return (1 - share) * dense + share * (inside + of_element * experts.shared_ffn * split)


def working_bytes_of_layer(shape: DecoderShape, layout: Layout, whole: float) -> float:
    """Bytes beside the kept ones while a layer's backward pass runs."""
    own = _norm_tokens(layout)
    # Gradients of the MLP's inner state and of the hidden state, gathered over the tensor group where it is split.
    inner = _inner_values(shape, layout, HALF)
    hidden = HALF * shape.hidden * (own + 2 * (layout.tokens if layout.tensor > 1 else own))
    again = whole if layout.recompute == "full" else 0.0
    return again + inner + hidden


def _norm_tokens(layout: Layout) -> float:
    """Tokens that a rank normalises."""
    return layout.tokens / (layout.tensor if layout.sequence_parallel else 1)
