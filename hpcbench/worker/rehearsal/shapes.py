"""What an operator would make, without computing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


class Made(NamedTuple):
    """A tensor that an operator returns, or something else."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    other: Any = None


def blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take the memory of one."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class Shapes:
    """Results of operators by the shapes of their arguments; remembers what it was asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Any, tuple[list[Made], Any]] = {}

    def result(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``func`` returns, all zeros; tensors that it writes are returned as they are."""
        written = _written(func, args, kwargs)
        returns = func._schema.returns  # type: ignore[attr-defined]
        if written and len(returns) == 0:
            return None
        if written and all(one.alias_info is not None for one in returns):
            return written[0] if len(returns) == 1 else tuple(written)
        flat, tree = tree_flatten((args, kwargs))
        key = (func, tree, tuple(_key(one) for one in flat))
        if key not in self._known:
            found, result_tree = tree_flatten(self._on_meta(func, args, kwargs))
            self._known[key] = ([_made(one) for one in found], result_tree)
        entries, result_tree = self._known[key]
        made = [one.other if one.shape is None else self._blank(one) for one in entries]
        return tree_unflatten(made, result_tree)

    def _blank(self, one: Made) -> Tensor:
        assert one.shape is not None
        assert one.dtype is not None
        return blank(one.shape, one.dtype, self._device)

    def _on_meta(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def to_meta(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.empty(value.shape, dtype=value.dtype, device="meta")
            return torch.device("meta") if isinstance(value, torch.device) else value

        return func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that ``func`` writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


def _made(value: Any) -> Made:
    return Made(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else Made(None, None, value)
