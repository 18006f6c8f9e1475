"""torchvision's models, also beside a torch that its compiled part does not fit."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from hpcbench.errors import WorkerError

_held: list[Any] = []
"""Operators are gone when the library that defined them is collected."""


def torchvision_models() -> ModuleType:
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
    _forget_torchvision()
    _declare_operators()
    return importlib.import_module("torchvision.models")


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _held.append(library)


def _forget_torchvision() -> None:
    """Drop what the failed import left half-made."""
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
