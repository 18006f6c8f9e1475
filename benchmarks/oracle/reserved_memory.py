"""Memory that nanotron's allocator reserves: terms of weights, gradients, optimizer state, activations and buffers.

Their factors are fitted to the playbook's runs (``reserved_memory.json``). hpcbench itself counts the tensors of a
program instead, as ``hpcbench.predict.decoder.allocated`` does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.predict.decoder.layout import Layout, check_layout, stage_layers
from hpcbench.strategies.decoder_shapes import DecoderShape

GIB = 2.0**30
KEPT_BY_RECOMPUTATION = 0.05


@dataclass(frozen=True)
class MemoryTerms:
    """GiB of one pipeline rank before their fitted factors, or the factors themselves.

    ``weights``: parameters in bf16 and gradients in fp32; ``optimizer``: master weights and two moments in fp32 on this
    rank; ``gradients``: in bf16; ``buckets``, ``sharding``, ``accumulation``: the same size where the layout has data
    parallelism, ZeRO 1, several micro-batches. ``held_*``: activations kept until their backward pass. ``pass_*``:
    buffers of the layer that runs. ``logits``: one copy in bf16.
    """

    weights: float
    optimizer: float
    gradients: float
    buckets: float
    sharding: float
    accumulation: float
    held_hidden: float
    held_ffn: float
    held_gathered: float
    held_gathered_recomputed: float
    held_stage: float
    held_stage_local: float
    pass_gathered: float
    pass_hidden: float
    pass_ffn: float
    logits: float
    embedding: float
    layer: float
    constant: float


TERM_NAMES = tuple(field.name for field in fields(MemoryTerms))


def stage_memory_terms(shape: DecoderShape, layout: Layout, *, ends_only: bool = False) -> list[MemoryTerms]:
    """Return the terms of every pipeline rank, first to last; of the first and the last alone with ``ends_only``.

    Stage ``s`` of ``p`` keeps the activations of ``p - s`` micro-batches (1F1B). Raises ConfigError where the shape
    cannot be divided so.
    """
    check_layout(shape, layout)
    tensor, stages = layout.tensor, layout.pipeline
    tokens = layout.micro_batch * layout.sequence / layout.context
    split = 1.0 if tensor > 1 else 0.0
    hidden, ffn = tokens * shape.hidden * 2 / GIB, tokens * shape.ffn * 2 / GIB
    embedding = shape.embedding_parameters / tensor
    terms = []
    for stage, layers in enumerate(stage_layers(shape, layout)):
        if ends_only and 0 < stage < stages - 1:
            continue
        is_last = stage == stages - 1
        heads = 1.0 if is_last and not (shape.tied and stages == 1) else 0.0
        parameters = layers * shape.layer_parameters / tensor + embedding * ((1.0 if stage == 0 else 0.0) + heads)
        half = parameters * 2 / GIB / layout.shards
        in_flight = float(min(layout.accumulation, stages - stage))
        # Full recomputation keeps the input of a layer alone.
        held = layers * in_flight * (KEPT_BY_RECOMPUTATION if layout.recompute == "full" else 1.0)
        keeps_gathered = split * (0.0 if layout.recompute_gathers else 1.0)
        terms.append(
            MemoryTerms(
                weights=half * 3,
                optimizer=half * 6 / (layout.replicas if layout.zero else 1),
                gradients=half,
                buckets=half if layout.replicas > 1 else 0.0,
                sharding=half if layout.zero and layout.replicas > 1 else 0.0,
                accumulation=half if layout.accumulation > 1 else 0.0,
                held_hidden=held * hidden / tensor,
                held_ffn=held * ffn / tensor,
                held_gathered=held * hidden * keeps_gathered,
                held_gathered_recomputed=held * hidden * (split - keeps_gathered),
                held_stage=in_flight * hidden * split,
                held_stage_local=in_flight * hidden / tensor,
                pass_gathered=hidden * split,
                pass_hidden=hidden / tensor,
                pass_ffn=ffn / tensor,
                logits=tokens * shape.vocabulary / tensor * 2 / GIB if is_last else 0.0,
                embedding=embedding * 4 / GIB,
                layer=shape.layer_parameters / tensor * 4 / GIB,
                constant=1.0,
            )
        )
    return terms


FACTORS = Path(__file__).parent / "reserved_memory.json"


class ReservedMemory(msgspec.Struct, frozen=True):
    """The fitted factors, and the reserved memory up to which runs fit into 80 GB."""

    factors: MemoryTerms
    fits_below_gib: float


def reserved_memory() -> ReservedMemory:
    """Return the committed fit."""
    return msgspec.json.decode(FACTORS.read_bytes(), type=ReservedMemory)


def reserved_gib(terms: MemoryTerms, factors: MemoryTerms) -> float:
    """Return the GiB that one rank reserves."""
    total: Any = 0.0
    for name in TERM_NAMES:
        total = total + getattr(terms, name) * getattr(factors, name)
    return float(total)
