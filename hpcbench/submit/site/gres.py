"""GRES strings: how many accelerators of which type a node has, in every spelling that SLURM and sites use."""

from __future__ import annotations

import re
from typing import NamedTuple

_GPU = re.compile(
    r"(?:^|,)(?P<tres>gres/)?gpu"
    r"(?::(?P<type>[A-Za-z_][^:=,(\s]*))?(?:[:=](?P<count>\d+))?(?:\((?:S|IDX):[^)]*\))?(?=,|$)"
)


class Gpus(NamedTuple):
    """Accelerators of one type of a node."""

    type: str | None
    number: int


def parse_gres(text: str) -> list[Gpus]:
    """The accelerators in ``text``, by type; empty for ``(null)`` and for what is none (mps, shard, bandwidth).

    Totals of trackable resources (``gres/gpu=8,gres/gpu:h100=8``) count no device twice.
    """
    found: dict[str | None, int] = {}
    totals = False
    for match in _GPU.finditer(text.strip()):
        kind = match["type"]
        found[kind] = found.get(kind, 0) + int(match["count"] or 1)
        totals = totals or match["tres"] is not None
    if totals and len(found) > 1:
        found.pop(None, None)
    return [Gpus(kind, count) for kind, count in found.items() if count]
