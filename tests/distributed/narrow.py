"""Networks of a model's form with an eighth of its channels, for what is not proved by size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.models.build import build_model

LEAST = 64
"""Fewer channels (those of an image, classes) stay as they are."""


def build_narrow(spec: RunSpec) -> nn.Sequential:
    """The run's model, built and initialised as ever from layers that are made narrower."""
    kinds: dict[str, Any] = {
        "Conv2d": _narrow(nn.Conv2d, 2),
        "BatchNorm2d": _narrow(nn.BatchNorm2d, 1),
        "Linear": _narrow(nn.Linear, 2),
    }
    with mock.patch.multiple(nn, **kinds):
        return build_model(spec)


def _narrow(kind: type[nn.Module], sizes: int) -> Callable[..., nn.Module]:
    """``kind`` with an eighth of the channels that its first ``sizes`` arguments are numbers of."""

    def make(*arguments: Any, **more: Any) -> nn.Module:
        given = [size // 8 if size >= LEAST else size for size in arguments[:sizes]]
        return kind(*given, *arguments[sizes:], **more)

    return make
