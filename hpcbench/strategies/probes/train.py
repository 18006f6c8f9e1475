"""Probes: replicas that train without communication, then measure blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.probe_records import ProbeResults
from hpcbench.strategies.probes.entry import PROBE_BLOCKS
from hpcbench.strategies.traffic import parse_messages
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.distributed.world import any_rank
from hpcbench.worker.measure.host import peak_resident_bytes
from hpcbench.worker.microbench.block_probes import measure_blocks, measure_optimizer_updates, measure_pass_overlaps
from hpcbench.worker.strategy import DataParallelStrategy


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


class ProbeBlocksStrategy(_IndependentReplicasStrategy):
    """Ranks side by side: every block and update is timed; or a pass through the blocks beside collectives."""

    def measure(self, feed: DataFeed, check: Callable[[], None]) -> ProbeResults:
        batch, budget_s = feed.batch(0, self.replica), float(self.options["budget_s"])
        if overlaps := parse_messages(str(self.options["overlaps"])):
            probes = measure_pass_overlaps(self, batch, overlaps, budget_s, check)
            return ProbeResults(base_memory_bytes=self.base_memory_bytes, overlaps=probes)
        readings = measure_blocks(self, batch, budget_s, check, partial(any_rank, self.context))
        return ProbeResults(
            base_memory_bytes=self.base_memory_bytes,
            updates=measure_optimizer_updates(self.spec, self.module),
            blocks=readings.blocks,
            pass_s=readings.pass_s,
        )


TRAININGS = {PROBE_BLOCKS: ProbeBlocksStrategy}
"""The class of each probe that trains."""
