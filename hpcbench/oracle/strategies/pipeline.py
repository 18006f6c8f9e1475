"""Costs of the synchronous pipelines, fairscale's Pipe among them. ``docs/formulas.md`` derives the formulas."""

from __future__ import annotations

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel, StepBreakdown
from hpcbench.oracle.peak_memory import MemoryBreakdown
from hpcbench.oracle.pipeline_memory import stage_memory
from hpcbench.oracle.pipeline_rank import PipelineRank
from hpcbench.oracle.pipeline_step import PipelineStep
from hpcbench.oracle.strategies.base import Cost
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.pipeline.schedules import message_after
from hpcbench.parallel.traffic import Traffic, merge_calls


class PipelineCost(Cost):
    """Stages of blocks that pass micro-batches on, by the schedule that the strategy is named after."""

    def traffic(self, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Return activations and gradients by the schedule, gradients of weights by the buckets of each chunk."""
        pipeline = PipelineRank(spec, table, rank)
        sent = [
            pipeline.message_bytes(action)
            for action in pipeline.actions
            if message_after(action, pipeline.layout) is not None
        ]
        for tie in pipeline.ties:
            sent += [tie.size_bytes] * tie.sends(pipeline.index)
        calls = [Traffic(operation="send", group_size=2, payload_bytes=size) for size in sent]
        calls += pipeline.tensor_parallel_step_traffic()
        for sizes in [
            *(pipeline.parameter_bytes(chunk) for chunk in pipeline.chunks),
            pipeline.tied_bytes(pipeline.index),
        ]:
            calls += pipeline.bucket_traffic(sizes)
        return merge_calls(calls)

    def memory(self, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        pipeline = PipelineRank(spec, table, rank)
        return stage_memory(pipeline, pipeline.actions)

    def step(self, spec: RunSpec, table: LayerTable, cost_model: CostModel) -> StepBreakdown:
        return PipelineStep(PipelineRank(spec, table, 0), cost_model).breakdown(spec.strategy)


class FairscalePipeCost(Cost):
    """``gpipe`` whose stages are the devices of one process; ``rank`` counts the devices."""

    def traffic(self, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Return nothing: devices of one process copy from each other."""
        return []

    def memory(self, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Return the memory of a device as of that rank of ``gpipe``.

        All micro-batches are one graph, in which autograd sums a tensor's gradients before it hands them out: the sum
        so far, the summand and the new sum.
        """
        pipeline = PipelineRank(_gpipe_spec(spec, spec.pp_degree), table, rank)
        memory = stage_memory(pipeline, pipeline.actions)
        if rank:
            # The samples are on the first device.
            memory = msgspec.structs.replace(memory, samples_bytes=0)
        if spec.micro_batches == 1:
            return memory
        largest = max((size for chunk in pipeline.chunks for size in pipeline.parameter_bytes(chunk)), default=0)
        return msgspec.structs.replace(memory, gradients_bytes=memory.gradients_bytes + largest)

    def step(self, spec: RunSpec, table: LayerTable, cost_model: CostModel) -> StepBreakdown:
        """Return a step of ``gpipe`` on devices of one node; a cpu is one device."""
        stages = 1 if cost_model.machine.device == "cpu" else spec.pp_degree
        return PipelineStep(PipelineRank(_gpipe_spec(spec, stages), table, 0), cost_model).breakdown("gpipe")


def _gpipe_spec(spec: RunSpec, stages: int) -> RunSpec:
    """Return the same run with a rank for each device."""
    return msgspec.structs.replace(spec, strategy="gpipe", pp_degree=stages, tasks_per_node=stages, devices_per_task=1)
