"""ZeRO-1 (Rajbhandari et al.

2020) with torch's ZeroRedundancyOptimizer: DDP in which each rank updates its shard of the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.strategies.base import chosen_options, optimizer_class_and_arguments
from hpcbench.worker.strategies.data import DdpStrategy


class Zero1Strategy(DdpStrategy):
    """Optimizer state is held once among the replicas; updated parameters are broadcast by their owners."""

    def make_optimizer(self, spec: RunSpec, place: RankContext) -> torch.optim.Optimizer:
        """A sharded optimizer over the replicas' group."""
        kind, arguments = optimizer_class_and_arguments(spec)
        make: Any = ZeroRedundancyOptimizer
        made: torch.optim.Optimizer = make(
            list(self.module.parameters()),
            kind,
            process_group=place.group,
            parameters_as_bucket_view=chosen_options(spec)["parameters_as_bucket_view"],
            **arguments,
        )
        return made
