"""Import of fairscale 0.4.13, which was written for torch 1.x."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from hpcbench.errors import unsupported
from hpcbench.worker.failure import install_hint


def import_fairscale(module: str) -> ModuleType:
    """Import ``fairscale.<module>``.

    Raises:
        WorkerError: ``unsupported``, with the command that installs fairscale.
    """
    try:
        with warnings.catch_warnings():
            # Its decorators for autocast have moved since; they still work.
            warnings.simplefilter("ignore", FutureWarning)
            return importlib.import_module(f"fairscale.{module}")
    except Exception as error:
        raise unsupported(
            f"this strategy needs fairscale: {type(error).__name__}: {error}", install_hint("fairscale")
        ) from error
