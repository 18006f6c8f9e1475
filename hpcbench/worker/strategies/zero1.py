"""ZeRO-1 (Rajbhandari et al. 2020) as torch has it: DDP, with each rank updating its share of the parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from hpcbench.config.spec import RunSpec
from hpcbench.worker.strategies.base import Place, chosen_options, optimizer_kind
from hpcbench.worker.strategies.ddp import Ddp


class Zero1(Ddp):
    """Optimizer state is held once among the replicas; updated parameters are broadcast by their owners."""

    def make_optimizer(self, spec: RunSpec, place: Place) -> torch.optim.Optimizer:
        """A sharded optimizer over the replicas' group."""
        kind, arguments = optimizer_kind(spec)
        make: Any = ZeroRedundancyOptimizer
        made: torch.optim.Optimizer = make(
            list(self.module.parameters()),
            kind,
            process_group=place.group,
            parameters_as_bucket_view=chosen_options(spec)["parameters_as_bucket_view"],
            **arguments,
        )
        return made
