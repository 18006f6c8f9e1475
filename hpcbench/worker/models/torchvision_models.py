"""torchvision's models, also where its compiled operators belong to another torch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

from hpcbench.errors import unsupported

SMALL_IMAGE_EDGE = 64
"""Images with a shorter edge get a model's MNIST/CIFAR form."""

_declared_libraries: list[Any] = []
"""Operators vanish when the library object that defined them is collected."""


def import_torchvision_models() -> ModuleType:
    """Import and return ``torchvision.models``.

    A wheel built for another torch cannot load its compiled operators, and then its Python part fails because they are
    missing (``operator torchvision::nms does not exist``). The classifiers use none of them, so the two that it asks
    for are declared here, but only after a plain import has failed: a torchvision that works stays untouched.

    Raises:
        WorkerError: ``unsupported`` if torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    except ImportError as error:
        raise unsupported(f"this model needs torchvision: {error}", "python -m pip install torchvision") from error
    # The failed import has left modules behind that are only partly initialised.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _declared_libraries.append(library)
    return importlib.import_module("torchvision.models")


def build_torchvision_model(name: str, classes: int, **options: Any) -> Any:
    """torchvision's model ``name`` with random weights and ``classes`` outputs."""
    return getattr(import_torchvision_models(), name)(weights=None, num_classes=classes, **options)
