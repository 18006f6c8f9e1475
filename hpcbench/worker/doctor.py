"""``doctor``: what works in this interpreter. Tells what is missing, and never fails for it."""

from __future__ import annotations

import importlib
import json
import os
import platform
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

from hpcbench.worker.failure import install_hint

NEEDED = ("torch", "msgspec", "psutil")
OPTIONAL = ("numpy", "PIL", "h5py", "torchvision", "sklearn", "horovod.torch", "fairscale")


def doctor() -> int:
    """Print one JSON document on stdout; 0 where all that a worker needs to start is there, else 1."""
    report = examine()
    print(json.dumps(report, indent=1))  # noqa: T201 - the document that was asked for
    return 0 if report["ready"] else 1


def examine() -> dict[str, Any]:
    """``ready``, the interpreter, and per module ``{"works", "version", "error", "hint"}``; for torch its devices."""
    modules = {name: _module(name) for name in NEEDED + OPTIONAL if name not in _LOADED}
    modules |= {name: _module(name, load) for name, load in _LOADED.items()}
    report: dict[str, Any] = {
        "ready": all(modules[name]["works"] for name in NEEDED),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": os.cpu_count(),
        "modules": modules,
    }
    if modules["torch"]["works"]:
        report["torch"] = _torch()
    return report


def _module(name: str, load: Callable[[], Any] | None = None) -> dict[str, Any]:
    try:
        module = load() if load else importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - a broken package can raise anything, and that is the finding
        return {"works": False, "error": f"{type(error).__name__}: {error}", "hint": install_hint(name)}
    top = sys.modules.get(name.partition(".")[0], module)
    return {"works": True, "version": str(getattr(top, "__version__", "")) or None}


def _torchvision() -> Any:
    from hpcbench.worker.models.vision import torchvision_models

    return torchvision_models()


def _horovod() -> Any:
    from hpcbench.worker.horovod_library import load

    return load()


def _fairscale() -> Any:
    with warnings.catch_warnings():
        # Its decorators for autocast have moved since; they still work.
        warnings.simplefilter("ignore", FutureWarning)
        for part in ("nn.data_parallel", "optim.oss"):
            importlib.import_module(f"fairscale.{part}")
    return sys.modules["fairscale"]


_LOADED = {"torchvision": _torchvision, "horovod.torch": _horovod, "fairscale": _fairscale}
"""Packages that need more than an import to be known to work."""


def _torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    there = dist.is_available()
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(number) for number in range(devices)],
        "gloo": there and dist.is_gloo_available(),
        "nccl": there and dist.is_nccl_available(),
        "threads": torch.get_num_threads(),
    }
