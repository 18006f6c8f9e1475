"""Costs of PipeDream, the asynchronous pipeline with weight versions, in its steady state."""

from __future__ import annotations

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel
from hpcbench.oracle.model_parallel import copy_event
from hpcbench.oracle.peak_memory import MemoryBreakdown
from hpcbench.oracle.pipeline_rank import PipelineRank
from hpcbench.oracle.pipeline_step import PipelineActionCosts, PipelineStep, RankStepTimes, step_from_schedule
from hpcbench.oracle.step_time import StepBreakdown
from hpcbench.oracle.strategies.pipeline import PipelineCost
from hpcbench.parallel.gradient_buckets import DEFAULT_BUCKET_CAP_MB, MIB, bucket_payload_bytes
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.pipeline.schedules import BACKWARD, FORWARD, UPDATE, message_after
from hpcbench.parallel.pipeline.steady_state import StageTimes, steady_step_time_s
from hpcbench.parallel.pipeline.weight_versions import stage_actions_over_steps, stage_step_actions
from hpcbench.parallel.strategies.pipedream import pipedream_staleness
from hpcbench.parallel.traffic import Traffic, merge_calls


def pipedream_step(clock: CostModel, plan: PipelineRank) -> StepBreakdown:
    """``micro_batches`` minibatches, all taken to be as large as their mean; ``plan`` is of any rank."""
    spec, delay = plan.spec, pipedream_staleness(plan.spec)
    pipeline = PipelineStep(PipelineActionCosts(plan, clock))
    count = spec.micro_batches
    stages = [_stage_times(pipeline, place, True) for place in range(spec.pp_degree)]
    alone = [_stage_times(pipeline, place, False) for place in range(spec.pp_degree)]
    updates = 1 if delay.double_buffered else count
    own_s = [count * (one.forward_s + one.backward_s) + updates * one.update_s for one in alone]
    place = max(range(len(alone)), key=own_s.__getitem__)
    reduced = pipeline.buckets(place, place)
    sends = [pipeline.times.sends(kind, place, spec.batch_size / count) for kind in (FORWARD, BACKWARD)]
    calls = [(call, count) for call in sends if call is not None] + [(call, updates) for call in reduced]
    spent = RankStepTimes(
        own_s[place],
        sum(times * call.seconds for call, times in calls),
        sum(times * call.latency_s for call, times in calls),
    )
    return step_from_schedule(
        clock, spent, steady_step_time_s(stages, delay, count), steady_step_time_s(alone, delay, count)
    )


def _stage_times(pipeline: PipelineStep, place: int, with_comm: bool) -> StageTimes:
    """What one stage does for a minibatch. Gradients are summed over replicas before an update, while it waits."""
    times, spec = pipeline.times, pipeline.plan.spec
    samples = spec.batch_size / spec.micro_batches
    busy = times.busy(place, samples, times.plan.is_recomputed(0, spec.micro_batches))
    update_s = times.update_s(place)
    if pipedream_staleness(spec).updates_behind(place):
        # Older minibatches still need what the update is about to overwrite.
        update_s += sum(copy_event(times.clock, spec, size).seconds for size in times.plan.own_tensors(place))
    if not with_comm:
        return StageTimes(busy.forward_s, busy.backward_s, update_s)
    forward, backward = (times.sends(kind, place, samples) for kind in (FORWARD, BACKWARD))
    return StageTimes(
        times.beside_messages_s(FORWARD, place, samples, busy.forward_s),
        times.beside_messages_s(BACKWARD, place, samples, busy.backward_s),
        update_s + sum(call.seconds for call in pipeline.buckets(place, place)),
        0.0 if forward is None else forward.seconds,
        0.0 if backward is None else backward.seconds,
    )


class PipedreamCost:
    """``oracle.cost.Cost`` of the asynchronous pipeline in its steady state. Derivations are in docs/formulas.md."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Activations and gradients of a steady step's window, and all gradients of weights at every update."""
        run = PipelineRank(spec, table, rank)
        m = spec.micro_batches
        calls = []
        for action in stage_step_actions(run.layout, pipedream_staleness(spec), run.place, m, m, False):
            one = action._replace(micro_batch=action.micro_batch % m)
            if message_after(action, run.layout) is not None:
                calls.append(Traffic(operation="send", group_size=2, payload_bytes=run.message_bytes(one)))
            if action.kind == UPDATE and spec.dp_degree > 1:
                calls += [
                    Traffic(operation="all_reduce", group_size=spec.dp_degree, payload_bytes=payload)
                    for payload in bucket_payload_bytes(run.own_tensors(run.place), int(DEFAULT_BUCKET_CAP_MB * MIB))
                ]
        return merge_calls(calls)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """As of other pipelines, with further versions of the stage's weights and the input that has come early.

        Where micro-batches are added up to one update (2bw), the gradients of the one that has just gone backward are
        there beside the sum.
        """
        run, delay, m = PipelineRank(spec, table, rank), pipedream_staleness(spec), spec.micro_batches
        plain = PipelineCost.memory(spec, table, rank)
        actions = stage_actions_over_steps(run.layout, delay, run.place, m, 2 + spec.pp_degree // m)
        early = max(run.sizes) * run.boundary_bytes(run.place - 1) if run.place else 0
        return msgspec.structs.replace(
            plain,
            gradients_bytes=plain.parameters_bytes * (2 if delay.double_buffered and m > 1 else 1),
            activations_bytes=run.alive_bytes(actions) + run.recomputed_bytes(),
            communication_bytes=run.waiting_bytes() + early,
            stashed_bytes=(delay.versions_held(run.place) - 1) * plain.parameters_bytes,
        )

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """By what bounds the steady state."""
        return pipedream_step(clock, PipelineRank(spec, table, 0))
