"""Pipelines: what a stage sends and holds, from its blocks' rows of the table and the schedule itself."""

from __future__ import annotations

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.pipeline_run import PipelineRun
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.pipeline import step_of_pipeline
from hpcbench.parallel.buckets import BUCKET_CAP_MB, MIB, bucket_bytes
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.schedule import message_after
from hpcbench.parallel.traffic import Traffic, merged


class PipelineCost:
    """``oracle.cost.Cost`` of all synchronous pipelines. Derivations are in docs/formulas.md."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Activations and gradients by the schedule, gradients of weights by the buckets of each chunk."""
        run = PipelineRun(spec, table, rank)
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
                for payload in bucket_bytes(sizes, int(BUCKET_CAP_MB * MIB))
            ]
        return merged(calls)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """The stage's weights, and the activations of the micro-batches that are alive together when most are."""
        run = PipelineRun(spec, table, rank)
        parameters = sum(sum(run.own_tensors(chunk)) for chunk in run.chunks)
        parameters += sum(names.bytes for names in run.ties if run.holds(names))
        copies = {"sgd": 1 if spec.momentum else 0}.get(spec.optimizer, 2)
        return Memory(
            parameters_bytes=parameters,
            gradients_bytes=parameters + run.added_bytes(),
            optimizer_bytes=copies * parameters,
            activations_bytes=run.alive_bytes(run.actions) + run.recomputed_bytes(),
            buffers_bytes=run.buffer_bytes(),
            communication_bytes=run.waiting_bytes(),
        )

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """By the schedule that its ranks execute."""
        return step_of_pipeline(clock, PipelineRun(spec, table, 0), spec.strategy)
