"""``doctor``: report which packages work in this interpreter."""

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

REQUIRED_MODULES = ("torch", "msgspec", "psutil")
OPTIONAL_MODULES = ("numpy", "PIL", "h5py", "torchvision", "sklearn", "horovod.torch", "fairscale")


def print_environment_check() -> int:
    """Print one JSON document on stdout; 0 where all that a worker needs to start is available, else 1."""
    report = check_environment()
    print(json.dumps(report, indent=1))  # noqa: T201 - the document that was asked for
    return 0 if report["ready"] else 1


def check_environment() -> dict[str, Any]:
    """``ready``, the interpreter, and per module ``{"works", "version", "error", "hint"}``; for torch its devices."""
    modules = {name: _check_module(name) for name in REQUIRED_MODULES + OPTIONAL_MODULES if name not in _MODULE_LOADERS}
    modules |= {name: _check_module(name, load) for name, load in _MODULE_LOADERS.items()}
    report: dict[str, Any] = {
        "ready": all(modules[name]["works"] for name in REQUIRED_MODULES),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": os.cpu_count(),
        "modules": modules,
    }
    if modules["torch"]["works"]:
        report["torch"] = _torch_facts()
    return report


def _check_module(name: str, load: Callable[[], Any] | None = None) -> dict[str, Any]:
    try:
        module = load() if load else importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - a broken package can raise anything, and that is the finding
        return {"works": False, "error": f"{type(error).__name__}: {error}", "hint": install_hint(name)}
    top = sys.modules.get(name.partition(".")[0], module)
    return {"works": True, "version": str(getattr(top, "__version__", "")) or None}


def _load_torchvision() -> Any:
    from hpcbench.worker.models.build import import_torchvision_models

    return import_torchvision_models()


def _load_horovod() -> Any:
    from hpcbench.worker.distributed.horovod_init import load_horovod

    return load_horovod()


def _load_fairscale() -> Any:
    with warnings.catch_warnings():
        # Its decorators for autocast have moved since; they still work.
        warnings.simplefilter("ignore", FutureWarning)
        for part in ("nn.data_parallel", "optim.oss"):
            importlib.import_module(f"fairscale.{part}")
    return sys.modules["fairscale"]


_MODULE_LOADERS = {"torchvision": _load_torchvision, "horovod.torch": _load_horovod, "fairscale": _load_fairscale}
"""Packages that need more than an import to be known to work."""


def _torch_facts() -> dict[str, Any]:
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
