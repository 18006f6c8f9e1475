"""Probes: replicas that train without communication, then measure kernels, collectives or other training loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.catalog import options_with_defaults
from hpcbench.parallel.gradient_buckets import MIB
from hpcbench.parallel.traffic import parse_messages
from hpcbench.results.probe_records import ProbeResults
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.distributed.world import any_rank
from hpcbench.worker.measure.host import peak_resident_bytes
from hpcbench.worker.microbench import kernel_probes
from hpcbench.worker.microbench.block_probes import measure_blocks, measure_pass_overlaps
from hpcbench.worker.microbench.collective_probes import measure_collectives, measure_messages
from hpcbench.worker.microbench.plain_loops import measure_loops
from hpcbench.worker.strategies.base import DataParallelStrategy

_LARGEST_CUDA_MESSAGE_BYTES = 1024 * MIB
"""Links of GPUs are not saturated below some 128 MiB, and sharded models send units of a GiB."""


def largest_message_bytes(spec: RunSpec, device_memory_bytes: int | None) -> int:
    """Return the largest message to time: the option's if the run sets it, on cuda else as large as memory allows.

    An all_gather holds a message of every rank; all of them take a quarter of the memory at most.

    Args:
        spec: The run.
        device_memory_bytes: Of a cuda device; ``None`` on a cpu.
    """
    if device_memory_bytes is None or "largest_mb" in spec.options:
        return int(float(options_with_defaults(spec)["largest_mb"]) * MIB)
    return min(_LARGEST_CUDA_MESSAGE_BYTES, device_memory_bytes // (4 * spec.ranks))


class _IndependentReplicasStrategy(DataParallelStrategy):
    """Every rank trains alone; the memory in use before the model exists is recorded first."""

    measures_machine = True

    def __init__(self) -> None:
        self.base_memory_bytes = peak_resident_bytes()

    def setup(self, model: nn.Sequential, spec: RunSpec, context: RankContext) -> None:
        super().setup(model, spec, context)
        if context.device.type == "cuda":
            # On cuda the allocator's bytes are measured, and it has allocated nothing yet.
            self.base_memory_bytes = 0


class ProbeLayersStrategy(_IndependentReplicasStrategy):
    """One rank; after its steps every kernel and optimizer update is timed alone."""

    def measure(self, feed: DataFeed, check: Callable[[], None]) -> ProbeResults:
        shares = _numbers_of_parts(self.options["shares"])
        batch = feed.batch(0, self.replica)
        kernels = kernel_probes.measure_kernels(self, batch, shares, float(self.options["budget_s"]), check)
        updates = kernel_probes.measure_optimizer_updates(self.spec, self.module)
        return ProbeResults(base_memory_bytes=self.base_memory_bytes, kernels=kernels, updates=updates)


def _numbers_of_parts(shares: object) -> list[int]:
    return sorted({int(share) for share in str(shares).split(",")})


class ProbeBlocksStrategy(_IndependentReplicasStrategy):
    """Ranks side by side: blocks as wholes, layers in parts, and updates are timed; or a pass beside collectives."""

    def measure(self, feed: DataFeed, check: Callable[[], None]) -> ProbeResults:
        if overlaps := parse_messages(str(self.options["overlaps"])):
            budget_s = float(self.options["budget_s"])
            probes = measure_pass_overlaps(self, feed.batch(0, self.replica), overlaps, budget_s, check)
            return ProbeResults(base_memory_bytes=self.base_memory_bytes, overlaps=probes)
        shares = _numbers_of_parts(self.options["shares"])
        parts = [share for share in shares if share > 1]
        budget_s = float(self.options["budget_s"]) / (2 if parts else 1)
        batch, agree = feed.batch(0, self.replica), partial(any_rank, self.context)
        readings = measure_blocks(self, batch, budget_s, check, agree, accumulates=bool(self.options["accumulates"]))
        kernels = []
        if parts:
            # Where a layer has no weights, fewer samples are as fewer channels.
            splits = ("samples", *kernel_probes.LAYER_SPLITS, kernel_probes.CHANNELS)
            kernels = kernel_probes.measure_kernels(self, batch, parts, budget_s, check, splits=splits, agree=agree)
        return ProbeResults(
            base_memory_bytes=self.base_memory_bytes,
            kernels=kernels,
            updates=kernel_probes.measure_optimizer_updates(self.spec, self.module),
            blocks=readings.blocks,
            pass_s=readings.pass_s,
        )


class ProbeMessagesStrategy(_IndependentReplicasStrategy):
    """Ranks that send the messages of a sweep, in its groups."""

    def measure(self, feed: DataFeed, check: Callable[[], None]) -> ProbeResults:
        shapes = parse_messages(str(self.options["messages"]))
        probes = measure_messages(self.spec, self.context, shapes, float(self.options["budget_s"]), check)
        return ProbeResults(base_memory_bytes=self.base_memory_bytes, collectives=probes)


class ProbeCollectivesStrategy(_IndependentReplicasStrategy):
    """Ranks that train side by side without communication; then collectives, contention and overlap are timed."""

    def measure(self, feed: DataFeed, check: Callable[[], None]) -> ProbeResults:
        device = self.context.device
        memory_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        largest_bytes = largest_message_bytes(self.spec, memory_bytes)
        collectives, overlaps = measure_collectives(
            self.spec, self.context, largest_bytes, float(self.options["budget_s"]), check
        )
        return ProbeResults(base_memory_bytes=self.base_memory_bytes, collectives=collectives, overlaps=overlaps)


class ProbeLoopsStrategy(_IndependentReplicasStrategy):
    """One rank; after its steps the tool's step is timed in turns with those of other training loops."""

    def measure(self, feed: DataFeed, check: Callable[[], None]) -> ProbeResults:
        loops = measure_loops(self, feed, float(self.options["budget_s"]), check)
        return ProbeResults(base_memory_bytes=self.base_memory_bytes, loops=loops)
