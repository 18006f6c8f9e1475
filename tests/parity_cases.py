"""The small trainings with which a strategy of the registry is compared with one device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from hpcbench.config.run_spec import OptionValue
from hpcbench.strategies.catalog import STRATEGIES

_EMPTY: Mapping[str, OptionValue] = MappingProxyType({})


class ParityCase(NamedTuple):
    """A small training that must give the reference's losses, gradients and weights on real ranks.

    ``degrees`` replaces the default, which gives all ranks to the strategy's own degree.
    """

    model: str
    dataset: str
    model_options: Mapping[str, OptionValue] = _EMPTY
    options: Mapping[str, OptionValue] = _EMPTY
    ranks: int = 2
    micro_batches: int = 1
    degrees: Mapping[str, int] = MappingProxyType({})
    devices_per_task: int = 1
    """Devices that one process drives; above 1 for strategies that drive several."""


_CHANNEL_CASES = (
    ParityCase("vgg11", "digits", {"batch_norm": False}),
    ParityCase("resnet18", "digits", options={"form": "gathered"}, micro_batches=2),
)
_OWN_CASES = {
    "filter": _CHANNEL_CASES,
    "channel": _CHANNEL_CASES,
    "fairscale_pipe": (
        ParityCase("vgg11", "digits", {"batch_norm": False}, ranks=1, micro_batches=4, devices_per_task=2),
    ),
}
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
    """Return the strategy's own cases, or those of its ``own_degree``."""
    return _OWN_CASES.get(key) or _DEFAULT_CASES[STRATEGIES[key].own_degree]
