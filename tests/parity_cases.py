"""The small trainings with which a strategy of the registry is compared with one device."""

from __future__ import annotations

from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.parallel.strategy_entry import ParityCase

_DEFAULT_CASES = {
    None: (ParityCase("vgg11", "digits", {"batch_norm": False}, ranks=1, micro_batches=2),),
    "dp_degree": (
        ParityCase("vgg11", "digits", {"batch_norm": False}, micro_batches=2),
        ParityCase("resnet18", "digits"),
    ),
    "tp_degree": (ParityCase("vit", "digits"),),
    "sp_degree": (ParityCase("resnet18", "digits"),),
    "pp_degree": (ParityCase("vgg11", "digits", {"batch_norm": False}, micro_batches=4),),
}


def parity_cases(key: str) -> tuple[ParityCase, ...]:
    """Return the entry's own cases, or those of its ``own_degree``."""
    entry = STRATEGIES[key]
    return entry.parity_cases or _DEFAULT_CASES[entry.own_degree]
