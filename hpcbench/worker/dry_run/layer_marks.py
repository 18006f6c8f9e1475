"""The layer whose operator runs now, in the forward and in the backward pass of a dry run."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

_WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "module", "chunks", "pipe", "partitions")
"""Parts of the names of modules that strategies wrap around those of the model."""


class LayerMarks:
    """The layer whose operator runs now, by names that are registered before the modules are called."""

    def __init__(self) -> None:
        self.phase = "setup"
        """The part of the step, where no module runs."""
        self.phases = {self.phase}
        """All parts of a step so far."""
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._running: list[str] = []
        self._sequences: list[int] = []
        """From each of these numbers on, the nodes of autograd's graph belong to the layer of the same index."""
        self._layers: list[str] = []
        self._handles: list[Any] = []

    def name_modules(self, model: nn.Module) -> None:
        """Register the names of the modules of ``model`` that have none yet."""
        for path, module in model.named_modules():
            name = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
            if name:
                self._names.setdefault(module, name)

    def name_of(self, module: nn.Module) -> str:
        """Return the name of ``module``, empty if it has none."""
        return self._names.get(module, "")

    def attach(self) -> None:
        """Watch the calls of all modules of the process."""
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def detach(self) -> None:
        """Undo ``attach``."""
        for handle in self._handles:
            handle.remove()

    def begin_step(self) -> None:
        """Forget the layers of the last step's graph."""
        self._running.clear()
        self._sequences.clear()
        self._layers.clear()

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """A part of a step, as ``measure.clocks.PhaseMarker``."""
        before, self.phase = self.phase, name
        self.phases.add(name)
        try:
            yield
        finally:
            self.phase = before

    def current(self) -> str:
        """Return the layer whose operator runs now, or the phase if there is none."""
        node = torch._C._current_autograd_node()
        if node is not None and self._sequences:
            # A recomputed block has modules that run within a node of autograd's graph.
            if self._running and self._running[-1]:
                return self._running[-1]
            place = bisect_right(self._sequences, node._sequence_nr()) - 1
            if place >= 0 and self._layers[place]:
                return self._layers[place]
        return self._running[-1] if self._running and self._running[-1] else self.phase

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        name = self._names.get(module) or (self._running[-1] if self._running else "")
        self._running.append(name)
        self._mark(name)

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()
        self._mark(self._running[-1] if self._running else "")

    def _mark(self, name: str) -> None:
        self._sequences.append(torch._C._autograd._get_sequence_nr())
        self._layers.append(name)
