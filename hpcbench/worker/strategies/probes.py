"""Calibration runs: replicas that train without communication, then measure kernels or collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.schema import ProbeResults
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.measure.host import read_peak_memory
from hpcbench.worker.microbench.collective_probes import measure_collectives
from hpcbench.worker.microbench.kernel_probes import measure_kernels, measure_optimizer_updates
from hpcbench.worker.strategies.base import DataParallelStrategy, chosen_options


class _IndependentReplicasStrategy(DataParallelStrategy):
    """Every rank trains by itself; the first thing that it does is to look at how much memory it has taken so far."""

    def __init__(self) -> None:
        # On cuda the allocator counts, which has given nothing away yet.
        self.base_memory_bytes = read_peak_memory(torch.device("cpu")).memory_bytes

    def setup(self, model: nn.Sequential, spec: RunSpec, place: RankContext) -> None:
        """As a lone device."""
        super().setup(model, spec, place)
        self.place = place
        if place.device.type == "cuda":
            self.base_memory_bytes = 0


class ProbeLayersStrategy(_IndependentReplicasStrategy):
    """One rank; after its steps every kernel by itself."""

    def measure(self, feed: DataFeed, check: Callable[[], None]) -> ProbeResults:
        """Kernels and updates."""
        options = chosen_options(self.spec)
        shares = sorted({int(one) for one in str(options["shares"]).split(",")})
        batch = feed.batch(0, self.replica)
        kernels = measure_kernels(self, batch, shares, float(options["budget_s"]), check)
        updates = measure_optimizer_updates(self.spec, self.module)
        return ProbeResults(base_memory_bytes=self.base_memory_bytes, kernels=kernels, updates=updates)


class ProbeCollectivesStrategy(_IndependentReplicasStrategy):
    """Ranks that train side by side without a word; then every collective between them."""

    def measure(self, feed: DataFeed, check: Callable[[], None]) -> ProbeResults:
        """Collectives, contention and overlap."""
        options = chosen_options(self.spec)
        largest_bytes = int(float(options["largest_mb"]) * 2**20)
        collectives, overlaps = measure_collectives(
            self.spec, self.place, largest_bytes, float(options["budget_s"]), check
        )
        return ProbeResults(base_memory_bytes=self.base_memory_bytes, collectives=collectives, overlaps=overlaps)
