"""Versions of what a number was measured with."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import hpcbench

_PACKAGES = ("numpy", "torchvision", "scikit-learn", "horovod", "fairscale", "pillow", "h5py", "triton",
             "pytorch-triton", "mkl", "intel-openmp", "tbb", "intel-extension-for-pytorch")  # fmt: skip
_FAMILY = re.compile(r"(nvidia_[a-z0-9_]+)-([^-]+)\.dist-info")
"""CUDA's libraries come as one distribution each, by many names."""
_ONLY_WATCHES = "nvidia-ml-py"


def packages() -> dict[str, str]:
    """Installed distributions that can change a measurement."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    for folder in reversed(sys.path):
        with contextlib.suppress(OSError):
            for entry in Path(folder or ".").glob("nvidia_*.dist-info"):
                if match := _FAMILY.fullmatch(entry.name):
                    found[match[1].replace("_", "-")] = match[2]
    found.pop(_ONLY_WATCHES, None)
    return dict(sorted(found.items()))


def torch_build() -> dict[str, Any]:
    """How torch was built and what it uses of this processor; what a build does not say is absent."""
    shown = torch.__config__.show()
    found = {
        "blas": _first(r"BLAS_INFO=(\w+)", shown),
        "mkl": _first(r"Math Kernel Library Version ([0-9.]+)", shown),
        "onednn": _first(r"MKL-DNN v(\S+)", shown),
        "openmp": _first(r"OpenMP (\d+)", shown),
        "parallel_backend": _first(r"parallel backend: (.+)", torch.__config__.parallel_info()),
        "cpu_capability": _first(r"CPU capability usage: (\S+)", shown),
        "with": " ".join(re.findall(r"USE_(CUDA|ROCM|MPI|NCCL|GLOO|MKLDNN|OPENMP|XPU)=(?:ON|1)\b", shown)),
    }
    return {key: value for key, value in found.items() if value}


def git_commit() -> str | None:
    """The commit of this package's checkout, with ``-dirty`` where files were changed; ``None`` outside of one."""
    root = Path(hpcbench.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip() or None
    return None


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1].strip() if found else None
