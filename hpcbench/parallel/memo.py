"""What is worked out of a table of layers once, however often it is asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from operator import attrgetter
from typing import TypeVar

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.layers import LayerTable

Result = TypeVar("Result")
Entry = TypeVar("Entry")
_TABLES = 32
"""So many tables are remembered at a time: each by itself, since tables are not hashable."""


def of_table(function: Callable[[LayerTable], Result]) -> Callable[[LayerTable], Result]:
    """``function`` of a table, which asks it once for each; what it returns is everybody's, and not to be changed."""
    known: OrderedDict[int, tuple[LayerTable, Result]] = OrderedDict()

    @wraps(function)
    def remembered(table: LayerTable) -> Result:
        found = known.get(id(table))
        if found is not None and found[0] is table:
            return found[1]
        known[id(table)] = (table, function(table))
        if len(known) > _TABLES:
            known.popitem(last=False)
        return known[id(table)][1]

    return remembered


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
