"""``compile = true``: torch.compile from outside, and what it compiled when."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def compile_in_place(module: nn.Module, backend: Any = "inductor") -> None:
    """Compile ``module`` so that its names stay. Before DDP wraps it: torch advises so, and still cuts the backward
    graph at DDP's buckets. Compilation itself happens in the first step of each shape.
    """
    module.compile(backend=backend)


def graphs_compiled() -> int:
    """How many graphs this process has compiled so far; 0 where this torch does not count them."""
    try:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])
    except (ImportError, AttributeError, KeyError, TypeError, ValueError):
        return 0


def recompiled_warning(count: int) -> str | None:
    """What to do about graphs that were compiled within the timed steps."""
    if count == 0:
        return None
    return (
        f"{count} graph{'s' if count > 1 else ''} compiled within the timed steps: a shape was new there. "
        "drop_last = true leaves out partial batches; more warmup_steps let every shape come before"
    )


def uncompiled() -> AbstractContextManager[Any]:
    """Within it compiled modules are called as they were written, and nothing is compiled."""
    # Importing the compiler takes seconds: who has not used it so far does not need this.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
