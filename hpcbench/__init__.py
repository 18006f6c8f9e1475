"""hpcbench benchmarks parallel training of neural networks on clusters, and predicts its step time and memory."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``hpcbench.load``, imported when it is asked for: the worker starts without polars."""
    if name == "load":
        # By name, so that nothing that the worker imports leads to polars.
        return importlib.import_module("hpcbench.report.load_results").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
