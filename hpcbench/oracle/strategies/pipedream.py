"""PipeDream: what a stage sends, and what its versions of weights and its minibatches under way take."""

from __future__ import annotations

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.pipeline_run import PipelineRun
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.pipedream import step_of_pipedream
from hpcbench.oracle.strategies.pipeline import PipelineCost
from hpcbench.parallel.buckets import BUCKET_CAP_MB, MIB, bucket_bytes
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.schedule import UPDATE, message_after
from hpcbench.parallel.strategies.pipedream import delay_of
from hpcbench.parallel.traffic import Traffic, merged
from hpcbench.parallel.versions import step_window, steps_of


class PipedreamCost:
    """``oracle.cost.Cost`` of the asynchronous pipeline in its steady state. Derivations are in docs/formulas.md."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Activations and gradients of a steady step's window, and all gradients of weights at every update."""
        run = PipelineRun(spec, table, rank)
        m = spec.micro_batches
        calls = []
        for action in step_window(run.layout, delay_of(spec), run.place, m, m, False):
            one = action._replace(micro_batch=action.micro_batch % m)
            if message_after(action, run.layout) is not None:
                calls.append(Traffic(operation="send", group_size=2, payload_bytes=run.message_bytes(one)))
            if action.kind == UPDATE and spec.dp_degree > 1:
                calls += [
                    Traffic(operation="all_reduce", group_size=spec.dp_degree, payload_bytes=payload)
                    for payload in bucket_bytes(run.own_tensors(run.place), int(BUCKET_CAP_MB * MIB))
                ]
        return merged(calls)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """As of other pipelines, with further versions of the stage's weights and the input that has come early.

        Where micro-batches are added up to one update (2bw), the gradients of the one that has just gone backward are
        there beside the sum.
        """
        run, delay, m = PipelineRun(spec, table, rank), delay_of(spec), spec.micro_batches
        plain = PipelineCost.memory(spec, table, rank)
        actions = steps_of(run.layout, delay, run.place, m, 2 + spec.pp_degree // m)
        early = max(run.sizes) * run.boundary_bytes(run.place - 1) if run.place else 0
        return msgspec.structs.replace(
            plain,
            gradients_bytes=plain.parameters_bytes * (2 if delay.double_buffered and m > 1 else 1),
            activations_bytes=run.alive_bytes(actions) + run.recomputed_bytes(),
            communication_bytes=run.waiting_bytes() + early,
            stashed_bytes=(delay.held(run.place) - 1) * plain.parameters_bytes,
        )

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """By what bounds the steady state."""
        return step_of_pipedream(clock, PipelineRun(spec, table, 0))
