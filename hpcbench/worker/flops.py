"""FLOPs of one operation of torch: two per multiply-add, as torch's FlopCounterMode counts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_ATTENTION = "_scaled_dot_product"


def operation_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one call; 0 for what is neither a convolution, a matrix product nor attention.

    Own formulas where torch's differ from what is computed: its backward of a grouped convolution counts every group
    with the channels of all, its fused attention for CPUs counts nothing, and the backward of fused attention counts
    the scores that are computed a second time, which is recomputation.
    """
    packet = getattr(func, "overloadpacket", None)
    if packet is torch.ops.aten.convolution_backward:
        grad, inputs, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        directions = int(wanted[0]) + int(wanted[1])
        return directions * _convolution(inputs.shape, weight.shape, grad.shape, transposed)
    name = str(func._schema.name).partition("::")[2]
    if name.startswith(_ATTENTION):
        return 2 * _attention(*args[1:4]) if name.endswith("_backward") else _attention(*args[:3])
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=out))


def attention_heads(func: Any, args: Sequence[Any]) -> int:
    """Heads of the queries in a call of fused attention, 0 for every other operation."""
    name = str(func._schema.name).partition("::")[2]
    return int(args[0].shape[1]) if name.startswith(_ATTENTION) and not name.endswith("_backward") else 0


def _convolution(inputs: Sequence[int], weight: Sequence[int], outputs: Sequence[int], transposed: bool) -> int:
    """Every position of the output (of the input, where it is transposed) meets every weight once."""
    positions = inputs if transposed else outputs
    return 2 * positions[0] * math.prod(positions[2:]) * math.prod(weight)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Queries times keys, then scores times values; a causal mask spares nothing here."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])
