"""The registry entry of a strategy, and the declaration of one option of a strategy or a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One entry of a strategy's or a model's own ``options``."""

    kind: type
    default: Any
    description: str
    choices: tuple[Any, ...] = ()
    lossy: Mapping[Any, float] = MappingProxyType({})
    """Values with which gradients are not exact, and the largest difference that each may make under ``verify``."""


class StrategyEntry(NamedTuple):
    """``own_degree`` takes what the world leaves when no degree is given; ``None`` is a lone device."""

    own_degree: str | None
    runtime: str
    description: str
    options: Mapping[str, Option] = MappingProxyType({})
    reference: str = "data_parallel"
    """One of ``REFERENCE_TRAINERS``: what a run of it must compute."""
    lossy: float | None = None
    """As ``Option.lossy``, where the strategy is inexact whatever its options."""
    widest: str = "fp64"
    """The most exact arithmetic that it can be verified in."""
    limit: str | None = None
    """``module:function``: what excludes a run (a ``RunSpec``) for this strategy in particular, or ``None``."""
    hybrid: tuple[str, ...] = ()
    """Other degrees that may be more than 1: the strategy is then a hybrid with those."""
    rehearsable: bool = True
    """Whether all that it computes and passes goes through torch's operators."""
    cost: str | None = None
    """``module:Class`` of ``hpcbench.oracle``: what a rank passes to whom, and what it holds."""
