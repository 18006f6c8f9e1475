"""What is worked out of a table of layers, or of one of its rows, once, however often it is asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.layers import LayerTable

Entry = TypeVar("Entry")
Function = TypeVar("Function", bound=Callable[..., Any])


def once_per(size: int) -> Callable[[Function], Function]:
    """Ask the function once for each first argument, by identity, and each of the others, which are hashable.

    The last ``size`` answers are remembered. They are everybody's, and must be of a kind that cannot be changed.
    """

    def decorate(function: Function) -> Function:
        known: OrderedDict[tuple[Hashable, ...], tuple[Any, Any]] = OrderedDict()

        @wraps(function)
        def remembered(first: Any, *others: Hashable, **named: Hashable) -> Any:
            key = (id(first), *others, *sorted(named.items()))
            found = known.get(key)
            # An identity may come again when its first owner is gone: not while that is kept here.
            if found is None:
                found = known[key] = (first, function(first, *others, **named))
                if len(known) > size:
                    known.popitem(last=False)
            return found[1]

        return remembered  # type: ignore[return-value]

    return decorate


_Lists = Callable[[RunSpec, LayerTable], list[Entry]]
_LISTS = 64


def of_run(*parameters: str) -> Callable[[_Lists[Entry]], _Lists[Entry]]:
    """For a function whose list depends on the table and on ``parameters`` of the run alone; every caller's is new."""
    chosen = attrgetter(*parameters)

    def around(function: _Lists[Entry]) -> _Lists[Entry]:
        # The table is kept beside the list, so that no other takes its id.
        known: OrderedDict[Hashable, tuple[LayerTable, list[Entry]]] = OrderedDict()

        @wraps(function)
        def remembered(spec: RunSpec, table: LayerTable) -> list[Entry]:
            key = (id(table), chosen(spec))
            found = known.get(key)
            if found is None:
                found = known[key] = (table, function(spec, table))
                if len(known) > _LISTS:
                    known.popitem(last=False)
            return list(found[1])

        return remembered

    return around
