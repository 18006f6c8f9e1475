"""FLOPs, activations and moved bytes per layer of one forward and backward pass, on real or fake tensors."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hpcbench.strategies.layer_table import LOSS_ROW_NAME
from hpcbench.worker.model_execution import summed_loss

COMM_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of the operators that call collectives."""
_ATTENTION_PREFIX = "_scaled_dot_product"


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
        # Every position of the output (of the input, where it is transposed) meets every weight once.
        positions = inputs.shape if transposed else grad.shape
        return int(directions * 2 * positions[0] * math.prod(positions[2:]) * math.prod(weight.shape))
    name = str(func._schema.name).partition("::")[2]
    if name.startswith(_ATTENTION_PREFIX):
        return 2 * _attention_flops(*args[1:4]) if name.endswith("_backward") else _attention_flops(*args[:3])
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=out))


def attention_heads(func: Any, args: Sequence[Any]) -> int:
    """Heads of the queries in a call of fused attention, 0 for every other operation."""
    name = str(func._schema.name).partition("::")[2]
    return int(args[0].shape[1]) if name.startswith(_ATTENTION_PREFIX) and not name.endswith("_backward") else 0


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Queries times keys, then scores times values; a causal mask spares nothing here."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


@dataclass
class TracedLayer:
    """A row of the layer table, for a whole batch."""

    name: str
    module: nn.Module | None
    is_leaf: bool
    input_shape: list[int] = field(default_factory=list)
    output_shape: list[int] = field(default_factory=list)
    output_bytes: int = 0
    flops: list[int] = field(default_factory=lambda: [0, 0])
    """Forward, backward."""
    moved_bytes: list[int] = field(default_factory=lambda: [0, 0])
    activation_bytes: int = 0
    heads: int = 0
    """Heads of the attention that it computes."""

    def is_active(self) -> bool:
        """Whether it computed or kept anything."""
        return bool(sum(self.flops) or sum(self.moved_bytes) or self.activation_bytes)


class _TraceState:
    """Finds the row of an operation: in the forward pass that of the innermost running module, in the backward pass
    that of the module that made the node of autograd's graph, by the node's sequence number."""

    def __init__(self) -> None:
        self.rows: list[TracedLayer] = []
        """Rows in the order in which the modules returned."""
        self._running: list[TracedLayer] = []
        self._marks: list[tuple[int, TracedLayer]] = []
        """Pairs of a number and the row that the nodes of autograd's graph belong to from this number on."""
        self.is_backward = False

    def enter(self, row: TracedLayer) -> None:
        self._running.append(row)
        self._mark()

    def leave(self) -> None:
        self.rows.append(self._running.pop())
        self._mark()

    def enter_module(self, name: str, module: nn.Module, inputs: Any) -> None:
        # A checkpointed module runs again in the backward pass: that is no row of its own.
        if not self.is_backward:
            is_leaf = next(module.children(), None) is None
            self.enter(TracedLayer(name, module, is_leaf, input_shape=_first_shape(inputs)))

    def leave_module(self, _name: str, output: Any) -> None:
        if not self.is_backward:
            row = self._running[-1]
            row.output_shape = _first_shape(output)
            row.output_bytes = sum(tensor_bytes(tensor) for tensor in tensor_leaves(output))
            self.leave()

    def _mark(self) -> None:
        if self._running:
            self._marks.append((torch._C._autograd._get_sequence_nr(), self._running[-1]))

    def current_row(self) -> TracedLayer | None:
        """Return the row of the running operation; ``None`` where gradients are summed into a parameter."""
        if not self.is_backward:
            return self._running[-1] if self._running else None
        node = torch._C._current_autograd_node()
        if node is None or node.name() == "torch::autograd::AccumulateGrad":
            return None
        index = bisect_right(self._marks, node._sequence_nr(), key=lambda mark: mark[0]) - 1
        return self._marks[index][1] if index >= 0 else None

    def count_saved(self, _storage: int, size_bytes: int) -> None:
        if self._running:
            self._running[-1].activation_bytes += size_bytes


class _OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of both passes."""

    def __init__(self, trace: _TraceState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        row = self._trace.current_row()
        if row is not None:
            direction = int(self._trace.is_backward)
            row.flops[direction] += operation_flops(func, args, kwargs, out)
            row.heads = attention_heads(func, args) or row.heads
            row.moved_bytes[direction] += _moved_bytes(func, (args, kwargs), out)
        return out


def trace_layers(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[TracedLayer]:
    """Forward, loss and backward on a batch: the rows that computed or kept anything, and every call of a leaf."""
    trace = _TraceState()
    hooks = module_hooks(model, trace.enter_module, trace.leave_module)
    with hooks, counted_saved_tensors(model, trace.count_saved), _OperationCounter(trace):
        outputs = model(inputs)
        row = TracedLayer(LOSS_ROW_NAME, None, is_leaf=True, input_shape=list(outputs.shape))
        trace.enter(row)
        loss = summed_loss(outputs, targets) / len(targets)
        trace.leave()
        trace.is_backward = True
        torch.autograd.backward(loss)
    return trace.rows


@contextmanager
def counted_saved_tensors(module: nn.Module, count: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``count(storage, bytes)`` once for every storage that autograd saves: no parameters, no buffers."""
    counted = {storage_id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = storage_id(tensor)
        if storage not in counted:
            counted.add(storage)
            # While it is held nothing else gets its address.
            held.append(tensor)
            count(storage, tensor.untyped_storage().nbytes())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


@contextmanager
def module_hooks(
    model: nn.Module, enter: Callable[[str, nn.Module, Any], None], leave: Callable[[str, Any], None]
) -> Iterator[None]:
    """Call ``enter(name, module, inputs)`` before and ``leave(name, output)`` after every module of ``model``.

    ``inputs`` are the positional and the named arguments.
    """
    handles = []
    for name, module in model.named_modules():

        def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            enter(name, module, (args, kwargs))

        def after(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            leave(name, output)

        handles += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensor_leaves(values: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _first_shape(values: Any) -> list[int]:
    return next((list(tensor.shape) for tensor in tensor_leaves(values)), [])


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of the tensor's elements, whatever memory they share."""
    return tensor.numel() * tensor.element_size()


def storage_id(tensor: Tensor) -> int:
    """Return a number that all tensors on the same memory share while one of them exists."""
    return int(tensor.untyped_storage()._cdata)


def _moved_bytes(func: Any, arguments: Any, out: Any) -> int:
    """Return the bytes of inputs and outputs; none for views, allocations and queries."""
    if func.namespace == "prim" or "empty" in func._schema.name:
        return 0
    sources, results = tensor_leaves(arguments), tensor_leaves(out)
    if not func._schema.is_mutable:
        places = {storage_id(tensor) for tensor in sources}
        if any(storage_id(tensor) in places for tensor in results):
            return 0
    return sum(tensor_bytes(tensor) for tensor in (*sources, *results))
