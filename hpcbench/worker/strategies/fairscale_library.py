"""Access to fairscale 0.4.13, which was written for torch 1.x, and its sharded optimizer."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from typing import Any

from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.failure import install_hint
from hpcbench.worker.strategies.base import optimizer_class_and_arguments


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


def make_oss_optimizer(module: nn.Module, spec: RunSpec, context: RankContext, **options: Any) -> Any:
    """Create fairscale's sharded optimizer (OSS) over the parameters of ``module``."""
    optimizer_class, arguments = optimizer_class_and_arguments(spec)
    return import_fairscale("optim.oss").OSS(
        list(module.parameters()), optim=optimizer_class, group=context.group, **arguments, **options
    )
