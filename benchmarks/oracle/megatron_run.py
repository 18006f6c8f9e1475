"""Where Megatron-LM's pipelines differ from ours: variations of the oracle's formulas, each with its reason.

Messages between stages are fp16, cut among the ranks that share a stage (Narayanan et al. 2021, section 4.1);
recomputation leaves out embedding and head; gradients are summed over replicas in fp16, at the end in one call unless
torch's DDP does it; the optimizer keeps fp32 weights beside fp16 ones. Not priced: the sum of the embedding's two
gradients over first and last stage, collectives of the split vocabulary, reading data.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.oracle.megatron_table import Gpt, kept_in_block
from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel
from hpcbench.oracle.pipeline_rank import PipelineRank
from hpcbench.oracle.pipeline_step import ChunkPassTimes, PipelineActionCosts, PipelineStep, step_from_schedule
from hpcbench.oracle.step_time import StepBreakdown
from hpcbench.oracle.stream_simulator import CommCall
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.pipeline.schedule_simulator import RankTimes
from hpcbench.parallel.traffic import Traffic

HALF_BYTES = 2
STATE_BYTES = 18
"""Of a parameter: fp16 weight, fp32 gradient, fp32 weight, two moments (Korthikanti et al. 2022, figure 1)."""
_GRADIENT_SHARE = 2
"""A table's fp32 bytes over those that are sent."""
_UPDATE_RATIO = 54 / 28
"""Adam moves 28 bytes of fp32 a parameter; copies to fp32 and back, unscaling, the norm and clearing another 26."""


class MegatronRun(PipelineRank):
    """One rank of one run."""

    def __init__(self, spec: RunSpec, table: LayerTable, rank: int, gpt: Gpt) -> None:
        super().__init__(spec, table, rank)
        self.gpt = gpt
        self.by_tokens = bool(spec.options.get("sequence_parallel"))

    def boundary_bytes(self, chunk: int) -> int:
        """One rank's part, in fp16."""
        return HALF_BYTES * self.gpt.numbers // self.spec.tp_degree

    def shared(self, chunk: int, samples: float, again: bool = False) -> list[Traffic]:
        """With the all_gather of what was received in parts, where the next layer wants the whole.

        Sequence parallelism has a reduce_scatter and an all_gather for each all_reduce: as much on a ring.
        """
        found = super().shared(chunk, samples, again)
        if self.split is None or self.by_tokens or self.layout.chunks == 1:
            return found
        part = round(samples * self.boundary_bytes(chunk))
        return [*found, Traffic(operation="all_gather", group_size=self.spec.tp_degree, payload_bytes=part)]

    def blocks_of(self, chunk: int) -> int:
        """Transformer blocks alone."""
        return sum(1 <= block <= self.gpt.layers for block in self.blocks[chunk])

    def _activation_bytes(self, chunk: int, samples: int) -> int:
        """Korthikanti et al. 2022, equations 2 and 4, by the rows of a block."""
        kept, ranks = kept_in_block(self.gpt).values(), self.spec.tp_degree
        split, whole = sum(one.split for one in kept), sum(one.whole for one in kept)
        own = (split + whole) // ranks if self.by_tokens else split // ranks + whole
        return samples * own * self.blocks_of(chunk)

    def _kept_bytes(self, chunk: int, micro_batch: int) -> int:
        """Nothing beside blocks, which keep their input where they are computed again."""
        samples = self.sizes[micro_batch]
        if self.is_recomputed(micro_batch, len(self.sizes)):
            return samples * HALF_BYTES * self.gpt.numbers * self.blocks_of(chunk)
        return self._activation_bytes(chunk, samples)

    def state_bytes(self) -> int:
        """Weights, gradients and the optimizer's state of all that the rank holds."""
        return STATE_BYTES * sum(sum(self.own_tensors(chunk)) for chunk in self.chunks) // 4


class _Times(PipelineActionCosts):
    """Recomputes blocks only."""

    def _busy(self, chunk: int, samples: float, again: bool) -> ChunkPassTimes:
        busy = super()._busy(chunk, samples, again)
        if not again:
            return busy
        rows = zip(self.plan.rows[chunk], self.passes(chunk, samples), strict=True)
        outside = sum(self.clock.kernel_s(one.forward) for row, one in rows if not self._is_in_block(row))
        return busy._replace(backward_s=busy.backward_s - outside)

    def _is_in_block(self, row: int) -> bool:
        return 1 <= self.plan.table.layers[row].block < self.plan.table.blocks - 1

    def _update_s(self, place: int) -> float:
        return super()._update_s(place) * _UPDATE_RATIO


class _Pipeline(PipelineStep):
    """Sums gradients in fp16."""

    def __init__(self, times: PipelineActionCosts, overlaps: bool) -> None:
        super().__init__(times)
        self._overlaps = overlaps

    def _all_reduces(self, place: int, sizes: Sequence[int]) -> list[CommCall]:
        group = self.replicas(place)
        if not self._overlaps:
            return [self.clock.call("all_reduce", sum(sizes) / _GRADIENT_SHARE, group, "bucket")]
        calls = super()._all_reduces(place, sizes)
        return [
            self.clock.call("all_reduce", call.traffic.payload_bytes / _GRADIENT_SHARE, group, "bucket")
            for call in calls
            if call.traffic is not None
        ]

    def _summed(self, place: int, course: RankTimes) -> float:
        if self._overlaps or self.replicas(place).ranks < 2:
            return super()._summed(place, course)
        calls = [call for chunk in self.layout.chunks_of(place) for call in self.buckets(place, chunk)]
        return course.end + sum(call.seconds for call in calls)


def step_of_run(clock: CostModel, plan: MegatronRun, overlaps: bool) -> StepBreakdown:
    """As ``oracle.steps.pipeline.step_of_pipeline``; ``overlaps``: gradients are sent while others are made."""
    pipeline = _Pipeline(_Times(plan, clock), overlaps)
    schedule = plan.spec.strategy
    place = max(range(plan.layout.ranks), key=pipeline.compute_s)
    return step_from_schedule(
        clock, pipeline.spent(place), max(pipeline.paces(schedule, True)), max(pipeline.paces(schedule, False))
    )
