"""What is worked out of a table of layers once, however often it is asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from hpcbench.parallel.layers import LayerTable

Result = TypeVar("Result")
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
