"""One device, no parallelism."""

from __future__ import annotations

from hpcbench.worker.strategies.base import DataParallel


class Single(DataParallel):
    """The model as it is: the reference of every speed-up."""
