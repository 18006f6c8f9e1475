"""hpcbench benchmarks parallel training of neural networks on clusters, and predicts its step time and memory."""

import importlib
from typing import Any

__version__ = "0.1.0"

_FUNCTIONS = {
    "load": "hpcbench.report.load_results",
    "plot": "hpcbench.report.plots.plotting",
    "table": "hpcbench.report.pivot_table",
}


def __dir__() -> list[str]:
    return ["__version__", *_FUNCTIONS]


def __getattr__(name: str) -> Any:
    """``load``, ``table`` and ``plot``, imported when they are asked for: the worker starts without polars."""
    if name in _FUNCTIONS:
        # By name, so that nothing that the worker imports leads to polars.
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
