"""Builds the model of a run: a shipped model, a torchvision model or a user's custom model."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError, WorkerError, unsupported
from hpcbench.worker.failure import is_out_of_memory
from hpcbench.worker.model_execution import use_bf16_parameters
from hpcbench.workloads.datasets import DATASETS, sample_shape
from hpcbench.workloads.models import get_model

_CALL_HINT = "it is called as function(in_shape, outputs, **model_options) -> torch.nn.Sequential"


def build_custom_model(
    model: str, folder: str | None, in_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any]
) -> nn.Sequential:
    """Call a user's model function.

    Args:
        model: ``package.module:function``.
        folder: Folder that contains the module.
        in_shape: Shape of one sample, without the batch dimension.
        outputs: Number of classes, values or tokens.
        options: The run's ``model_options``.

    Returns:
        The function's result: a sequence of the model's blocks.

    Raises:
        WorkerError: ``unsupported`` if the result is not a sequence of blocks; ``failed`` if the user's code raises.
        ModuleNotFoundError: The user's code imports a package that is not installed.
    """
    module_name, _, function_name = model.partition(":")
    step = f"importing {module_name}"
    try:
        module = _import_custom_module(model, module_name, folder)
        function = getattr(module, function_name, None)
        if not callable(function):
            raise WorkerError(f"model {model}: module {module_name} has no function {function_name}")
        step = f"model {model}"
        blocks = function(in_shape, outputs, **options)
    except (HpcbenchError, ModuleNotFoundError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise WorkerError(f"{step} raised {type(error).__name__}: {error}", hint=_CALL_HINT) from error
    if not isinstance(blocks, nn.Sequential) or not len(blocks):
        result = "an empty one" if isinstance(blocks, nn.Sequential) else type(blocks).__name__
        raise unsupported(f"model {model} must return a torch.nn.Sequential of its blocks, not {result}", _CALL_HINT)
    return blocks


def _import_custom_module(model: str, name: str, folder: str | None) -> ModuleType:
    if folder is None:
        raise WorkerError(f"model {model}: neither the sweep nor the profile names a model_folder")
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        hint = "the folder must be visible under this path on the nodes, and inside a container"
        raise WorkerError(f"model {model}: there is no module {name} in {folder}", hint=hint) from error
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_relative_to(folder):
        message = f"model {model}: {name} is {file or 'a part of Python'}, not a module in {folder}"
        raise WorkerError(message, hint="give it a name that no other package has")
    return module


def build_model(spec: RunSpec, model_folder: str | None = None) -> nn.Sequential:
    """Build the run's model on the host, as a sequence of blocks.

    Weights are drawn from torch's global generator, seeded with the run's seed plus its repeat: all ranks build the
    same weights.

    Args:
        spec: The run; its precision and ``channels_last`` decide the dtype and memory format.
        model_folder: Folder of a user's own model.

    Returns:
        The blocks; called with [n, *sample shape] they return the model's output.

    Raises:
        WorkerError: see ``import_torchvision_models`` and ``build_custom_model``.
    """
    torch.manual_seed(spec.seed + spec.repeat)
    return _build_from_spec(spec, model_folder)


def build_meta_model(spec: RunSpec, model_folder: str | None = None) -> nn.Sequential:
    """Build the run's model on the meta device, without memory or numbers. Leaves the global generator unchanged."""
    with torch.device("meta"):
        return _build_from_spec(spec, model_folder)


def _build_from_spec(spec: RunSpec, model_folder: str | None) -> nn.Sequential:
    entry = get_model(spec.model)
    options = {name: option.default for name, option in entry.options.items()} | spec.model_options
    shape, outputs = sample_shape(spec.dataset, spec.input_size), DATASETS[spec.dataset].outputs
    if entry.own:
        model = build_custom_model(spec.model, model_folder, shape, outputs, options)
    else:
        module, _, function = entry.builder.partition(":")
        model = getattr(importlib.import_module(module), function)(spec.model, shape, outputs, options)
    if spec.precision == "fp64":
        model = model.double()
    elif spec.precision == "bf16_params":
        use_bf16_parameters(model)
    if spec.channels_last:
        layout = torch.channels_last_3d if len(shape) == 4 else torch.channels_last
        model = model.to(memory_format=layout)  # type: ignore[call-overload]
    return model


def copy_to_meta(model: nn.Sequential) -> nn.Sequential:
    """Copy ``model`` to the meta device; no number is copied, and tied weights stay tied."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    return copy.deepcopy(model, memo)


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable values of ``model``."""
    return sum(parameter.numel() for parameter in model.parameters())
