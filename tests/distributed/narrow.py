"""Networks of a model's form with an eighth of its channels or few words, for what is not proved by size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.models.build import build_model
from hpcbench.workloads.datasets import DATASETS

WORDS = 61
"""Of a narrow vocabulary: a prime, uneven on any number of ranks."""
LEAST = 64
"""Fewer channels (those of an image) stay as they are."""


def build_narrow(spec: RunSpec) -> nn.Sequential:
    """The run's model, built and initialised as ever from layers that are made narrower.

    A model of ``tokens`` keeps its width, which few parameters of a transformer are: its data set has ``WORDS`` words.
    """
    if spec.dataset == "tokens":
        return build_model(spec)
    classes = DATASETS[spec.dataset].outputs
    kinds: dict[str, Any] = {
        "Conv2d": _narrow(nn.Conv2d, 2, classes),
        "Conv3d": _narrow(nn.Conv3d, 2, classes),
        "BatchNorm2d": _narrow(nn.BatchNorm2d, 1, classes),
        "Linear": _narrow(nn.Linear, 2, classes),
    }
    with mock.patch.multiple(nn, **kinds):
        return build_model(spec)


def _narrow(kind: type[nn.Module], sizes: int, classes: int) -> Callable[..., nn.Module]:
    """``kind`` with an eighth of the channels that its first ``sizes`` arguments, and ``groups``, are numbers of.

    The model's outputs stay ``classes``.
    """

    def eighth(channels: int) -> int:
        return channels // 8 if channels >= LEAST and channels != classes else channels

    def make(*arguments: Any, **more: Any) -> nn.Module:
        groups = {"groups": eighth(more["groups"])} if "groups" in more else {}
        return kind(*map(eighth, arguments[:sizes]), *arguments[sizes:], **{**more, **groups})

    return make
