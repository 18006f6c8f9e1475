"""Costs of pipelines: the synchronous ones, fairscale's Pipe among them, and PipeDream with its weight versions.

``docs/formulas.md`` derives the formulas."""

from __future__ import annotations

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import CostModel, StepBreakdown
from hpcbench.predict.peak_memory import MemoryBreakdown
from hpcbench.predict.row_cost import copy_op
from hpcbench.predict.strategy_cost import Cost
from hpcbench.predict.tensor_sizes import input_bytes, input_gradient_bytes
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.pipeline.entry import pipedream_staleness
from hpcbench.strategies.pipeline.memory_cost import stage_memory
from hpcbench.strategies.pipeline.rank_cost import PipelineRank
from hpcbench.strategies.pipeline.schedule_simulator import StageTimes, steady_step_time_s
from hpcbench.strategies.pipeline.schedules import BACKWARD, FORWARD, UPDATE, message_after
from hpcbench.strategies.pipeline.step_cost import PipelineStep, RankStepTimes, step_from_schedule
from hpcbench.strategies.pipeline.weight_versions import stage_actions_over_steps, stage_step_actions
from hpcbench.strategies.traffic import Traffic, merge_calls


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
        if rank == spec.pp_degree - 1:
            # The loss is that of the whole batch, whose outputs are gathered: a copy, and the gradients of all samples.
            output_bytes, others = (
                input_bytes(table.layers[-1]),
                spec.batch_size - spec.batch_size // spec.micro_batches,
            )
            gathered = spec.batch_size * output_bytes + others * input_gradient_bytes(table.layers[-1])
            memory = msgspec.structs.replace(memory, activations_bytes=memory.activations_bytes + gathered)
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


class PipedreamCost(Cost):
    """The asynchronous pipeline. A step is the window of ``micro_batches`` minibatches in the steady state."""

    def traffic(self, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Return activations and gradients of a window, and all gradients of weights at every update."""
        pipeline, count = PipelineRank(spec, table, rank), spec.micro_batches
        calls = []
        for action in stage_step_actions(
            pipeline.layout, pipedream_staleness(spec), pipeline.index, count, count, False
        ):
            if message_after(action, pipeline.layout) is not None:
                size = pipeline.message_bytes(action._replace(micro_batch=action.micro_batch % count))
                calls.append(Traffic(operation="send", group_size=2, payload_bytes=size))
            if action.kind == UPDATE:
                calls += pipeline.bucket_traffic(pipeline.parameter_bytes(pipeline.index))
        return merge_calls(calls)

    def memory(self, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Return the memory of a pipeline's rank, with further versions of its weights and an input that came early.

        Where micro-batches are added up to one update (2bw), the gradients of the one that has just gone backward are
        there beside the sum.
        """
        pipeline, staleness, count = PipelineRank(spec, table, rank), pipedream_staleness(spec), spec.micro_batches
        actions = stage_actions_over_steps(
            pipeline.layout, staleness, pipeline.index, count, 2 + spec.pp_degree // count
        )
        has_sums = staleness.double_buffered and count > 1
        summed = sum(pipeline.parameter_bytes(pipeline.index)) if has_sums else 0
        memory = stage_memory(pipeline, actions, summed)
        early = max(pipeline.micro_batch_sizes) * pipeline.boundary_bytes(pipeline.index - 1) if pipeline.index else 0
        return msgspec.structs.replace(
            memory,
            communication_bytes=memory.communication_bytes + early,
            stashed_bytes=(staleness.versions_held(pipeline.index) - 1) * memory.parameters_bytes,
        )

    def step(self, spec: RunSpec, table: LayerTable, cost_model: CostModel) -> StepBreakdown:
        """Return the time of a window; all minibatches are taken to be as large as their mean."""
        step = PipelineStep(PipelineRank(spec, table, 0), cost_model)
        staleness, count = pipedream_staleness(spec), spec.micro_batches
        computed, with_comm = zip(*(_stage_times(step, stage) for stage in range(spec.pp_degree)), strict=True)
        updates = 1 if staleness.double_buffered else count
        compute_s = [count * (times.forward_s + times.backward_s) + updates * times.update_s for times in computed]
        slowest = max(range(len(computed)), key=compute_s.__getitem__)
        calls = [(step.send(kind, slowest, spec.batch_size / count), count) for kind in (FORWARD, BACKWARD)]
        calls += [(call, updates) for call in step.buckets(slowest, slowest)]
        return step_from_schedule(
            cost_model,
            RankStepTimes.of(compute_s[slowest], calls),
            steady_step_time_s(with_comm, staleness, count),
            steady_step_time_s(computed, staleness, count),
        )


def _stage_times(step: PipelineStep, stage: int) -> tuple[StageTimes, StageTimes]:
    """Return the times of one stage for a minibatch: computation alone, and with communication.

    Gradients are summed over replicas before an update, while it waits.
    """
    spec = step.pipeline.spec
    samples = spec.batch_size / spec.micro_batches
    times = step.pass_times(stage, samples, step.pipeline.is_recomputed(0, spec.micro_batches))
    update_s = step.update_s(stage)
    if pipedream_staleness(spec).updates_behind(stage):
        # Older minibatches still need the weights that the update is about to overwrite.
        copies = [copy_op(spec, size).kernel for size in step.pipeline.parameter_bytes(stage)]
        update_s += sum(map(step.cost_model.kernel_s, copies))
    return StageTimes(times.forward_s, times.backward_s, update_s), StageTimes(
        step.overlapped_s(FORWARD, stage, samples, times.forward_s),
        step.overlapped_s(BACKWARD, stage, samples, times.backward_s),
        update_s + sum(call.seconds for call in step.buckets(stage, stage)),
        step.send(FORWARD, stage, samples).seconds,
        step.send(BACKWARD, stage, samples).seconds,
    )


COSTS = {
    "model": PipelineCost,
    "gpipe": PipelineCost,
    "1f1b": PipelineCost,
    "interleaved_1f1b": PipelineCost,
    "zero_bubble": PipelineCost,
    "pipedream": PipedreamCost,
    "fairscale_pipe": FairscalePipeCost,
}
"""The cost of each strategy."""
