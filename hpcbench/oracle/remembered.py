"""Lists that follow from a table and a few parameters of the run: made once for all runs that share them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from operator import attrgetter
from typing import TypeVar

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.layers import LayerTable

_Entry = TypeVar("_Entry")
_Made = Callable[[RunSpec, LayerTable], list[_Entry]]
_MOST = 64


def remembered(*parameters: str) -> Callable[[_Made[_Entry]], _Made[_Entry]]:
    """For a function whose list depends on the table and on ``parameters`` of the run alone; every caller's is new."""
    chosen = attrgetter(*parameters)

    def around(function: _Made[_Entry]) -> _Made[_Entry]:
        # The table is kept beside the list, so that no other takes its id.
        known: OrderedDict[Hashable, tuple[LayerTable, list[_Entry]]] = OrderedDict()

        @wraps(function)
        def look(spec: RunSpec, table: LayerTable) -> list[_Entry]:
            key = (id(table), chosen(spec))
            found = known.get(key)
            if found is None:
                found = known[key] = (table, function(spec, table))
                if len(known) > _MOST:
                    known.popitem(last=False)
            return list(found[1])

        return look

    return around
