"""A dispatch mode in which nothing is computed: operators give zeros and cost time, collectives are real."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hpcbench.parallel.kernel import Compute
from hpcbench.worker.rehearsal.prices import Prices
from hpcbench.worker.rehearsal.shapes import Shapes, blank

_COMMUNICATION = ("c10d", "_c10d_functional", "c10d_functional")
_SHORTEST_SLEEP_S = 0.5e-3
"""Sleeping has a cost of its own: shorter computations wait until they are as long together."""
_REAL = frozenset({"_local_scalar_dense", "item", "detach", "set_", "resize_", "lift_fresh", "_pin_memory"})


class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context around the steps of one run.

    Operators on floating-point tensors are not computed: their results are zeros that take no memory, and the thread
    sleeps for as long as the rehearsed device would have computed, less what it took here to find that out. Payloads
    get their memory when they are handed to a collective, so messages are as long as they are in truth.
    """

    def __init__(self, compute: Compute, precision: str, model: str, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._prices, self._shapes = Prices(compute, precision, model), Shapes(device)
        self._owed_s = 0.0
        self._left = time.perf_counter()
        self.computed_s = 0.0
        """Of the rehearsed device, so far."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COMMUNICATION:
            self._sleep(0.0)
            return func(*tree_map(_in_memory, args), **kwargs)
        if func.__name__.startswith("as_strided") and _is_blank(args[0]):
            # It would look beyond the one number that there is.
            return blank(tuple(args[1]), args[0].dtype, args[0].device)
        if not _is_computation(func, types, args, kwargs):
            return func(*args, **kwargs)
        began = time.perf_counter()
        out = self._shapes.result(func, args, kwargs)
        price_s = self._prices.seconds(func, args, kwargs, out)
        self.computed_s += price_s
        # What lies between two operators is this machine's overhead as far as the operator covers it; beyond that the
        # thread has waited for somebody.
        between_s = min(began - self._left, price_s)
        self._owed_s += price_s - between_s - (time.perf_counter() - began)
        self._sleep(_SHORTEST_SLEEP_S)
        self._left = time.perf_counter()
        return out

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._sleep(0.0)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _sleep(self, at_least_s: float) -> None:
        """What is owed, if that is more than ``at_least_s``."""
        if self._owed_s > at_least_s:
            began = time.perf_counter()
            time.sleep(self._owed_s)
            self._owed_s -= time.perf_counter() - began


def _is_computation(func: Any, types: Any, args: Any, kwargs: Any) -> bool:
    """Whether it would read or make floating-point numbers; tensors of subclasses know better what to do."""
    if func.namespace != "aten" or func.is_view or func.__name__.partition(".")[0] in _REAL:
        return False
    if any(not issubclass(one, Tensor) or one.__torch_dispatch__ is not Tensor.__torch_dispatch__ for one in types):
        return False
    return any(isinstance(one, Tensor) and one.is_floating_point() for one in tree_leaves((args, kwargs)))


def _in_memory(value: Any) -> Any:
    """A tensor whose numbers share their memory gets some of its own."""
    if isinstance(value, Tensor) and _is_blank(value):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return value


def _is_blank(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and 0 in tensor.stride()
