"""From a run to its model: built on the host, from the seed, the same on every rank."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.catalog import model
from hpcbench.parallel.datasets import DATASETS, input_shape
from hpcbench.worker.models.own import build_own

SMALL_EDGE = 64
"""Images with a shorter edge get a model's MNIST/CIFAR form."""


def build_model(spec: RunSpec, model_folder: str | None = None) -> nn.Sequential:
    """The run's model as a sequence of blocks, in the run's type (float64 for fp64) and memory format, on the host.

    Draws from torch's global generator, seeded with the run's seed plus its repeat. ``model_folder`` is where a user's
    own model is; see ``own.build_own`` for what that may raise.
    """
    torch.manual_seed(spec.seed + spec.repeat)
    return _build(spec, model_folder)


def build_shapes(spec: RunSpec, model_folder: str | None = None) -> nn.Sequential:
    """What ``build_model`` returns, its parameters and buffers on the meta device: no memory, no numbers.

    Leaves torch's global generator as it was.
    """
    with torch.device("meta"):
        return _build(spec, model_folder)


def _build(spec: RunSpec, model_folder: str | None) -> nn.Sequential:
    entry = model(spec.model)
    options = {name: option.default for name, option in entry.options.items()} | spec.model_options
    shape, outputs = input_shape(spec.dataset, spec.input_size), DATASETS[spec.dataset].outputs
    if entry.own:
        built = build_own(spec.model, model_folder, shape, outputs, options)
    else:
        module, _, function = entry.builder.partition(":")
        built = getattr(importlib.import_module(module), function)(spec.model, shape, outputs, options)
    if spec.precision == "fp64":
        built = built.double()
    if spec.channels_last:
        layout = torch.channels_last_3d if len(shape) == 4 else torch.channels_last
        built = built.to(memory_format=layout)  # type: ignore[call-overload]
    return built


def parameter_count(built: nn.Module) -> int:
    """Trainable numbers of a model."""
    return sum(parameter.numel() for parameter in built.parameters())
