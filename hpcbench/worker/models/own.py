"""A user's own model: its module imported from the folder that the sweep or the profile names, its function called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.worker.failure import is_out_of_memory

_CALL = "function(in_shape, outputs, **model_options) -> torch.nn.Sequential"


def build_own(
    model: str, folder: str | None, in_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any]
) -> nn.Sequential:
    """What ``model`` (``package.module:function``) in ``folder`` returns for samples of ``in_shape``.

    Raises ``WorkerError``: ``unsupported`` where that is no sequence of blocks, ``failed`` where it raises. A package
    that is missing, and memory that is, keep the exceptions that say so.
    """
    module, _, name = model.partition(":")
    function = getattr(_imported(model, module, folder), name, None)
    if not callable(function):
        raise WorkerError(f"model {model}: module {module} has no function {name}")
    built = _called(f"model {model}", lambda: function(in_shape, outputs, **options))
    if not isinstance(built, nn.Sequential) or not len(built):
        found = "an empty one" if isinstance(built, nn.Sequential) else type(built).__name__
        raise WorkerError(
            f"model {model} must return a torch.nn.Sequential of its blocks, not {found}",
            status="unsupported",
            hint=f"it is called as {_CALL}",
        )
    return built


def _imported(model: str, module: str, folder: str | None) -> ModuleType:
    if folder is None:
        raise WorkerError(f"model {model}: neither the sweep nor the profile names a model_folder")
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    try:
        found: ModuleType = _called(f"importing {module}", lambda: importlib.import_module(module))
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


def _called(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (HpcbenchError, ModuleNotFoundError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        said = f"{what} raised {type(error).__name__}: {error}"
        raise WorkerError(said, hint=f"it is called as {_CALL}") from error
