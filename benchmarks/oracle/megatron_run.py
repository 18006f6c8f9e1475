"""Differences of Megatron-LM's pipelines from ours: variations of the oracle's formulas, each with its reason.

Messages between stages are fp16, cut among the ranks that share a stage (Narayanan et al. 2021, section 4.1);
recomputation leaves out embedding and head; gradients are summed over replicas in fp16, at the end in one call unless
torch's DDP does it; the optimizer keeps fp32 weights beside fp16 ones. Not priced: sums of gradients over
micro-batches, which the product that makes a weight's gradient adds to (gradient accumulation fusion; the runs of 2021
are older and summed apart); the sum of the embedding's two gradients over first and last stage, collectives of the
split vocabulary, reading data.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.oracle.megatron_table import Gpt, kept_in_block
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import CostModel, StepBreakdown
from hpcbench.predict.machine import Machine
from hpcbench.predict.stream_simulator import CommCall
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.pipeline.rank_cost import PipelineRank
from hpcbench.strategies.pipeline.schedule_simulator import RankTimes
from hpcbench.strategies.pipeline.step_cost import ChunkPassTimes, PipelineStep
from hpcbench.strategies.traffic import Traffic

HALF_BYTES = 2
STATE_BYTES = 18
"""Of a parameter: fp16 weight, fp32 gradient, fp32 weight, two moments (Korthikanti et al. 2022, figure 1)."""
_GRADIENT_SHARE = 2
"""A table's fp32 bytes over those that are sent."""
_UPDATE_RATIO = 54 / 28
"""Adam moves 28 bytes of fp32 a parameter; copies to fp32 and back, unscaling, the norm and clearing another 26."""


class MegatronCostModel(CostModel):
    """Kernels of Megatron-LM: products of weights' gradients add to earlier ones."""

    def __init__(self, machine: Machine, spec: RunSpec) -> None:
        super().__init__(machine, spec)
        self._accumulations = 0.0


class MegatronRun(PipelineRank):
    """One rank of one run."""

    def __init__(self, spec: RunSpec, table: LayerTable, rank: int, gpt: Gpt) -> None:
        super().__init__(spec, table, rank)
        self.gpt = gpt
        self.sequence_parallel = bool(spec.options.get("sequence_parallel"))

    def boundary_bytes(self, chunk: int) -> int:
        """One rank's part, in fp16."""
        return HALF_BYTES * self.gpt.numbers // self.spec.tp_degree

    def tensor_parallel_traffic(self, chunk: int, samples: float, recomputed: bool = False) -> list[Traffic]:
        """Add the all_gather of what was received in parts, where the next layer needs the whole.

        Sequence parallelism has a reduce_scatter and an all_gather for each all_reduce: as much on a ring.
        """
        calls = super().tensor_parallel_traffic(chunk, samples, recomputed)
        if self.tensor_rank is None or self.sequence_parallel or self.layout.chunks == 1:
            return calls
        part = round(samples * self.boundary_bytes(chunk))
        return [*calls, Traffic(operation="all_gather", group_size=self.spec.tp_degree, payload_bytes=part)]

    def blocks_of(self, chunk: int) -> int:
        """Return the number of transformer blocks alone."""
        return sum(1 <= block <= self.gpt.layers for block in self.blocks[chunk])

    def activation_bytes(self, chunk: int, samples: int) -> int:
        """Return Korthikanti et al. 2022, equations 2 and 4, by the rows of a block."""
        kept, degree = kept_in_block(self.gpt).values(), self.spec.tp_degree
        split, whole = sum(row.split for row in kept), sum(row.whole for row in kept)
        part = (split + whole) // degree if self.sequence_parallel else split // degree + whole
        return samples * part * self.blocks_of(chunk)

    def kept_bytes(self, chunk: int, micro_batch: int) -> int:
        """Return nothing beside blocks, which keep their input where they are computed again."""
        samples = self.micro_batch_sizes[micro_batch]
        if self.is_recomputed(micro_batch, len(self.micro_batch_sizes)):
            return samples * HALF_BYTES * self.gpt.numbers * self.blocks_of(chunk)
        return self.activation_bytes(chunk, samples)

    def state_bytes(self) -> int:
        """Return the weights, gradients and optimizer state of the rank."""
        return STATE_BYTES * sum(sum(self.parameter_bytes(chunk)) for chunk in self.chunks) // 4


class _MegatronStep(PipelineStep):
    """Recomputes blocks only, and sums gradients in fp16."""

    def __init__(self, run: MegatronRun, cost_model: CostModel, overlaps: bool) -> None:
        super().__init__(run, cost_model)
        self._overlaps = overlaps

    def _pass_times(self, chunk: int, samples: float, recomputed: bool) -> ChunkPassTimes:
        times = super()._pass_times(chunk, samples, recomputed)
        if not recomputed:
            return times
        rows = zip(self.pipeline.rows[chunk], self.chunk_kernels(chunk, samples), strict=True)
        outside = sum(self.cost_model.kernel_s(kernels.forward) for row, kernels in rows if not self._is_in_block(row))
        return times._replace(backward_s=times.backward_s - outside)

    def _is_in_block(self, row: int) -> bool:
        return 1 <= self.pipeline.table.layers[row].block < self.pipeline.table.blocks - 1

    def _update_s(self, rank: int) -> float:
        return super()._update_s(rank) * _UPDATE_RATIO

    def _all_reduces(self, rank: int, sizes: Sequence[int]) -> list[CommCall]:
        group = self.replicas(rank)
        payloads: list[float] = [sum(sizes)]
        if self._overlaps:
            payloads = [call.traffic.payload_bytes for call in super()._all_reduces(rank, sizes) if call.traffic]
        if group.ranks < 2 or not sizes:
            return []
        return [
            self.cost_model.collective("all_reduce", payload / _GRADIENT_SHARE, group, "bucket") for payload in payloads
        ]

    def _reduced_at(self, rank: int, times: RankTimes) -> float:
        if self._overlaps or self.replicas(rank).ranks < 2:
            return super()._reduced_at(rank, times)
        calls = [call for chunk in self.layout.chunks_of(rank) for call in self.buckets(rank, chunk)]
        return times.end + sum(call.seconds for call in calls)


def step_of_run(cost_model: CostModel, run: MegatronRun, overlaps: bool) -> StepBreakdown:
    """Return a step of ``run``; ``overlaps``: gradients are sent during the backward pass."""
    return _MegatronStep(run, cost_model, overlaps).breakdown(run.spec.strategy)
