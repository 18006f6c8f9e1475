"""hpcbench: how should this model be parallelised on that cluster, and how sure are we?"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``hpcbench.load``, imported when it is asked for: the worker starts without polars."""
    if name == "load":
        # By name, so that nothing that the worker imports leads to polars.
        return importlib.import_module("hpcbench.report.load").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
