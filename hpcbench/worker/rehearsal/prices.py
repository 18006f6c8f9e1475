"""How long an operator would take on the rehearsed device: by the oracle's words for what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

from hpcbench.parallel.alike import Alike
from hpcbench.parallel.kernel import BACKWARD, FORWARD, UPDATE, Compute, Kernel

_KINDS = (
    ("batch_norm", "BatchNorm2d"),
    ("layer_norm", "LayerNorm"),
    ("threshold", "ReLU"),
    ("relu", "ReLU"),
    ("gelu", "GELU"),
    ("silu", "SiLU"),
    ("max_pool2d", "MaxPool2d"),
    ("max_pool3d", "MaxPool3d"),
    ("adaptive_avg_pool", "AdaptiveAvgPool2d"),
    ("avg_pool", "AvgPool2d"),
    ("embedding", "Embedding"),
    ("dropout", "Dropout"),
)
"""Parts of operators' names and the layer whose computation they are."""

_FREE = frozenset({"new_empty", "new_empty_strided", "empty_like", "_unsafe_view", "_reshape_alias", "alias"})
"""Operators that touch no numbers."""

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


_NOTHING = Kernel("none", FORWARD, "fp32", 0.0, 0.0, 0.0, 0.0, 0.0)


class Work(NamedTuple):
    """A kernel of which an operator is a part."""

    kernel: Kernel
    share: float = 1.0


class Prices:
    """Of operators, on one device, in one precision."""

    def __init__(self, compute: Compute, precision: str, model: str) -> None:
        self._alike, self._precision = Alike.of(compute), precision
        self._factor = compute.factors.get(model, compute.factors.get("", 1.0))

    def seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        """Of one call that returns ``out``."""
        work = self._work(func, args, kwargs, out)
        return self._factor * work.share * self._alike.seconds(work.kernel)

    def _work(self, func: Any, args: Any, kwargs: Any, out: Any) -> Work:
        name = func.__name__.partition(".")[0]
        if name == "convolution":
            return Work(self._convolution(args, out, FORWARD, _flops(func, args, kwargs, out)))
        if name == "convolution_backward":
            # Its parts may be computed one without the other: the input's or the weight's gradient alone.
            gradient, x, weight, wanted = args[0], args[1], args[2], args[-1]
            parts = int(wanted[0]) + int(wanted[1])
            forward = float(conv_flop_count(x.shape, weight.shape, gradient.shape))
            kernel = self._convolution((x, weight), gradient, BACKWARD, 2 * forward)
            # The first layer's whole backward pass is one part.
            return Work(kernel, max(parts, 1) / 2)
        if name in _PRODUCTS:
            return self._product(args, out, _flops(func, args, kwargs, out))
        if name.startswith(("_foreach", "_fused")):
            tensors = sum(_bytes(one) for one in _tensors((args, kwargs)))
            return Work(self._kernel("sgd", UPDATE, 0.0, tensors, 0.0, 0.0, 0.0))
        if name in _FREE:
            return Work(_NOTHING)
        kind = next((kind for part, kind in _KINDS if part in name), "elementwise")
        given, made = (sum(_bytes(one) for one in _tensors(these)) for these in ((args, kwargs), out))
        direction = BACKWARD if _is_backward() else FORWARD
        flops = _flops(func, args, kwargs, out)
        return Work(self._kernel(kind, direction, flops, given + made, 0.0, given, made))

    def _convolution(self, args: Any, out: Any, direction: str, flops: float) -> Kernel:
        x, weight = args[0], args[1]
        given, made = _bytes(x), _bytes(out)
        passes = 2 if direction == BACKWARD else 1
        kind = f"Conv{x.dim() - 2}d"
        return self._kernel(kind, direction, flops, passes * (given + made), _bytes(weight), given, made)

    def _product(self, args: Any, out: Any, flops: float) -> Work:
        """In the backward pass one of two that are a layer's: the gradient of its input, or of its weight."""
        left, right = [one for one in args if isinstance(one, Tensor)][-2:]
        if not _is_backward():
            kernel = self._kernel("Linear", FORWARD, flops, _bytes(left) + _bytes(out), _bytes(right), _bytes(left), 0)
            return Work(kernel._replace(output_bytes=_bytes(out)))
        sizes = sorted([_bytes(left), _bytes(right), _bytes(out)])
        kernel = self._kernel("Linear", BACKWARD, 2 * flops, 2 * sum(sizes[:2]), sizes[2], sizes[0], sizes[1])
        return Work(kernel, 0.5)

    def _kernel(
        self, kind: str, direction: str, flops: float, moved: float, weight: float, given: float, made: float
    ) -> Kernel:
        return Kernel(kind, direction, self._precision, flops, moved, weight, given, made)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    packet = getattr(func, "overloadpacket", func)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    if "dot_product" in func.__name__:
        query, key, value = [one for one in args if isinstance(one, Tensor) and one.dim() == 4][-3:]
        products = 2.5 if _is_backward() else 1.0
        found = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
        return products * float(found)
    return 0.0


def _tensors(values: Any) -> Iterator[Tensor]:
    return (one for one in tree_leaves(values) if isinstance(one, Tensor) and one.is_floating_point())


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


def _is_backward() -> bool:
    return torch._C._current_autograd_node() is not None
