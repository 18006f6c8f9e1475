"""Turns cuDNN and NCCL's shared devices off in the workers of a day under the stub of CUDA.

Convolutions and attention then take torch's own kernels and cuBLAS, and ranks of one device gloo. cuDNN and NCCL are
programs of their own above the runtime, which no stub can stand in for function by function.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class _BeforeTheWorker(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        del path, target
        if name == "hpcbench.worker.models.build":
            import torch

            torch.backends.cudnn.enabled = False
            torch.backends.cuda.enable_cudnn_sdp(False)
            torch.cuda.nccl.version = lambda: (2, 28, 9)


sys.meta_path.insert(0, _BeforeTheWorker())
