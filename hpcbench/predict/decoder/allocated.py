"""Memory that a rank's tensors hold: weights, gradients, optimizer, activations, and temporaries of the peak.

Bytes are counted tensor by tensor, as a caching allocator has handed them out (``max_memory_allocated``). Memory
that it reserves beyond them, the CUDA context and the buffers of communicators are not part of them. Activations of a
layer follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4, with rotary embeddings, gated MLPs, grouped keys and
fused attention added.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcbench.predict.decoder.layout import Layout, check_layout, stage_layers
from hpcbench.predict.decoder.software import LOOPS
from hpcbench.strategies.decoder_shapes import DecoderShape

HALF, FULL, MASK = 2, 4, 1
"""Bytes of a number in bf16 or fp16, in fp32, and of a dropout mask's."""
LOGIT_BYTES = HALF + FULL
"""Bytes of a logit at the peak: its value, and the softmax in fp32 that becomes the gradient in place."""


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


def allocated_memory(shape: DecoderShape, layout: Layout) -> list[AllocatedMemory]:
    """Return the memory of every pipeline rank, first to last.

    Raises ConfigError where the shape cannot be divided so.
    """
    check_layout(shape, layout)
    counts = stage_layers(shape, layout)
    return [_rank_memory(shape, layout, stage, layers) for stage, layers in enumerate(counts)]


def _rank_memory(shape: DecoderShape, layout: Layout, stage: int, layers: int) -> AllocatedMemory:
    loop = LOOPS[layout.software]
    is_last = stage == layout.pipeline - 1
    parameters = _stage_parameters(shape, layout, stage, layers) / layout.shards
    everyone = layout.replicas * layout.context
    sharers = (layout.optimizer_shards or everyone) if layout.zero or loop.splits_optimizer else 1
    kept = kept_bytes_of_layer(shape, layout)
    working = working_bytes_of_layer(shape, layout)
    if is_last:
        working = max(working, _tokens(layout) * shape.vocabulary / layout.tensor * LOGIT_BYTES)
    if layout.shards > 1:
        # The layer that runs and the one that is gathered, and the gradients of one.
        working += 3 * HALF * shape.layer_parameters / layout.tensor
    activations = layers * kept * in_flight(layout, stage)
    if is_last:
        # The last norm keeps its input and its output.
        activations += 2 * _norm_tokens(layout) * shape.hidden * HALF * in_flight(layout, stage)
    return AllocatedMemory(
        weights=loop.weight_bytes * parameters,
        gradients=loop.kept_gradient_bytes * parameters,
        optimizer=loop.optimizer_bytes * parameters / sharers,
        activations=activations,
        working=working,
    )


def _stage_parameters(shape: DecoderShape, layout: Layout, stage: int, layers: int) -> float:
    """Parameters of a rank before they are sharded: a tied embedding is on the first and on the last stage."""
    is_last = stage == layout.pipeline - 1
    embeddings = (stage == 0) + (is_last and not (shape.tied and layout.pipeline == 1))
    positions = shape.learned_positions * shape.hidden if stage == 0 else 0
    return (layers * shape.layer_parameters + embeddings * shape.embedding_parameters) / layout.tensor + positions


def in_flight(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage keeps, counted by all its layers.

    1F1B keeps ``p - s`` of them. Interleaving keeps ``2 (p - s - 1) + (v - 1) p + 1`` of its ``v`` chunks (Narayanan et
    al. 2021, arXiv 2104.04473, section 2.2).
    """
    if layout.chunks == 1:
        return min(layout.accumulation, layout.pipeline - stage)
    warm = 2 * (layout.pipeline - stage - 1) + (layout.chunks - 1) * layout.pipeline + 1
    return min(layout.accumulation * layout.chunks, warm) / layout.chunks


def kept_bytes_of_layer(shape: DecoderShape, layout: Layout) -> float:
    """Bytes that a layer keeps for the backward pass of one micro-batch; its input alone if all is recomputed."""
    if layout.recompute == "full":
        return _norm_tokens(layout) * shape.hidden * HALF
    return _layer_bytes(shape, layout)


def _layer_bytes(shape: DecoderShape, layout: Layout) -> float:
    own, split = _norm_tokens(layout), _tokens(layout) / layout.tensor
    gathered = _tokens(layout) if layout.tensor > 1 and not layout.recompute_gathers else own
    is_rotary = shape.learned_positions == 0 and layout.fused_attention
    # Two norms keep their inputs; the products behind them keep their outputs.
    norms = 2 * shape.hidden * HALF * (own + gathered)
    # Queries, keys and values, rotated copies of the first two, and the attention's result.
    attention = HALF * (shape.hidden + 2 * shape.kv_width + shape.hidden) * split
    attention += HALF * (shape.hidden + shape.kv_width) * split * is_rotary
    if layout.fused_attention:
        # The logarithm of the sum of each row's exponents.
        attention += FULL * shape.heads * split
    else:
        masks = MASK * shape.hidden * 2 * own
        # Selective recomputation drops the softmax, its dropout's mask and result.
        scores = 0.0 if layout.recompute == "selective" else shape.heads * layout.sequence * split
        attention += masks + (2 * HALF + MASK) * scores
    # The outputs of the first products and of the activation.
    mlp = HALF * shape.ffn * (3 if shape.gated else 2) * split
    return norms + attention + mlp


def working_bytes_of_layer(shape: DecoderShape, layout: Layout) -> float:
    """Bytes beside the kept ones while a layer's backward pass runs."""
    own, split = _norm_tokens(layout), _tokens(layout) / layout.tensor
    # Gradients of the MLP's inner state and of the hidden state, gathered over the tensor group where it is split.
    inner = HALF * shape.ffn * (3 if shape.gated else 2) * split
    hidden = HALF * shape.hidden * (own + 2 * (_tokens(layout) if layout.tensor > 1 else own))
    again = _layer_bytes(shape, layout) if layout.recompute == "full" else 0.0
    return again + inner + hidden


def _tokens(layout: Layout) -> float:
    """Tokens of a micro-batch on one rank before tensor parallelism."""
    return layout.micro_batch * layout.sequence / layout.context


def _norm_tokens(layout: Layout) -> float:
    """Tokens that a rank normalises."""
    return _tokens(layout) / (layout.tensor if layout.sequence_parallel else 1)
