"""Runs that measure the machine: their steps are those of replicas that pass nothing to each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hpcbench.config.spec import RunSpec
from hpcbench.results.schema import Probe
from hpcbench.worker.data.feed import Feed
from hpcbench.worker.memory import peak
from hpcbench.worker.probes.collectives import measure_collectives
from hpcbench.worker.probes.kernels import measure_kernels, measure_updates
from hpcbench.worker.strategies.base import DataParallel, Place, chosen_options


class _Alone(DataParallel):
    """Every rank trains by itself; the first thing that it does is to look at how much memory it has taken so far."""

    def __init__(self) -> None:
        # On cuda the allocator counts, which has given nothing away yet.
        self.base_memory_bytes = peak(torch.device("cpu")).memory_bytes

    def setup(self, model: nn.Sequential, spec: RunSpec, place: Place) -> None:
        """As a lone device."""
        super().setup(model, spec, place)
        self.place = place
        if place.device.type == "cuda":
            self.base_memory_bytes = 0


class ProbeLayers(_Alone):
    """One rank; after its steps every kernel by itself."""

    def measure(self, feed: Feed, check: Callable[[], None]) -> Probe:
        """Kernels and updates."""
        options = chosen_options(self.spec)
        shares = sorted({int(one) for one in str(options["shares"]).split(",")})
        batch = feed.batch(0, self.replica)
        kernels = measure_kernels(self, batch, shares, float(options["budget_s"]), check)
        updates = measure_updates(self.spec, self.module)
        return Probe(base_memory_bytes=self.base_memory_bytes, kernels=kernels, updates=updates)


class ProbeCollectives(_Alone):
    """Ranks that train side by side without a word; then every collective between them."""

    def measure(self, feed: Feed, check: Callable[[], None]) -> Probe:
        """Collectives, contention and overlap."""
        options = chosen_options(self.spec)
        largest_bytes = int(float(options["largest_mb"]) * 2**20)
        collectives, overlaps = measure_collectives(
            self.spec, self.place, largest_bytes, float(options["budget_s"]), check
        )
        return Probe(base_memory_bytes=self.base_memory_bytes, collectives=collectives, overlaps=overlaps)
