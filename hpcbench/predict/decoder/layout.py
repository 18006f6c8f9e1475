"""Nodes of GPUs, and the layout of a training step over them: degrees, shards, micro-batches, recomputation, stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from hpcbench.config.command import LayerPrecision, Recompute, Software
from hpcbench.errors import ConfigError
from hpcbench.predict.decoder.software import LOOPS
from hpcbench.strategies.decoder_shapes import DecoderShape


@dataclass(frozen=True, kw_only=True)
class GpuNode:
    """One node by its vendor's figures: rates in units a second, of one GPU.

    ``nvlink_bytes_s`` and ``nic_bytes_s`` are one direction. ``memory_gib`` is the memory that a process can reserve.
    ``best_product`` is the share of the peak that no large matrix product exceeds: 267.9 of an A100's 312 TFLOP/s were
    the best of a search over shapes. ``is_shared``: devices have no links of their own (PCIe without NVLink), so that
    groups that send at once share the rate, and a group over both halves of the node crosses its two sockets.
    ``fp8_flops`` and ``fp4_flops`` are peaks in 8 and 4 bit, 0 where the device has none.
    """

    name: str
    gpus: int
    peak_flops: float
    memory_bytes_s: float
    memory_gib: float
    multiprocessors: int
    nvlink_bytes_s: float
    nic_bytes_s: float
    best_product: float = 0.86
    is_shared: bool = False
    fp8_flops: float = 0.0
    fp4_flops: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CollectiveRates:
    """Bus rates in bytes a second of collectives over all GPUs of a job."""

    all_reduce: float
    all_gather: float
    reduce_scatter: float


def nominal_rates(node: GpuNode, gpus: int) -> CollectiveRates:
    """Return rates for a job that did not measure its own."""
    rate = node.nvlink_bytes_s * 0.58
    if gpus > node.gpus:
        rate = min(rate, node.nic_bytes_s * node.gpus / 2)
    return CollectiveRates(all_reduce=rate, all_gather=rate, reduce_scatter=rate)


SOFTWARE: tuple[Software, ...] = get_args(Software)
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
PRECISIONS: tuple[LayerPrecision, ...] = get_args(LayerPrecision)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A step's degrees and batch.

    ``replicas`` is the data parallel degree without shards, ``shards`` that of fully sharded parameters, ``zero`` the
    ZeRO stage 0 or 1 over replicas. ``micro_batch`` counts samples of one replica and micro-batch.
    ``recompute_gathers``: sequence parallelism gathers its input again in the backward pass instead of keeping it.
    ``fused_attention``: scores stay inside a kernel, as flash attention keeps them; else they are stored.
    ``overlap``: messages are sent while kernels compute; else kernels wait for them. ``optimizer_shards``: replicas
    that share the optimizer state under ZeRO 1, 0 for all of them. ``sequence_parallel``: ranks of a tensor group
    normalise their own tokens, else each all of them. ``expert`` is the degree of expert parallelism, over neighbours
    of a stage; ``expert_imbalance`` the tokens of its busiest rank over their mean.
    """

    gpus: int
    sequence: int
    micro_batch: int
    global_batch: int
    replicas: int = 1
    shards: int = 1
    zero: int = 0
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    chunks: int = 1
    reshard_after_forward: bool = True
    recompute: Recompute = "none"
    compiled: bool = False
    recompute_gathers: bool = True
    fused_attention: bool = True
    overlap: bool = True
    optimizer_shards: int = 0
    sequence_parallel: bool = True
    expert: int = 1
    expert_imbalance: float = 1.0
    precision: LayerPrecision = "bf16"
    software: Software = "nanotron"

    def __post_init__(self) -> None:
        for name in (
            "gpus", "sequence", "micro_batch", "global_batch", "replicas", "shards", "tensor", "pipeline", "context",
            "expert", "expert_imbalance",
        ):  # fmt: skip
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, at least 1 is required", where="layout")
        if self.zero not in {0, 1}:
            raise ConfigError(f"ZeRO stage {self.zero} cannot be priced", where="layout", hint="valid: 0, 1, or shards")
        for name, value, valid in (
            ("recompute", self.recompute, RECOMPUTE),
            ("software", self.software, SOFTWARE),
            ("precision", self.precision, PRECISIONS),
        ):
            if value not in valid:
                raise ConfigError(
                    f"{name} {value!r} cannot be priced", where="layout", hint="valid: " + ", ".join(valid)
                )
        degrees = self.replicas * self.shards * self.tensor * self.pipeline * self.context
        if degrees != self.gpus:
            raise ConfigError(
                f"the degrees multiply to {degrees}, but there are {self.gpus} GPUs",
                where="layout",
                hint="replicas * shards * tensor * pipeline * context must equal gpus",
            )
        if self.optimizer_shards and self.replicas * self.context % self.optimizer_shards:
            raise ConfigError(
                f"groups of {self.optimizer_shards} replicas that share the optimizer do not divide "
                f"{self.replicas * self.context} replicas",
                where="layout",
            )
        if self.global_batch % (self.data_degree * self.micro_batch):
            raise ConfigError(
                f"global batch {self.global_batch} is not a multiple of {self.data_degree} replicas times micro-batch "
                f"{self.micro_batch}",
                where="layout",
            )

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank before tensor parallelism."""
        return self.micro_batch * self.sequence // self.context

    @property
    def data_degree(self) -> int:
        return self.replicas * self.shards

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.global_batch // (self.data_degree * self.micro_batch)


BETWEEN_SOCKETS = 0.65
"""Rate of a PCIe group over both sockets relative to one inside a socket: measured on a node of 8 A100 PCIe, 0.61 for
an all_reduce of all devices, 0.75 for groups of 2 and 4."""


def share_of_link(node: GpuNode, group: int, stride: int = 1) -> float:
    """Return the part of a device's rate inside its node that a group has; ``stride`` groups send at the same time."""
    if not node.is_shared:
        return 1.0
    # Ranks farther apart than half of the node are on both of its sockets.
    return (BETWEEN_SOCKETS if 2 * group * stride > node.gpus else 1.0) / stride


def check_layout(shape: DecoderShape, layout: Layout) -> None:
    """Raise ConfigError where the shape cannot be divided by the layout's degrees."""
    experts, ranks = 0 if shape.experts is None else shape.experts.count, layout.gpus // layout.pipeline
    if layout.expert > 1 and (not experts or experts % layout.expert or ranks % layout.expert):
        reason = f"{experts} experts and {ranks} ranks of a stage" if experts else "a decoder without experts"
        raise ConfigError(f"{reason} cannot be divided by expert degree {layout.expert}", where=f"model {shape.name}")
    if layout.sequence % layout.context:
        raise ConfigError(
            f"{layout.sequence} tokens cannot be divided by context degree {layout.context}",
            where=f"model {shape.name}",
        )
    # Recipes with interleaving count the embedding and the loss as a layer each.
    if layout.pipeline * layout.chunks > shape.layers + 2 and not LOOPS[layout.software].balances_products:
        raise ConfigError(
            f"{layout.pipeline * layout.chunks} stages for {shape.layers} layers", where=f"model {shape.name}"
        )
    if shape.heads % layout.tensor:
        raise ConfigError(
            f"{shape.heads} heads cannot be divided by tensor degree {layout.tensor}", where=f"model {shape.name}"
        )


def stage_layers(shape: DecoderShape, layout: Layout) -> list[int]:
    """Return the number of decoder layers of each pipeline rank.

    nanotron balances the multiplications of layers and of the output head by thresholds (its ``build_model``); a stage
    ends with the layer that reaches its threshold, and the head is on the last rank. The others divide the layers
    evenly.
    """
    stages = layout.pipeline
    if not LOOPS[layout.software].balances_products:
        return [shape.layers // stages + (1 if stage < shape.layers % stages else 0) for stage in range(stages)]
    layer_cost = 4 * shape.hidden * shape.hidden + 3 * shape.hidden * shape.ffn
    total = shape.layers * layer_cost + shape.embedding_parameters
    counts = [0] * stages
    stage = 0
    for layer in range(shape.layers):
        counts[stage] += 1
        if (layer + 1) * layer_cost * stages >= total * (stage + 1):
            stage = min(stage + 1, stages - 1)
    return counts
