"""Builds the model of a run: a shipped model, a torchvision model or a user's custom model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.parallel.catalog import get_model
from hpcbench.parallel.workloads import DATASETS, sample_shape
from hpcbench.worker.failure import is_out_of_memory

_declared_libraries: list[Any] = []
"""Operators are gone when the library that defined them is collected."""


def import_torchvision_models() -> ModuleType:
    """``torchvision.models``.

    The wheel made for another torch build cannot load its compiled operators, and its Python part then stumbles over
    their absence (``operator torchvision::nms does not exist``). The classifiers use none of them, so the two that it
    asks for are declared, but only after a plain import has failed: a torchvision that works stays untouched.
    Raises ``WorkerError`` (``unsupported``) where there is none.
    """
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    except ImportError as error:
        raise WorkerError(
            f"this model needs torchvision: {error}",
            status="unsupported",
            hint="python -m pip install torchvision",
        ) from error
    _unload_torchvision()
    _declare_operators()
    return importlib.import_module("torchvision.models")


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _declared_libraries.append(library)


def _unload_torchvision() -> None:
    """Drop what the failed import left half-made."""
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


_BUILDER_SIGNATURE = "function(in_shape, outputs, **model_options) -> torch.nn.Sequential"


def build_custom_model(
    model: str, folder: str | None, in_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any]
) -> nn.Sequential:
    """What ``model`` (``package.module:function``) in ``folder`` returns for samples of ``in_shape``.

    Raises ``WorkerError``: ``unsupported`` where that is no sequence of blocks, ``failed`` where it raises. A package
    that is missing, and memory that is, keep the exceptions that say so.
    """
    module, _, name = model.partition(":")
    function = getattr(_import_custom_module(model, module, folder), name, None)
    if not callable(function):
        raise WorkerError(f"model {model}: module {module} has no function {name}")
    built = _call_user_code(f"model {model}", lambda: function(in_shape, outputs, **options))
    if not isinstance(built, nn.Sequential) or not len(built):
        found = "an empty one" if isinstance(built, nn.Sequential) else type(built).__name__
        raise WorkerError(
            f"model {model} must return a torch.nn.Sequential of its blocks, not {found}",
            status="unsupported",
            hint=f"it is called as {_BUILDER_SIGNATURE}",
        )
    return built


def _import_custom_module(model: str, module: str, folder: str | None) -> ModuleType:
    if folder is None:
        raise WorkerError(f"model {model}: neither the sweep nor the profile names a model_folder")
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    try:
        found: ModuleType = _call_user_code(f"importing {module}", lambda: importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise WorkerError(
            f"model {model}: there is no module {module} in {folder}",
            hint="the folder must be visible under this path on the nodes, and inside a container",
        ) from error
    file = getattr(found, "__file__", None)
    if file is None or not Path(file).is_relative_to(folder):
        raise WorkerError(
            f"model {model}: {module} is {file or 'a part of Python'}, not a module in {folder}",
            hint="give it a name that no other package has",
        )
    return found


def _call_user_code(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (HpcbenchError, ModuleNotFoundError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        said = f"{what} raised {type(error).__name__}: {error}"
        raise WorkerError(said, hint=f"it is called as {_BUILDER_SIGNATURE}") from error


SMALL_IMAGE_EDGE = 64
"""Images with a shorter edge get a model's MNIST/CIFAR form."""


def build_model(spec: RunSpec, model_folder: str | None = None) -> nn.Sequential:
    """The run's model as a sequence of blocks, in the run's type (float64 for fp64) and memory format, on the host.

    Draws from torch's global generator, seeded with the run's seed plus its repeat. ``custom_model_folder`` is where
    a user's
    own model is; see ``own.build_own`` for what that may raise.
    """
    torch.manual_seed(spec.seed + spec.repeat)
    return _build_from_spec(spec, model_folder)


def build_meta_model(spec: RunSpec, model_folder: str | None = None) -> nn.Sequential:
    """What ``build_model`` returns, its parameters and buffers on the meta device: no memory, no numbers.

    Leaves torch's global generator as it was.
    """
    with torch.device("meta"):
        return _build_from_spec(spec, model_folder)


def _build_from_spec(spec: RunSpec, model_folder: str | None) -> nn.Sequential:
    entry = get_model(spec.model)
    options = {name: option.default for name, option in entry.options.items()} | spec.model_options
    shape, outputs = sample_shape(spec.dataset, spec.input_size), DATASETS[spec.dataset].outputs
    if entry.own:
        built = build_custom_model(spec.model, model_folder, shape, outputs, options)
    else:
        module, _, function = entry.builder.partition(":")
        built = getattr(importlib.import_module(module), function)(spec.model, shape, outputs, options)
    if spec.precision == "fp64":
        built = built.double()
    if spec.channels_last:
        layout = torch.channels_last_3d if len(shape) == 4 else torch.channels_last
        built = built.to(memory_format=layout)  # type: ignore[call-overload]
    return built


def count_parameters(built: nn.Module) -> int:
    """Trainable numbers of a model."""
    return sum(parameter.numel() for parameter in built.parameters())
