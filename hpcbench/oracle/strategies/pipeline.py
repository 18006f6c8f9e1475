"""Costs of the synchronous pipelines, fairscale's Pipe among them. ``docs/formulas.md`` derives the formulas."""

from __future__ import annotations

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel
from hpcbench.oracle.peak_memory import MemoryBreakdown
from hpcbench.oracle.pipeline_rank import PipelineRank
from hpcbench.oracle.pipeline_step import pipeline_step
from hpcbench.oracle.step_time import StepBreakdown
from hpcbench.parallel.gradient_buckets import DEFAULT_BUCKET_CAP_MB, MIB, bucket_payload_bytes
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.pipeline.schedules import message_after
from hpcbench.parallel.traffic import Traffic, merge_calls


class PipelineCost:
    """``oracle.cost.Cost`` of all synchronous pipelines. Derivations are in docs/formulas.md."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Activations and gradients by the schedule, gradients of weights by the buckets of each chunk."""
        run = PipelineRank(spec, table, rank)
        calls = [
            Traffic(operation="send", group_size=2, payload_bytes=run.message_bytes(action))
            for action in run.actions
            if message_after(action, run.layout) is not None
        ]
        calls += run.shared_layers()
        for names in run.ties:
            if run.place == names.first:
                calls += [Traffic(operation="send", group_size=2, payload_bytes=names.bytes)] * (names.holders - 1)
            elif run.holds(names):
                calls.append(Traffic(operation="send", group_size=2, payload_bytes=names.bytes))
        if run.replicas > 1:
            late = [names.bytes for names in run.ties if run.holds(names)]
            groups = [run.own_tensors(chunk) for chunk in run.chunks]
            calls += [
                Traffic(operation="all_reduce", group_size=run.replicas, payload_bytes=payload)
                for sizes in [*groups, late]
                for payload in bucket_payload_bytes(sizes, int(DEFAULT_BUCKET_CAP_MB * MIB))
            ]
        return merge_calls(calls)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """The stage's weights, and the activations of the micro-batches that are alive together when most are."""
        run = PipelineRank(spec, table, rank)
        parameters = sum(sum(run.own_tensors(chunk)) for chunk in run.chunks)
        parameters += sum(names.bytes for names in run.ties if run.holds(names))
        copies = {"sgd": 1 if spec.momentum else 0}.get(spec.optimizer, 2)
        return MemoryBreakdown(
            parameters_bytes=parameters,
            gradients_bytes=parameters + run.added_bytes(),
            optimizer_bytes=copies * parameters,
            activations_bytes=run.alive_bytes(run.actions) + run.recomputed_bytes(),
            buffers_bytes=run.buffer_bytes(),
            communication_bytes=run.waiting_bytes(),
        )

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """By the schedule that its ranks execute."""
        return pipeline_step(clock, PipelineRank(spec, table, 0), spec.strategy)


class FairscalePipeCost:
    """``oracle.cost.Cost`` of ``fairscale_pipe``."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Devices of one process copy from each other: no collectives."""
        return []

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Of device number ``rank``, as of that rank of ``gpipe``; a cpu, being all of them, holds their sum.

        All micro-batches are one graph, in which autograd sums a tensor's gradients before it hands them out: the sum
        so far, what is added and the new sum.
        """
        gpipe = _gpipe_spec(spec, spec.pp_degree)
        found, run = PipelineCost.memory(gpipe, table, rank), PipelineRank(gpipe, table, rank)
        if spec.micro_batches == 1:
            return found
        largest = max((size for chunk in run.chunks for size in run.own_tensors(chunk)), default=0)
        return msgspec.structs.replace(found, gradients_bytes=found.gradients_bytes + largest)

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """``gpipe`` on devices of one node; a cpu is one device."""
        stages = 1 if clock.machine.device == "cpu" else spec.pp_degree
        return pipeline_step(clock, PipelineRank(_gpipe_spec(spec, stages), table, 0), "gpipe")


def _gpipe_spec(spec: RunSpec, stages: int) -> RunSpec:
    """The same with a rank for each device."""
    return msgspec.structs.replace(spec, strategy="gpipe", pp_degree=stages, tasks_per_node=stages, devices_per_task=1)
