"""One forward and backward pass, watched: which layer computes, keeps and moves how much. Real tensors or fake ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcbench.parallel.layers import LOSS
from hpcbench.worker.flops import attention_heads, operation_flops
from hpcbench.worker.losses import sample_losses


@dataclass
class Traced:
    """One row, for a whole batch."""

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
    """Of the attention that it computes."""

    def does_something(self) -> bool:
        """Whether it computed or kept anything."""
        return bool(sum(self.flops) or sum(self.moved_bytes) or self.activation_bytes)


class _Mark(NamedTuple):
    """From this number on, the nodes of autograd's graph belong to this row."""

    sequence: int
    row: Traced


class _Trace:
    """Whose operation this is: in the forward pass the innermost module that runs, in the backward pass that of the
    node of autograd's graph, whose sequence number tells when it was made."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: list[Traced] = []
        """In the order in which the modules returned."""
        self._running: list[Traced] = []
        self._marks: list[_Mark] = []
        self.is_backward = False
        self._kept: list[Tensor] = []
        own = [*model.parameters(), *model.buffers()]
        self._not_counted = {_storage(tensor) for tensor in own}

    def enter(self, row: Traced) -> None:
        self._running.append(row)
        self._mark()

    def leave(self) -> None:
        self.rows.append(self._running.pop())
        self._mark()

    def _mark(self) -> None:
        if self._running:
            self._marks.append(_Mark(torch._C._autograd._get_sequence_nr(), self._running[-1]))

    def row(self) -> Traced | None:
        """Whose operation the one under way is; ``None`` where gradients are summed into a parameter."""
        if not self.is_backward:
            return self._running[-1] if self._running else None
        node = torch._C._current_autograd_node()
        if node is None or node.name() == "torch::autograd::AccumulateGrad":
            return None
        place = bisect_right(self._marks, node._sequence_nr(), key=lambda mark: mark.sequence) - 1
        return self._marks[place].row if place >= 0 else None

    def keep(self, tensor: Tensor) -> Tensor:
        """What autograd calls for every tensor that it saves."""
        storage = _storage(tensor)
        if self._running and storage not in self._not_counted:
            self._not_counted.add(storage)
            # While it is held nothing else gets its address.
            self._kept.append(tensor)
            self._running[-1].activation_bytes += tensor.untyped_storage().nbytes()
        return tensor


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of both passes."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        row = self._trace.row()
        if row is not None:
            direction = int(self._trace.is_backward)
            row.flops[direction] += operation_flops(func, args, kwargs, out)
            row.heads = attention_heads(func, args) or row.heads
            row.moved_bytes[direction] += _moved_bytes(func, (args, kwargs), out)
        return out


def trace(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Traced]:
    """Forward, loss and backward on a batch: the rows that computed or kept anything, and every call of a leaf."""
    seen = _Trace(model)
    with _hooks(model, seen), saved_tensors_hooks(seen.keep, lambda tensor: tensor), _Watch(seen):
        outputs = model(inputs)
        row = Traced(LOSS, None, is_leaf=True, input_shape=list(outputs.shape))
        seen.enter(row)
        loss = sample_losses(outputs, targets) / len(targets)
        seen.leave()
        seen.is_backward = True
        torch.autograd.backward(loss)
    return seen.rows


@contextmanager
def _hooks(model: nn.Module, seen: _Trace) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        is_leaf = next(module.children(), None) is None
        handles += [
            module.register_forward_pre_hook(_before(name, is_leaf, seen), with_kwargs=True),
            module.register_forward_hook(_after(seen)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(name: str, is_leaf: bool, seen: _Trace) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        # A checkpointed module runs again in the backward pass: that is no row of its own.
        if not seen.is_backward:
            shape = _first_shape((args, kwargs))
            seen.enter(Traced(name, module, is_leaf, input_shape=shape))

    return hook


def _after(seen: _Trace) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        if not seen.is_backward:
            row = seen._running[-1]
            row.output_shape = _first_shape(output)
            row.output_bytes = sum(_bytes(tensor) for tensor in _tensors(output))
            seen.leave()

    return hook


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _first_shape(values: Any) -> list[int]:
    return next((list(tensor.shape) for tensor in _tensors(values)), [])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _moved_bytes(func: Any, given: Any, out: Any) -> int:
    """What goes in and comes out; nothing for a view, for memory that is only taken, or for a question."""
    if func.namespace == "prim" or "empty" in func._schema.name:
        return 0
    sources, results = _tensors(given), _tensors(out)
    if not func._schema.is_mutable:
        places = {_storage(tensor) for tensor in sources}
        if any(_storage(tensor) in places for tensor in results):
            return 0
    return sum(_bytes(tensor) for tensor in (*sources, *results))
