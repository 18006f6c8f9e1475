"""Layers with a mixture of experts: who holds which expert, grouped products, and the exchange of tokens.

An expert group is ``layout.expert`` neighbours of a pipeline stage, of the tensor, context and data ranks; each
holds as many whole experts (expert tensor degree 1 of Megatron-Core; parallel folding, arXiv 2504.14960). Tokens are
sent to the ranks of their experts and back (all_to_all), in the forward and in the backward pass. Routing is taken as
balanced but for ``layout.expert_imbalance``, the tokens of the busiest rank over their mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcbench.predict.decoder.layout import GpuNode, Layout, share_of_link
from hpcbench.predict.decoder.products import ProductTime, product, total
from hpcbench.strategies.decoder_shapes import DecoderShape

_BF16 = 2
GATED_BYTES, PLAIN_BYTES = 34, 16
"""Bytes for each element of the MLP's inner state: activation, product, and their gradients."""
PERMUTE_BYTES = 30
"""Bytes for each element of a routed token's hidden state: sorted by rank before it is sent and by expert after, and
both again on the way back, forward and backward (a read and a write of 2 bytes each; the weighted sum reads more)."""
EXCHANGES = 4
"""Exchanges of tokens for a layer: to the experts and back, forward and backward."""
HOST_OF_EXPERTS, HOST_OF_EXPERT, HOST_OF_CAST_EXPERT = 2.0, 0.03, 0.18
"""Kernels of a layer with experts over those of another layer, about: router, sorting, exchanges; and for each expert
of a rank: its products, and in low precision the casts of its operands. The last one is that of one published run
(Qwen3 30B in MXFP8 on B200 with micro-batches of one sample, which waits for its host)."""


@dataclass(frozen=True)
class ExpertWork:
    """Work of a layer for one micro-batch, forward and backward: seconds at peak or at nominal rates, and bytes."""

    products: ProductTime
    moved_bytes: float
    exchange_s: float
    wide_exchange_s: float
    """Exchange between nodes; the one inside runs at the same time."""


def expert_work(
    shape: DecoderShape, layout: Layout, node: GpuNode, layer_node: GpuNode, parts: tuple[float, ...]
) -> ExpertWork:
    """Return the work of the experts of a layer; ``layer_node`` has the peak of the layers' precision.

    Args:
        parts: parts of the rows by which a product over the tensor group begins.
    """
    experts = shape.experts
    assert experts is not None, "a decoder with experts"
    tokens, local = layout.tokens, layout.tokens / layout.tensor
    routed = local * experts.active * layout.expert_imbalance
    own = experts.count // layout.expert
    # Fewer tokens than experts leave some without any.
    busy = max(1, min(own, round(routed)))
    columns = experts.ffn * (2 if shape.gated else 1)
    products = [
        product(local, experts.count, shape.hidden, node),
        product(routed / busy, columns, shape.hidden, layer_node, groups=busy),
        product(routed / busy, shape.hidden, experts.ffn, layer_node, groups=busy),
    ]
    inner = GATED_BYTES if shape.gated else PLAIN_BYTES
    moved = routed * (inner * experts.ffn + PERMUTE_BYTES * shape.hidden)
    if experts.shared_ffn:
        shared = experts.shared_ffn / layout.tensor
        shared_columns = shared * (2 if shape.gated else 1)
        products.append(product(tokens, shared_columns, shape.hidden, layer_node, parts))
        products.append(product(tokens, shape.hidden, shared, layer_node))
        moved += local * inner * experts.shared_ffn
    inside, between = _exchange_seconds(shape, layout, node, local)
    return ExpertWork(total(products), moved, inside, between)


def _exchange_seconds(shape: DecoderShape, layout: Layout, node: GpuNode, tokens: float) -> tuple[float, float]:
    """Return the seconds of all exchanges of a layer inside a node and between nodes.

    A token is sent once to each other node that has experts of it, and on to these experts inside of the node, as
    DeepEP and HybridEP do. Where each of ``n`` nodes is as likely, ``k`` experts are on ``n (1 - (1 - 1/n)^k)``.
    """
    assert shape.experts is not None, "a decoder with experts"
    group, active = layout.expert, shape.experts.active
    per_node = min(group, node.gpus)
    nodes = group / per_node
    others = (nodes - 1) * (1 - (1 - 1 / nodes) ** active)
    sent = EXCHANGES * tokens * layout.expert_imbalance * shape.hidden * _BF16
    inside = node.nvlink_bytes_s * share_of_link(node, per_node)
    return sent * active * (per_node - 1) / per_node / inside, sent * others / node.nic_bytes_s


def host_ratio(shape: DecoderShape, layout: Layout) -> float:
    """Return the seconds in which a host launches the mean layer over those of a layer without experts."""
    if shape.experts is None:
        return 1.0
    each = HOST_OF_EXPERT if layout.precision == "bf16" else HOST_OF_CAST_EXPERT
    routed = HOST_OF_EXPERTS + shape.experts.count / layout.expert * each
    return 1.0 + shape.expert_share * (routed - 1.0)


def expert_replicas(layout: Layout) -> int:
    """Return the number of ranks of a stage that hold the same experts, or the same shards of them."""
    return max(1, layout.gpus // layout.pipeline // layout.expert // expert_shards(layout))


def expert_shards(layout: Layout) -> int:
    """Return over how many ranks the parameters of an expert are sharded fully."""
    return max(1, layout.shards * layout.tensor * layout.context // layout.expert) if layout.shards > 1 else 1


@dataclass(frozen=True)
class HeldParameters:
    """Matrices of a rank's mean layer before they are sharded: those of all tokens, and those of its experts."""

    common: float
    experts: float


def held_parameters(shape: DecoderShape, layout: Layout, *, vectors: bool = False) -> HeldParameters:
    """Return the parameters that a rank holds of a mean layer; with ``vectors`` its norms and biases, too."""
    share = shape.expert_share
    dense = shape.layer_parameters if vectors else shape.layer_matmul_parameters
    routed = shape.routed_layer_parameters - (0 if vectors else shape.layer_vectors)
    common = (dense if not share else (1 - share) * dense + share * routed) / layout.tensor
    held = share * shape.experts.count * shape.expert_parameters / layout.expert if shape.experts is not None else 0.0
    return HeldParameters(common, held)
