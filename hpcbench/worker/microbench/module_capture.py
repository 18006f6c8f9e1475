"""Modules of a model with their captured inputs and outputs, so that each can be called by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.worker.measure.layer_trace import module_hooks


@dataclass
class CapturedModule:
    """The first call of one of several equal modules."""

    name: str
    kind: str
    """Kind as in the layer table: the module's class, with ``.other`` appended for its operations around its
    children."""
    module: nn.Module
    inputs: list[Any]
    flows_back: list[bool]
    """Whether each input requires a gradient."""
    children: dict[str, list[Tensor]] = field(default_factory=dict)
    """Outputs of the direct children, call by call."""


def capture_modules(
    model: nn.Module, inputs: Tensor, forward: Callable[[Tensor], Tensor]
) -> tuple[list[CapturedModule], Tensor]:
    """One forward pass: modules that differ in their class, settings or shapes, and the model's output."""
    capture = _ModuleCapture()
    with module_hooks(model, capture.enter, capture.leave):
        outputs = forward(inputs)
    return capture.captured, outputs.detach().clone()


class _ModuleCapture:
    def __init__(self) -> None:
        self.captured: list[CapturedModule] = []
        self._known: set[tuple[Any, ...]] = set()
        self._running: list[CapturedModule | None] = []

    def enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._running.append(self._new(name, module, inputs[0]))

    def leave(self, name: str, output: Any) -> None:
        self._running.pop()
        caller = self._running[-1] if self._running else None
        if caller is not None and isinstance(output, Tensor):
            caller.children.setdefault(name.rpartition(".")[2], []).append(output.detach().clone())

    def _new(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> CapturedModule | None:
        if isinstance(module, nn.Sequential | nn.Identity | nn.ModuleList):
            return None
        is_leaf = next(module.children(), None) is None
        kind = type(module).__name__ + ("" if is_leaf else ".other")
        key = (kind, repr(module), *(tuple(one.shape) for one in args if isinstance(one, Tensor)))
        if key in self._known:
            return None
        self._known.add(key)
        flows_back = [isinstance(one, Tensor) and one.requires_grad for one in args]
        # What runs next may write over it.
        kept = [one.detach().clone() if isinstance(one, Tensor) else one for one in args]
        captured = CapturedModule(name, kind, module, kept, flows_back)
        self.captured.append(captured)
        return captured


class _ReplayedTensor(torch.autograd.Function):
    """A tensor that is there already, as if it had just been computed from ``inputs``.

    What flows back to them is there already, too.
    """

    @staticmethod
    def forward(ctx: Any, _trigger: Tensor, holder: list[Tensor], flowing: list[Tensor], *inputs: Tensor) -> Tensor:
        # The gradients belong to the call, not to the graph.
        ctx.flowing = flowing
        if len(flowing) < len(inputs):
            flowing += [torch.randn_like(one) if one.is_floating_point() else one for one in inputs[len(flowing) :]]
        return holder[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        return (None, None, None, *(one if needs else None for one, needs in zip(ctx.flowing, wanted, strict=True)))


def replay_tensor(tensor: Tensor) -> Callable[..., Tensor]:
    """A function that hands ``tensor`` over, with a gradient wanted, as if it were made of its arguments."""
    trigger, holder, flowing = torch.zeros((), requires_grad=True), [tensor], list[Tensor]()
    return lambda *inputs: _ReplayedTensor.apply(trigger, holder, flowing, *inputs)  # type: ignore[no-untyped-call]


def isolate_module(captured: CapturedModule) -> nn.Module:
    """The module itself where it has no children; else a copy whose children give back what they gave back before."""
    module = captured.module
    if next(module.children(), None) is None:
        return module
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    for name, outputs in captured.children.items():
        child = module._modules.get(name)
        if child is not None:
            clone._modules[name] = _replay_child(child, outputs)
    return clone


def _replay_child(child: nn.Module, outputs: list[Tensor]) -> nn.Module:
    """``child`` with all that it has, but for what it computes."""
    sources = [replay_tensor(output) for output in outputs]
    calls = 0

    def forward(*args: Any, **_kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return sources[(calls - 1) % len(sources)](*(one for one in args if isinstance(one, Tensor)))

    clone = copy.copy(child)
    clone.forward = forward
    return clone
