"""From a run to its model: built on the host, from the seed, the same on every rank."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.catalog import model
from hpcbench.parallel.datasets import DATASETS, input_shape

SMALL_EDGE = 64
"""Images with a shorter edge get a model's MNIST/CIFAR form."""


def build_model(spec: RunSpec) -> nn.Sequential:
    """The run's model as a sequence of blocks, in the run's type (float64 for fp64) and memory format, on the host.

    Draws from torch's global generator, seeded with the run's seed plus its repeat.
    """
    torch.manual_seed(spec.seed + spec.repeat)
    return _build(spec)


def build_shapes(spec: RunSpec) -> nn.Sequential:
    """What ``build_model`` returns, its parameters and buffers on the meta device: no memory, no numbers.

    Leaves torch's global generator as it was.
    """
    with torch.device("meta"):
        return _build(spec)


def _build(spec: RunSpec) -> nn.Sequential:
    entry = model(spec.model)
    module, _, function = entry.builder.partition(":")
    options = {name: option.default for name, option in entry.options.items()} | spec.model_options
    shape = input_shape(spec.dataset, spec.input_size)
    built: nn.Sequential = getattr(importlib.import_module(module), function)(
        spec.model, shape, DATASETS[spec.dataset].outputs, options
    )
    if spec.precision == "fp64":
        built = built.double()
    if spec.channels_last:
        layout = torch.channels_last_3d if len(shape) == 4 else torch.channels_last
        built = built.to(memory_format=layout)  # type: ignore[call-overload]
    return built


def parameter_count(built: nn.Module) -> int:
    """Trainable numbers of a model."""
    return sum(parameter.numel() for parameter in built.parameters())
