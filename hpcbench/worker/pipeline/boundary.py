"""What passes from chunk to chunk: shapes and types known beforehand, so that nothing is sent but the numbers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten

from hpcbench.config.spec import RunSpec
from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.worker.layers import blank_batch, give_storage
from hpcbench.worker.precision import Arithmetic

_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


class Shape(NamedTuple):
    """One tensor of a boundary."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.memory_format

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it."""
        return torch.empty(self.sizes, dtype=self.dtype, device=device, memory_format=self.layout)

    def flat(self, tensor: Tensor) -> Tensor:
        """``tensor`` in one dimension, in the order in which this layout lies in memory; a copy only if it must be."""
        dense = tensor.contiguous(memory_format=self.layout)
        return dense.as_strided((dense.numel(),), (1,))


class Boundary(NamedTuple):
    """What one chunk hands to the next: one tensor, or (where blocks pass on tuples, such as skips) several."""

    shapes: tuple[Shape, ...]
    tree: TreeSpec

    @property
    def with_gradient(self) -> tuple[int, ...]:
        """Places of the tensors whose gradients come back."""
        return tuple(place for place, one in enumerate(self.shapes) if one.dtype.is_floating_point)


class Boundaries:
    """The boundaries after every chunk, for any number of samples: found once each by fake tensors.

    ``model`` is whole and on the host; what is kept of it are shapes alone.
    """

    def __init__(self, model: nn.Sequential, blocks: Sequence[range], spec: RunSpec, device: torch.device) -> None:
        self._model = skeleton(model)
        self._blocks = blocks
        self._spec = spec
        self.device = device
        self._known: dict[int, list[Boundary]] = {}

    def after(self, chunk: int, samples: int) -> Boundary:
        """What ``chunk`` hands on for a micro-batch of ``samples``. ``WorkerError`` where fake tensors cannot tell."""
        if samples not in self._known:
            self._known[samples] = self._trace(samples)
        return self._known[samples][chunk]

    def _trace(self, samples: int) -> list[Boundary]:
        spec, found = self._spec, list[Boundary]()
        arithmetic = Arithmetic(spec.precision, self.device)
        try:
            model = copy.deepcopy(self._model)
            with torch.random.fork_rng(devices=[]), FakeTensorMode(), torch.no_grad():
                give_storage(model, self.device)
                x: Any = blank_batch(spec, samples)[0].to(self.device)
                if x.is_floating_point() and spec.precision == "fp64":
                    x = x.double()
                if spec.channels_last and x.dim() in (4, 5):
                    x = x.contiguous(memory_format=_LAYOUTS[x.dim() - 3])
                with arithmetic.autocast():
                    for blocks in self._blocks:
                        for block in list(model)[blocks.start : blocks.stop]:
                            x = block(x)
                        found.append(boundary_of(x))
        except HpcbenchError:
            raise
        except Exception as error:
            raise WorkerError(
                f"the stages of {spec.model} cannot be tried with fake tensors on a micro-batch of {samples}: "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                status="unsupported",
                hint="a pipeline needs blocks whose shapes do not depend on values; BatchNorm needs two values",
            ) from error
        return found


def boundary_of(output: Any) -> Boundary:
    """The boundary that ``output`` of a chunk passes through."""
    leaves, tree = tree_flatten(output)
    return Boundary(tuple(Shape(tuple(one.shape), one.dtype, _layout(one)) for one in leaves), tree)


def _layout(tensor: Tensor) -> torch.memory_format:
    if tensor.is_contiguous():
        return torch.contiguous_format
    for layout in _LAYOUTS[1:]:
        if tensor.dim() == 4 + (layout is torch.channels_last_3d) and tensor.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format


def skeleton(model: nn.Sequential) -> nn.Sequential:
    """A copy on the meta device, made without copying any number."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        meta = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    return copy.deepcopy(model, memo)
