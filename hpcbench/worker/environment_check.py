"""``doctor``: report which packages work in this interpreter."""

from __future__ import annotations

import importlib
import json
import os
import platform
import socket
import sys
import warnings
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
    modules = {name: _check_module(name) for name in REQUIRED_MODULES + OPTIONAL_MODULES}
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


def _check_module(name: str) -> dict[str, Any]:
    try:
        module = _load_module(name)
    except BaseException as error:  # noqa: BLE001 - a broken package can raise anything, and that is the finding
        return {"works": False, "error": f"{type(error).__name__}: {error}", "hint": install_hint(name)}
    top = sys.modules.get(name.partition(".")[0], module)
    return {"works": True, "version": str(getattr(top, "__version__", "")) or None}


def _load_module(name: str) -> Any:
    """Import ``name``, and for some packages more, so that they are known to work."""
    if name == "torchvision":
        from hpcbench.worker.models.build import import_torchvision_models

        return import_torchvision_models()
    if name == "horovod.torch":
        from hpcbench.worker.strategies.horovod import load_horovod

        return load_horovod()
    with warnings.catch_warnings():
        if name == "fairscale":
            # Its decorators for autocast have moved since; they still work.
            warnings.simplefilter("ignore", FutureWarning)
            importlib.import_module("fairscale.nn.data_parallel")
            importlib.import_module("fairscale.optim.oss")
        return importlib.import_module(name)


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
